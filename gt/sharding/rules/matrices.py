"""Linear algebra and Fourier transforms: ops that work on whole matrices, or whole dims, of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gt.core.meta import TensorMeta
from gt.core.messages import Arg, Input, Items
from gt.sharding.calls import Call, Expansion
from gt.sharding.factors import OpShardingRule, Passing, bind
from gt.sharding.rules.dims import named, rule_text, wrap, wrap_all
from gt.sharding.rules.entry import OpEntry, Rule
from gt.sharding.rules.pieces import Pieces, meta_of
from gt.sharding.spec import ShardingSpec

LINEAR = Passing(frozenset({0}))


# --- Matrices of a batch ----------------------------------------------------------------------------------------------


def matrices(text: str, passes: Sequence[Passing] = ()) -> OpEntry:
    """All factors that the text names are whole, but for k: the columns of right-hand sides, which do not depend on
    each other."""

    def rule(call: Call) -> OpShardingRule:
        return _matrices_rule(call, text, passes)

    return OpEntry(rule)


def _matrices_rule(call: Call, text: str, passes: Sequence[Passing] = ()) -> OpShardingRule:
    left, _, right = text.partition("->")
    results = [
        _present(dims.split(), meta) for dims, meta in zip(right.split(","), call.outputs, strict=True)
    ]
    operands = [dims.split() for dims in left.split(",")]
    whole = {name for names in [*operands, *results] for name in names} - {"...", "k", "1"}
    full = rule_text(operands, results, {"whole": sorted(whole)})
    return bind(full, call.shapes, call.result_shapes, passes=passes)


def _present(names: list[str], meta: TensorMeta) -> list[str]:
    """A result that was not asked for is an empty vector."""
    return ["1"] if meta.shape == (0,) and len(names) > 1 else names


def _solve(coefficients: str, others: str, is_left: Callable[[Call], bool], vector: str | None = None) -> Rule: ...
