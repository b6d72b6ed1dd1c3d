"""One op of torch's database with one dtype: its samples, run on both sides and compared."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.conformance.formats import FORMATS, applies_to, can_have, shrink
from tests.conformance.judge import judge
from tests.conformance.sides import GTSide
from tests.conformance.variants import (
    Variant,
    differentiable,
    forward_variant,
    mask_variants,
    tangent_variants,
    written_variants,
)

DTYPES = ("float32", "int64", "bool", "bfloat16", "complex64")
VARIANT_SAMPLES = 3  # in-place and out= are a matter of the op more than of its arguments
_DIFFERENTIATED = (torch.float32, torch.bfloat16, torch.complex64)


@dataclass(frozen=True, slots=True)
class Task:
    """An op with a dtype; `samples` limits how many are run (None: all); `format` names the memory format of operands,
    and only samples that can have it are run. `masks`: gradients by some of the inputs only, for the first sample of
    each number of inputs that need one. `tangents`: derivatives of forward mode only."""

    op: str
    dtype: str
    samples: int | None = None
    backward: bool = True
    format: str = ""
    masks: bool = False
    tangents: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    op: str
    variant: str
    dtype: str
    sample: int
    reason: str
    arguments: str


@dataclass(slots=True)
class TaskReport:
    """Checks, one for each sample and stage of a variant; those of `both_raise` are among the passed ones."""

    task: Task
    samples: int = 0
    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    both_raise: list[str] = field(default_factory=list)
    seconds: float = 0.0


@functools.cache
def ops_by_name() -> dict[str, OpInfo]:
    return {op.full_name: op for op in op_db}


def select_ops(patterns: Sequence[str]) -> list[str]:
    """The names of ops, by full name ("add", "linalg.norm.subgradients_at_zero"), name without variant, or glob."""
    if not patterns:
        return list(ops_by_name())
    chosen = [
        name
        for name, op in ops_by_name().items()
        if any(fnmatch.fnmatchcase(name, pattern) or op.name == pattern for pattern in patterns)
    ]
    if not chosen:
        raise ValueError(f"no op of torch's op_db is named {', '.join(patterns)}")
    return chosen


def dtypes_of(op: str) -> list[str]:
    """Those of DTYPES that an op has; all it has where it has none of these (float8 only)."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in ops_by_name()[op].dtypes)
    return [name for name in DTYPES if name in names] or names


def run_task(task: Task, gt_side: GTSide) -> TaskReport:
    start = time.monotonic()
    op, dtype, report = ops_by_name()[task.op], getattr(torch, task.dtype), TaskReport(task)
    grad = task.backward and _differentiates(op, dtype)
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
    format_ = FORMATS.get(task.format)
    if format_ is not None and not can_have(format_, task.op):
        return report
    if format_ is not None:
        samples = (shrink(format_, sample) for sample in samples if applies_to(format_, sample))
    counts: set[int] = set()
    for number, sample in enumerate(itertools.islice(samples, task.samples)):
        if task.masks and differentiable(sample) in counts:
            continue
        counts.add(differentiable(sample))
        report.samples += 1
        for variant in mask_variants(sample) if task.masks else _variants(op, task, number, grad):
            _check(variant, op, sample, number, gt_side, report)
    report.seconds = time.monotonic() - start
    return report


def _variants(op: OpInfo, task: Task, number: int, grad: bool) -> Iterator[Variant]:
    if task.tangents:
        yield from tangent_variants(op) if grad else ()
        return
    yield forward_variant(grad)
    if task.dtype == "float32" and number < VARIANT_SAMPLES:
        yield from written_variants(op, grad)


def _differentiates(op: OpInfo, dtype: torch.dtype) -> bool:
    return dtype in _DIFFERENTIATED and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def _check(variant: Variant, op: OpInfo, sample: Any, number: int, gt_side: GTSide, report: TaskReport) -> None:
    format_ = report.task.format
    for verdict in judge(variant, op, sample, gt_side, FORMATS.get(format_)):
        if verdict.failure:
            stage = f"{verdict.stage} {format_}".rstrip()
            failure = Failure(op.full_name, stage, report.task.dtype, number, verdict.failure, _summary(sample))
            report.failures.append(failure)
            continue
        report.passed += 1
        if verdict.both_raise:
            report.both_raise.append(f"{number} {verdict.stage}: {verdict.both_raise}")


def _summary(sample: Any) -> str:
    return str(sample.summary()).replace("\n", " ")[:300]
