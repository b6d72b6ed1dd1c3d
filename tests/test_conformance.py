"""The part of the conformance run that belongs to every `make test`: all ops, their first samples.

`python -m tests.conformance` runs everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gt.client import creation
from tests.conformance.expected import has_entry, stale_entries, unexpected
from tests.conformance.opdb import Task, TaskReport, dtypes_of, ops_by_name, run_task
from tests.conformance.pool import Pool, Seat
from tests.conformance.sides import GTSide
from tests.slow_parameters import some_of

OPS_A_TEST = 24
JOBS = 2
MASKED_SAMPLES = 16  # searched for each number of inputs that need a gradient
_NAMES = sorted(ops_by_name(), key=str.lower)
_CHUNKS = [_NAMES[start : start + OPS_A_TEST] for start in range(0, len(_NAMES), OPS_A_TEST)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(JOBS, "embedded") as pool:
        yield pool


def _fixed_tasks(op: str) -> Iterator[Task]:
    """Where a failure is expected all samples run, as it need not be the first that fails."""
    for dtype in dtypes_of(op):
        if has_entry(op):
            yield Task(op, dtype)
        else:
            yield Task(op, dtype, 1, backward=dtype in ("float32", "bfloat16"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ops", _CHUNKS, ids=lambda ops: f"{ops[0]}..{ops[-1]}")
def test_ops_give_what_torch_gives(pool: Pool, ops: list[str]) -> None:
    reports = list(pool.run([task for op in ops for task in _fixed_tasks(op)]))
    found = [f"{f.op} {f.variant} {f.dtype} sample {f.sample}: {f.reason}" for f in unexpected(reports)]
    found += stale_entries(reports)
    assert not found, "\n".join([f"{len(found)} failures", *sorted(found)])


@pytest.fixture(scope="module")
def sharded_pool() -> Iterator[Pool]:
    with Pool(JOBS, "sharded") as pool:
        yield pool


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ops", _CHUNKS, ids=lambda ops: f"{ops[0]}..{ops[-1]}")
def test_ops_give_what_torch_gives_on_shards(sharded_pool: Pool, ops: list[str]) -> None:
    """Tensors laid out at random over meshes of up to eight workers, partial and uneven ones included."""
    tasks = [Task(op, "float32", 1) for op in ops if "float32" in dtypes_of(op)]
    found = [f"{f.op} {f.variant} sample {f.sample}: {f.reason}" for f in unexpected(list(sharded_pool.run(tasks)))]
    assert not found, "\n".join([f"{len(found)} failures", *sorted(found)])


# Ops that choose the format of their result, or whose gradients depend on it, in the formats that models use.
_FORMATTED = [
    name
    for name, op in ops_by_name().items()
    if name.startswith(("nn.functional.", "linalg.", "fft.")) or op.name in ("cat", "stack", "roll", "clone", "where")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "format_"),
    [("embedded", "permuted"), ("sharded", "channels_last"), ("embedded", "uploaded expanded")],
)
def test_ops_give_what_torch_gives_in_memory_formats(request: pytest.FixtureRequest, mode: str, format_: str) -> None:
    chosen = request.getfixturevalue("pool" if mode == "embedded" else "sharded_pool")
    tasks = [Task(op, "float32", 1, format=format_) for op in _FORMATTED if "float32" in dtypes_of(op)]
    found = [f"{f.op} {f.variant} sample {f.sample}: {f.reason}" for f in unexpected(list(chosen.run(tasks)))]
    assert not found, "\n".join([f"{len(found)} failures", *sorted(found)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ops", some_of(_CHUNKS, 2), ids=lambda ops: f"{ops[0]}..{ops[-1]}")
def test_gradients_of_some_inputs_are_torchs(sharded_pool: Pool, ops: list[str]) -> None:
    """Every choice of the inputs that need a gradient, on shards. `make conformance` does it on one worker too."""
    tasks = [Task(op, "float32", MASKED_SAMPLES, masks=True) for op in ops if "float32" in dtypes_of(op)]
    found = [f"{f.op} {f.variant} sample {f.sample}: {f.reason}" for f in unexpected(list(sharded_pool.run(tasks)))]
    assert not found, "\n".join([f"{len(found)} failures", *sorted(found)])


class _OffByOne(GTSide):
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return creation.to(tensor + 1)


def test_a_wrong_value_is_found() -> None:
    side = _OffByOne("embedded")
    side.reopen()
    report = run_task(Task("sin", "float32", 1), side)
    side.close()
    assert [failure.variant for failure in report.failures][:2] == ["forward", "backward"]
    assert "values" in report.failures[0].reason


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_that_dies_fails_its_task_and_no_other() -> None:
    seat = Seat("embedded")
    seat.give(Task("sin", "int64", 1))
    seat.process.kill()
    died = _await_report(seat)
    seat.give(Task("cos", "int64", 1))
    next_one = _await_report(seat)
    seat.stop()
    assert [failure.variant for failure in died.failures] == ["process"]
    assert next_one.passed == 1


def _await_report(seat: Seat) -> TaskReport:
    assert seat.pipe.poll(60)
    report = seat.take()
    assert report is not None
    return report
