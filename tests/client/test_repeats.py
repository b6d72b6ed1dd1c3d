"""Programs whose repeated ops are sent as segments give the same values and errors as without."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gt
from gt.client import active_session
from gt.client.program_matcher import HotPathStats, ProgramMatcher
from gt.core.messages import DefineProgram, FreeTensors, PlaceTensor, RunOp, RunProgram
from gt.core.program import Program
from gt.core.settings import HotPathSettings
from tests.records import ADD, ROWS

MODES = [(1, None), (2, "virtual"), (3, "virtual")]
WITH_PROCESSES = [*MODES, (2, "local")]
SIZE = 6


def run(program: Callable[[], Any], workers: int, mode: str | None, is_on: bool) -> tuple[Any, HotPathStats]:
    """The result of a program in a session of its own, and the statistics of its hot paths."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GT_HOTPATH", str(int(is_on)))
        environment.setenv("GT_HOTPATH_MIN_SEQ", "2")
        gt.init(workers=workers, mode=mode or "embedded")
        try:
            torch.manual_seed(0)
            result = program()
            gc.collect()
            assert active_session.active is not None
            active_session.active.wait_for_work()
            return result, active_session.active.matcher.stats()
        finally:
            gt.shutdown()


def check(program: Callable[[], Any], workers: int = 1, mode: str | None = None) -> HotPathStats:
    """Run a program with and without segments, and compare the results."""
    expected, _ = run(program, workers, mode, is_on=False)
    found, stats = run(program, workers, mode, is_on=True)
    assert repr(found) == repr(expected)
    return stats


def value(tensor: torch.Tensor) -> Any:
    """The bits of a tensor, or the error of reading it."""
    try:
        return tensor.cpu().tolist()
    except gt.OpError as error:
        return str(error).split("\n  ")[0]


@pytest.mark.parametrize(("workers", "mode"), WITH_PROCESSES)
def test_a_chain_becomes_segments(workers: int, mode: str | None) -> None:
    def program() -> Any:
        x = gt.arange(float(SIZE * SIZE)).reshape(SIZE, SIZE).clone()
        for step in range(400):
            x = x * (1 + step / 1000)
            x = x - 0.5
        return value(x)

    stats = check(program, workers, mode)
    assert stats.ops > 600


@pytest.mark.parametrize(("workers", "mode"), WITH_PROCESSES)
def test_training_steps_become_segments(workers: int, mode: str | None) -> None:
    def program() -> Any:
        model = gt.to(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(12):
            x = gt.to(torch.randn(SIZE, 8))
            loss = torch.nn.functional.mse_loss(torch.nn.functional.dropout(model(x), 0.1), x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            if step % 3 == 0:
                losses.append(loss.item())
        return losses, [value(p) for p in model.parameters()]

    stats = check(program, workers, mode)
    assert stats.hits > 10


@pytest.mark.parametrize(("workers", "mode"), MODES)
@pytest.mark.parametrize("position", range(8))
def test_a_failure_at_any_position(position: int, workers: int, mode: str | None) -> None:
    """An op of the sixth repetition fails on the worker; others, and other repetitions, are not touched."""

    def program() -> Any:
        x = gt.ones(SIZE, SIZE)
        kept, failures = [], []
        rows = gt.arange(SIZE)
        for step in range(9):
            y = x.clone()
            index = rows + (100 if step == 5 else 0)
            for place in range(8):
                if place == position:
                    picked = y.index_select(0, index)
                else:
                    y = y * 1.5
                    y += 1.0
                z = y.max(dim=1)
            kept += [value(y), value(z.values), value(z.indices)]
            failures.append(value(picked))
        return kept, failures

    stats = check(program, workers, mode)
    assert stats.hits > 2


@pytest.mark.parametrize(("workers", "mode"), MODES)
@pytest.mark.parametrize("position", range(6))
def test_dependents_of_a_failure_inside_a_segment(position: int, workers: int, mode: str | None) -> None:
    """The failed value is used, and overwritten, by later ops of its segment."""

    def program() -> Any:
        results = []
        rows = gt.arange(SIZE)
        x = gt.ones(SIZE, SIZE)
        for step in range(6):
            y = x + 1.0
            weight = gt.zeros(SIZE, SIZE)
            for place in range(6):
                if place == position:
                    y = y.index_select(0, rows + (100 if step == 4 else 0))
                y = y * 2.0
                weight += 1.0
                weight.add_(y)
            results.append((value(y), value(weight)))
        return results

    check(program, workers, mode)


def test_deviations_are_counted_with_their_lines() -> None:
    def program() -> Any:
        x = gt.ones(4)
        for step in range(12):
            for _ in range(8):
                x = x * 1.25
                x = x + 1.0
            if step == 9:
                x = x.exp()
            x = x - 3.0
            x = x / 2.0
            x.sum().item()
        return value(x)

    _, stats = run(program, 1, None, is_on=True)
    assert stats.segments and stats.hits
    assert any(reason == "another op, shape or constant" for reason, _ in stats.deviations)


def test_statistics_tell_of_segments_and_deviations() -> None:
    def program() -> Any:
        x = gt.ones(4)
        for step in range(8):
            for _ in range(10):
                x = x * 0.5
                x = x + 1.0
            if step == 6:
                x = x.exp()
            x = x - 3.0
            x.sum().item()
        return gt.debug.get_worker_stats()

    stats, _ = run(program, 1, None, is_on=True)
    assert stats[0].segments >= 1 and stats[0].ops > stats[0].replayed_ops > 40
    assert stats.hot_paths.segments >= 1 and stats.hot_paths.hits >= 3
    lines = [line for reason, line in stats.hot_paths.deviations if reason == "another op, shape or constant"]
    assert lines and all("test_repeats.py" in line for line in lines)


def test_segments_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gt.client.program_matcher.MAX_CANDIDATES", 3)

    def program() -> Any:
        x = gt.ones(4)
        for size in range(1, 9):
            for _ in range(6):
                for _ in range(size):
                    x = x * 0.5
                    x = x + size
                x.sum().item()
        return value(x)

    assert check(program).segments > 3


def test_a_changed_number_is_no_deviation() -> None:
    def program() -> Any:
        x, results = gt.ones(4), []
        for step in range(20):
            for place in range(8):
                x = x * (step + place / 10)
                x = x - step
            results.append(value(x))
            x = gt.ones(4) * 0.5
        return results

    stats = check(program)
    assert stats.ops > stats.misses


@pytest.mark.parametrize("operands", ["same", "other"])
def test_the_pattern_of_tensors_is_compared(operands: str) -> None:
    """The same ops at the same lines, on the same tensor twice or on two tensors."""

    def program() -> Any:
        a, b = gt.ones(4), gt.full((4,), 2.0)
        results = []
        for step in range(16):
            left, right = (a, a if (step % 3 == 2) == (operands == "same") else b)
            y = left + right
            for _ in range(8):
                y = y * left
                y = y - right
            right += 1.0
            results.append(value(y))
        return results, value(a), value(b)

    check(program)


def test_memory_is_freed_inside_a_segment() -> None:
    """A chain of large tensors never holds more than a few of them on the worker."""

    def program() -> Any:
        x = gt.zeros(256, 1024)
        with gt.debug.memory() as memory:
            for _ in range(6):
                for _ in range(40):
                    x = x + 1.0
                x.sum().item()
        return memory.peak

    with_segments, _ = run(program, 1, None, is_on=True)
    without, _ = run(program, 1, None, is_on=False)
    assert with_segments <= without


def test_nothing_is_left_on_the_worker() -> None:
    def program() -> Any:
        x = gt.ones(8)
        for _ in range(300):
            x = (x * 2.0 - 1.0).relu()
        x.sum().item()
        del x
        gc.collect()
        return gt.debug.get_worker_stats()[0].tensors

    assert [run(program, 1, None, is_on=is_on)[0] for is_on in (True, False)] == [0, 0]


def test_the_tape_shows_the_ops_of_segments() -> None:
    def program() -> Any:
        x = gt.ones(4)
        for _ in range(40):
            x = x * 2.0
            x = x + 1.0
        value(x)
        assert active_session.active is not None
        return [type(instruction).__name__ for instruction in active_session.active.outbox.tape]

    check(program)


def test_the_timeline_shows_the_ops_of_segments() -> None:
    def program() -> Any:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(70):
                x = x * 2.0
                x = x + 1.0
            return x

        x = gt.ones(4)
        for _ in range(3):
            value(chain(x))
        with gt.debug.timeline() as timeline:
            value(chain(x))
        return [(event.op, event.line) for event in timeline.events if event.op.startswith("aten")]

    stats = check(program)
    assert stats.hits > 3


@pytest.mark.parametrize(("workers", "mode"), MODES)
def test_threads_interleave_their_ops(workers: int, mode: str | None) -> None:
    """The queue mixes the ops of threads: segments are found in the mixture or not, and values are those of each."""

    def program() -> Any:
        results: dict[int, Any] = {}

        def chain(number: int) -> None:
            x = gt.full((SIZE, SIZE), float(number))
            for step in range(60):
                for _ in range(4):
                    x = x * 0.75
                    x = x + number
                if step % 20 == number:
                    x = x.cos()
                if step % 25 == 24:
                    value(x)
            results[number] = value(x)

        threads = [threading.Thread(target=chain, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return [results[number] for number in range(3)]

    check(program, workers, mode)


def eager_matcher() -> ProgramMatcher:
    """A matcher that makes segments of all runs of two ops."""
    return ProgramMatcher(HotPathSettings(shortest=2, repetitions=1), itertools.count(900).__next__, lambda: {1: ADD})


def test_ids_that_threads_took_out_of_order_are_no_segment() -> None:
    """An id is given before its op is queued: another thread's op may come between."""
    matcher = ProgramMatcher(
        HotPathSettings(shortest=2, repetitions=1), itertools.count(900).__next__, lambda: {1: ADD}
    )
    for first in (100, 200, 300):
        ids = [first + 1, first, first + 2, first + 3]
        sent, rest = matcher.compress([RunOp(1, (5, 6), (ident,), (), 0, 0) for ident in ids], is_final=True)
        assert [type(instruction) for instruction in sent] == [RunOp] * 4 and not rest


@pytest.mark.parametrize("other", [(0, 0), (1, 1), (1, 0), (-1, 1), (0, -1)])
def test_segments_stand_for_the_very_ops(other: tuple[int, int]) -> None:
    """The same three ops on other results of the run, or on tensors from before it, are another segment."""
    matcher, bodies = eager_matcher(), {}
    for first, picks in ((100, (0, 1)), (200, (0, 1)), (300, other), (400, (0, 1)), (500, other)):
        ids = [5 if pick < 0 else first + pick for pick in picks]
        inputs = [(5, 6), (first, 6), (ids[0], ids[1])]
        ops = [RunOp(1, each, (first + number,), (), 0, 0) for number, each in enumerate(inputs)]
        sent, _ = matcher.compress(list(ops), is_final=True)
        expanded: list[Any] = []
        for instruction in sent:
            if isinstance(instruction, DefineProgram):
                bodies[instruction.program_id] = Program.of(instruction)
            elif isinstance(instruction, RunProgram):
                expanded += bodies[instruction.program_id].expand(instruction)
            else:
                expanded.append(instruction)
        assert expanded == ops
    assert matcher.stats().hits >= 2


@pytest.mark.parametrize("place", [1, 2])
def test_tensors_are_freed_after_their_last_use(place: int) -> None:
    """One that was last used before a segment is freed before it, and one that is placed in it after its last use or,
    if that is later, after it is placed."""
    matcher, programs = eager_matcher(), {}
    for first in (100, 200, 300):
        inputs = [(5, 6), (first, 6), (first + 1, 6)]
        batch: list[Any] = [RunOp(1, each, (first + number,), (), 0, 0) for number, each in enumerate(inputs)]
        batch[2:2] = [FreeTensors((first - 1, first))]
        batch.insert(place, PlaceTensor(first, ROWS, 0))
        sent, _ = matcher.compress(batch, is_final=True)
        programs |= {each.program_id: Program.of(each) for each in sent if isinstance(each, DefineProgram)}
    early, run = sent
    assert isinstance(run, RunProgram)
    assert early == FreeTensors((299,)) and run.dead == (2,)
    expanded = programs[run.program_id].expand(run)
    assert expanded[place] == PlaceTensor(300, ROWS, 0)
    assert expanded.index(FreeTensors((300,))) == max(place + 1, 3)


def test_ids_with_a_gap_are_no_program() -> None:
    matcher = ProgramMatcher(
        HotPathSettings(shortest=2, repetitions=1), itertools.count(900).__next__, lambda: {1: ADD}
    )
    for first in (100, 200, 300):
        ids = [first, first + 1, first + 3]
        sent, _ = matcher.compress([RunOp(1, (5, 6), (ident,), (), 0, 0) for ident in ids], is_final=True)
        assert [type(instruction) for instruction in sent] == [RunOp] * 3


@pytest.mark.parametrize(("workers", "mode"), MODES)
def test_scopes_change_between_repetitions(workers: int, mode: str | None) -> None:
    """Ops in another scope, or in none, are other ops: they run where their scope says."""

    def program() -> Any:
        rows = gt.ShardConfig(axis=0, workers=list(range(workers)))
        gt.register_config("rows", gt.SignalConfig(shard=rows))
        x, specs = gt.ones(SIZE, SIZE), []
        for step in range(18):
            scope = contextlib.nullcontext() if step % 3 == 2 else gt.signal.context("rows")
            with scope:
                for _ in range(5):
                    x = x * 0.5
                    x = x + 1.0
            specs.append(str(x.spec))
        return specs, value(x)

    assert check(program, workers, mode).hits > 5


@pytest.mark.parametrize(("workers", "mode"), MODES)
def test_a_program_goes_on_after_an_exception_of_its_own(workers: int, mode: str | None) -> None:
    def program() -> Any:
        x, errors = gt.ones(SIZE, SIZE), []
        for step in range(16):
            try:
                for place in range(6):
                    x = x * 1.25
                    if step == 11 and place == 3:
                        x = x @ gt.ones(SIZE + 1)
                    x = x - 0.5
            except RuntimeError as error:
                errors.append(type(error).__name__)
        return value(x), errors

    check(program, workers, mode)


# Random programs

STEPS = st.one_of(
    st.tuples(st.sampled_from(["mul", "add", "sub", "add_", "mul_"]), st.integers(0, 3), st.floats(-2, 2, width=16)),
    st.tuples(st.sampled_from(["plus", "times", "plus_", "matmul", "copy_"]), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.sampled_from(["relu", "max", "rand", "view_", "row_", "transpose", "new", "drop"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["read", "pick"]), st.integers(0, 3), st.integers(0, 11)),
    st.tuples(st.just("branch"), st.integers(0, 3), st.integers(2, 4)),
)


def interpret(steps: list[tuple[Any, ...]], count: int) -> Any:  # noqa: PLR0912  (one branch for each kind of step)
    """Run the steps several times on four tensors; numbers change from time to time."""
    tensors = [gt.full((SIZE, SIZE), 0.25 * (n + 1)) for n in range(4)]
    rows, log = gt.arange(SIZE), []
    for repetition in range(count):
        for kind, n, *rest in steps:
            x = tensors[n]
            if kind == "mul":
                tensors[n] = x * (rest[0] + repetition / 8)
            elif kind == "add":
                tensors[n] = x + rest[0]
            elif kind == "sub":
                tensors[n] = x - rest[0]
            elif kind == "add_":
                x += rest[0]
            elif kind == "mul_":
                x.mul_(rest[0])
            elif kind == "plus":
                tensors[n] = x + tensors[rest[0]]
            elif kind == "times":
                tensors[n] = x * tensors[rest[0]]
            elif kind == "plus_":
                x += tensors[rest[0]]
            elif kind == "matmul":
                tensors[n] = (x @ tensors[rest[0]]).tanh()
            elif kind == "copy_":
                x.copy_(tensors[rest[0]])
            elif kind == "relu":
                tensors[n] = x.relu()
            elif kind == "max":
                tensors[n] = x.max(dim=1, keepdim=True).values + x * 0.5
            elif kind == "rand":
                tensors[n] = x + torch.rand_like(x)
            elif kind == "view_":
                x[1:3] *= 0.5
            elif kind == "row_":
                x.t()[0] = 1.5
            elif kind == "transpose":
                tensors[n] = x.t() + 0.125
            elif kind == "new":
                tensors[n] = gt.full((SIZE, SIZE), 0.5)
            elif kind == "drop":
                tensors[n] = tensors[(n + 1) % 4]
            elif kind == "read" and repetition == rest[0]:
                log.append(value(x))
            elif kind == "pick":
                tensors[n] = x.index_select(0, rows + (100 if repetition == rest[0] else 0))
            elif kind == "branch" and repetition % rest[0] == 0:
                tensors[n] = x.cos()
    return log, [value(tensor) for tensor in tensors]


@pytest.mark.parametrize(("workers", "mode"), MODES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=3, max_size=14), count=st.integers(4, 9))
def test_random_programs(workers: int, mode: str | None, steps: list[tuple[Any, ...]], count: int) -> None:
    check(lambda: interpret(steps, count), workers, mode)
