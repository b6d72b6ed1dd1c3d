"""Flags that stay on the device: read where a value leaves the worker, with the same result as flags read at once."""

import torch

from gt.core.messages import Failure, RunOp
from gt.worker.exchange.deferred_failure_flags import DeferredFailureFlags, FlagSource
from gt.worker.failed_value import FailedValue
from gt.worker.late_failures import LateFailures

FAILURE = Failure(1, "aten.mm.default", (), 0, 1, "RuntimeError", "no value", "")
SOURCE = FlagSource((0, 1), 3, 0)


class Texts:
    def read(self, members, number, task):
        assert FlagSource(members, number, task) == SOURCE
        return FailedValue(FAILURE)


def run(inputs, outputs):
    return RunOp(7, inputs, outputs, (), 0, 0)


def late_failures(*flags):
    """A worker that has run an exchange from id 1 to 2, then ops of other ids, all on real values."""
    tensors = {ident: torch.ones(1) for ident in range(1, 8)}
    deferred = DeferredFailureFlags(torch.device("cpu"), Texts())
    late = LateFailures(tensors, deferred, lambda command: (command,))
    exchange = run((1,), (2,))
    commands = [run((1,), (3,)), exchange, run((2, 3), (4,)), run((4,), (5,)), run((3,), (6,))]
    late.follow(commands)
    for flag in flags:
        deferred.add(torch.tensor(flag), SOURCE)
    deferred.assign(exchange)
    return late, deferred, tensors


def failed_ids(tensors):
    return {ident for ident, value in tensors.items() if isinstance(value, FailedValue)}


def test_exactly_the_dependents_of_a_flagged_exchange_fail():
    late, _, tensors = late_failures(0.0, 2.0)
    late.settle()
    assert failed_ids(tensors) == {2, 4, 5}
    assert tensors[5].failure == FAILURE


def test_without_a_set_flag_all_values_stay():
    late, _, tensors = late_failures(0.0, 0.0)
    late.settle()
    assert failed_ids(tensors) == set()


def test_a_worker_in_doubt_says_so_until_its_flags_are_read():
    late, deferred, _ = late_failures(1.0)
    assert deferred.doubt.item() == 1
    late.settle()
    assert deferred.doubt.item() == 0


def test_flags_are_read_once():
    late, deferred, tensors = late_failures(1.0)
    late.settle()
    tensors[2] = torch.ones(1)
    late.settle()
    assert failed_ids(tensors) == {4, 5} and len(deferred) == 0


def test_a_value_that_was_freed_is_not_made_again():
    late, _, tensors = late_failures(1.0)
    del tensors[4]
    late.settle()
    assert 4 not in tensors and 5 in failed_ids(tensors)


def test_commands_without_flags_are_forgotten():
    late, deferred, tensors = late_failures()
    late.follow([run((6,), (7,))])
    deferred.add(torch.tensor(1), SOURCE)
    deferred.assign(late._commands[-1])
    late.settle()
    assert failed_ids(tensors) == {7}
