"""The table: what sharding knows of each op. One entry per op; an entry without an overload is for all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from gt.sharding.factors import OpShardingRule
from gt.sharding.op_calls import LocalContext, LocalProgram, OpCall
from gt.sharding.rules.attention import ATTENTION
from gt.sharding.rules.contraction import CONTRACTION
from gt.sharding.rules.creation import CREATION
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.grouped import GROUPED
from gt.sharding.rules.indexing import INDEXING
from gt.sharding.rules.joining import JOINING
from gt.sharding.rules.masked import MASKED
from gt.sharding.rules.matrices import MATRICES
from gt.sharding.rules.normalization import NORMALIZATION
from gt.sharding.rules.optimizers import OPTIMIZERS
from gt.sharding.rules.pointwise import POINTWISE
from gt.sharding.rules.reduction import REDUCTION
from gt.sharding.rules.scanning import SCANNING
from gt.sharding.rules.spatial import SPATIAL
from gt.sharding.rules.support.local_programs import same_op
from gt.sharding.rules.viewing import VIEWING

FAMILIES: tuple[dict[str, OpEntry], ...] = (
    POINTWISE, CONTRACTION, REDUCTION, NORMALIZATION, ATTENTION, VIEWING, JOINING, INDEXING, SCANNING, SPATIAL,
    CREATION, MATRICES, MASKED, GROUPED, OPTIMIZERS,
)  # fmt: skip
TABLE: dict[str, OpEntry] = {op: entry for family in FAMILIES for op, entry in family.items()}


@functools.cache
def entry_of(op: str) -> OpEntry | None:
    """The entry of an overload: its own, or that of its op, or that of the op that it does in place."""
    for name in (op, op.rpartition(".")[0], functional_name(op)):
        if name in TABLE:
            return TABLE[name]
    return None


def functional_name(op: str) -> str:
    """`aten.add` for `aten.add_.Tensor`: the op of which an in-place op is a form."""
    namespace, name, *_ = op.split(".")
    return f"{namespace}.{name.removesuffix('_')}"


def are_tame(op: str, numbers: Iterable[complex]) -> bool:
    """Whether an op that has a rule is linear with these numbers, so that partial values may pass through it."""
    entry = entry_of(op)
    return entry is None or all(map(entry.tame, numbers))


def rule_of(call: OpCall) -> OpShardingRule | None:
    """How a call may be cut; None where it runs on whole tensors only."""
    entry = entry_of(call.op)
    return None if entry is None else entry.rule(call)


def lower(shard: LocalContext) -> LocalProgram:
    """What one worker does for its shards of a call."""
    rule = rule_of(shard.call)
    return rule.lowering(shard) if rule is not None and rule.lowering is not None else same_op(shard)
