"""The table of rules: one entry per op. An entry whose name has no overload is for all overloads of the op."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules.attention import ATTENTION
from gt.sharding.rules.cat_split import CAT_SPLIT
from gt.sharding.rules.convolution import CONVOLUTION
from gt.sharding.rules.creation import CREATION
from gt.sharding.rules.cumulative import CUMULATIVE
from gt.sharding.rules.diagonal import DIAGONAL
from gt.sharding.rules.embedding import EMBEDDING
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.fft import FFT
from gt.sharding.rules.indexing import ADVANCED_INDEXING, INDEXING
from gt.sharding.rules.linalg import LINALG
from gt.sharding.rules.losses import LOSSES
from gt.sharding.rules.matmul import GROUPED_MM, MATMUL
from gt.sharding.rules.normalization import BATCH_NORM, GROUP_NORM, LAYER_NORM
from gt.sharding.rules.norms import DISTANCE, VECTOR_NORM, WEIGHT_NORM
from gt.sharding.rules.optimizers import OPTIMIZERS
from gt.sharding.rules.pointwise import POINTWISE
from gt.sharding.rules.pooling import POOLING
from gt.sharding.rules.reduction import REDUCTION
from gt.sharding.rules.scatter import MASKED_SCATTER, SCATTER
from gt.sharding.rules.slicing import SLICING
from gt.sharding.rules.softmax import SOFTMAX
from gt.sharding.rules.sorting import SEARCHSORTED, SORTING
from gt.sharding.rules.support.local_programs import same_op
from gt.sharding.rules.views import VIEWS
from gt.sharding.rules.vision import VISION

TABLES: tuple[dict[str, OpEntry], ...] = (
    POINTWISE, REDUCTION, VECTOR_NORM, MATMUL, GROUPED_MM, DISTANCE, LINALG, FFT,
    SOFTMAX, LAYER_NORM, GROUP_NORM, BATCH_NORM, WEIGHT_NORM, LOSSES, ATTENTION, EMBEDDING,
    CONVOLUTION, POOLING, VISION,
    CREATION, VIEWS, SLICING, DIAGONAL, CAT_SPLIT,
    INDEXING, ADVANCED_INDEXING, SCATTER, MASKED_SCATTER, SEARCHSORTED, SORTING, CUMULATIVE,
    OPTIMIZERS,
)  # fmt: skip
TABLE: dict[str, OpEntry] = {op: entry for table in TABLES for op, entry in table.items()}


@functools.lru_cache(maxsize=1 << 12)  # programs choose the names
def entry_of(op: str) -> OpEntry | None:
    """The entry of an overload: its own, that of its op, or that of the functional form of its op."""
    for name in (op, op.rpartition(".")[0], functional_name(op)):
        if name in TABLE:
            return TABLE[name]
    return None


def functional_name(op: str) -> str:
    """The functional form of an in-place op: `aten.add` for `aten.add_.Tensor`."""
    namespace, name, *_ = op.split(".")
    return f"{namespace}.{name.removesuffix('_')}"


def is_linear_with(op: str, scalars: Iterable[complex]) -> bool:
    """Whether an op is linear with these scalar arguments, so that partial values may pass through it."""
    entry = entry_of(op)
    return entry is None or all(map(entry.is_linear_with, scalars))


def rule_of(call: OpCall) -> OpShardingRule | None:
    """The rule of a call; None if it runs on whole tensors only."""
    entry = entry_of(call.op)
    return None if entry is None else entry.rule(call)


def lower(shard: LocalContext) -> LocalProgram:
    """The program of one worker for its shards of a call."""
    rule = rule_of(shard.call)
    return rule.lowering(shard) if rule is not None and rule.lowering is not None else same_op(shard)
