"""Failures that are expected on GT, with their reasons. Every other failure is a bug."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.conformance.opdb import Failure, TaskReport


@dataclass(frozen=True, slots=True)
class Expected:
    """Failures of these ops whose reason matches a regular expression; some come only in some formats or on shards."""

    ops: tuple[str, ...]
    matching: str
    why: str
    in_some_modes: bool = False

    def covers(self, failure: Failure) -> bool:
        return failure.op in self.ops and re.search(self.matching, failure.reason) is not None


EXPECTED: tuple[Expected, ...] = (
    Expected(
        ops=(
            "median",
            "nanmedian",
            "aminmax",
            "max.reduction_no_dim",
            "min.reduction_no_dim",
            "prod",
            "masked.prod",
            "masked.std",
            "masked.var",
            "masked.normalize",
            "masked_select",
            "combinations",
            "ormqr",
            "nn.functional.hinge_embedding_loss",
            "nn.functional.normalize",
            "nn.functional.cosine_similarity",
            "nn.functional.cosine_embedding_loss",
            "nn.functional.rms_norm",
        ),
        matching=r"\['gradient'\].*stride: torch gives",
        why="torch has another formula for the gradient of a tensor subclass; strides differ in dims of one element",
        in_some_modes=True,
    ),
    Expected(
        ops=("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
        matching="GT holds strided tensors",
        why="an operand or the result is sparse",
    ),
    Expected(
        ops=("linalg.matrix_rank", "linalg.matrix_rank.hermitian"),
        matching="Expected [0-9]+ but got 0|Mismatched elements",
        why="torch does not write to out= of a tensor subclass here, and returns it as it was: docs/limits.md",
    ),
    Expected(
        ops=("nn.functional.linear_cross_entropy.chunked_none",),
        matching="a plain tensor, not one on GT",
        why="torch's own backward adds up in a buffer that it makes on the CPU: right values, in a plain tensor",
    ),
    Expected(
        ops=("torch._scaled_mm_v2",),
        matching="Found no NVIDIA driver",
        why="a CUDA build of torch asks for a GPU while it makes the samples",
        in_some_modes=True,
    ),
    Expected(
        ops=("as_strided_scatter",),
        matching="torch raises, GT does not: .*as_strided_scatter is currently only supported for contiguous inputs",
        why="torch's assertion reads the requires_grad of an operand, which is that of the handle on GT",
        in_some_modes=True,
    ),
    Expected(
        ops=("linalg.cond", "linalg.slogdet", "pca_lowrank", "svd_lowrank"),
        matching="values",
        why="equal rows: the matrix is singular but for rounding, which depends on the strides and the order of sums",
        in_some_modes=True,
    ),
    Expected(
        ops=("nn.functional.gelu",),
        matching="values",
        why="torch's kernel writes nothing to an out= with gaps",
        in_some_modes=True,
    ),
    Expected(
        ops=("native_group_norm",),
        matching="torch raises, GT does not: .*Expected X.is_contiguous",
        why="torch's kernel refuses operands with gaps, and shards have none",
        in_some_modes=True,
    ),
    Expected(
        ops=("corrcoef",),
        matching="(gradient|tangent).*values",
        why="the correlation of two observations is 1 or -1: its derivative is rounding and nothing else",
        in_some_modes=True,
    ),
    Expected(
        ops=("median", "nanmedian", "masked.median"),
        matching="values",
        why="torch's kernel reads beyond the memory of an expanded tensor",
        in_some_modes=True,
    ),
    Expected(
        ops=("matmul",),
        matching="some elements of the input tensor and the written-to tensor refer to a single memory location",
        why="torch asks whether out= and a view of it share memory, which handles do not tell, and copies one onto the "
        "other; it refuses that where the strides of dims of one element differ",
        in_some_modes=True,
    ),
    Expected(
        ops=("nn.functional.linear",),
        matching="stride: torch gives",
        why="torch replaces the memory of an out= with gaps; on GT the memory stays, with the same value",
        in_some_modes=True,
    ),
)


def unexpected(reports: Iterable[TaskReport]) -> list[Failure]:
    failures = [failure for report in reports for failure in report.failures]
    return [failure for failure in failures if not any(entry.covers(failure) for entry in EXPECTED)]


def stale_entries(reports: Sequence[TaskReport]) -> list[str]:
    """What is expected to fail and does not, of the ops that ran (with all their samples)."""
    ran = {report.task.op for report in reports}
    return [
        f"expected.py: {op} no longer fails with {entry.matching!r}; remove it there"
        for entry in EXPECTED
        for op in entry.ops
        if op in ran
        and not entry.in_some_modes
        and not any(entry.covers(failure) for report in reports for failure in report.failures if failure.op == op)
    ]


def has_entry(op: str) -> bool:
    return any(op in entry.ops for entry in EXPECTED if not entry.in_some_modes)
