"""Linear algebra on batches of whole matrices."""

from __future__ import annotations

from dataclasses import replace

from gt.core.meta import TensorMeta, contiguous_strides, same_places
from gt.core.signatures import Input, MemoryFormat
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import LocalBuilder, LocalContext, LocalProgram, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.dims import dim_names, rule_text, wrap_dim


def matrices(text: str) -> OpEntry:
    """An op on matrices. All factors of the text are whole except k: the columns of right-hand sides, which are
    independent."""
    return OpEntry(lambda call: _matrices_rule(call, text))


def _matrices_rule(call: OpCall, text: str) -> OpShardingRule:
    left, _, right = text.partition("->")
    operands = [dims.split() for dims in left.split(",")]
    results = [_present(dims.split(), meta) for dims, meta in zip(right.split(","), call.outputs, strict=True)]
    whole = {name for names in [*operands, *results] for name in names} - {"...", "k", "1"}
    full = rule_text(operands, results, {"whole": sorted(whole)})
    return bind(full, call.shapes, call.result_shapes)


def _present(names: list[str], meta: TensorMeta) -> list[str]:
    """The dims of a result. A result that was not requested is an empty vector."""
    return ["1"] if meta.shape == (0,) and len(names) > 1 else names


def factored(entry: OpEntry) -> OpEntry:
    """An op whose kernel factors the transposed matrix if its operand is contiguous. Autograd asks the client's tensor
    which of the two it was, so the operand is brought into an order like that one's: a shard may have another."""

    def rule(call: OpCall) -> OpShardingRule | None:
        found = entry.rule(call)
        return found and replace(found, lowering=_lower_factored)

    return OpEntry(rule)


def _lower_factored(shard: LocalContext) -> LocalProgram:
    call, meta, builder = shard.call, shard.call.inputs[0], LocalBuilder(len(shard.call.inputs))
    rows = MemoryFormat("contiguous_format")
    if same_places(meta.shape, meta.stride, contiguous_strides(meta.shape)):
        matrix = builder.call("aten.clone.default", Input(0), memory_format=rows)
    else:
        transposed = builder.call("aten.transpose.int", Input(0), -2, -1)
        columns = builder.call("aten.clone.default", transposed, memory_format=rows)
        matrix = builder.call("aten.transpose.int", columns, -2, -1)
    args = [matrix if arg == Input(0) else arg for arg in call.args]
    return builder.finish(*builder.repeat(call, *args, **call.kwargs))


def sided(left: str, right: str, vector: str | None = None) -> OpEntry:
    """A solve with the coefficients to the left or the right of the unknown, or for a vector."""

    def rule(call: OpCall) -> OpShardingRule:
        if vector is not None and _is_vector(*call.shapes[:2]):
            return _matrices_rule(call, vector)
        return _matrices_rule(call, left if call.kwargs.get("left", True) else right)

    return OpEntry(rule)


def _is_vector(coefficients: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether torch takes the second operand of a solve for a batch of vectors."""
    return len(others) == 1 or others == coefficients[:-1]


def _least_squares(call: OpCall) -> OpShardingRule | None:
    """Only for the default driver: the others return residuals only if all matrices of the batch have full rank."""
    if call.kwargs.get("driver") not in (None, "gelsy"):
        return None
    if _is_vector(*call.shapes[:2]):
        return _matrices_rule(call, "... i j, ... i -> ... j, ... r, ..., ... s")
    return _matrices_rule(call, "... i j, ... i c -> ... j c, ... r, ..., ... s")  # an empty shard of c has no rank


def _pseudo_inverse(call: OpCall) -> OpShardingRule:
    tolerances = ", ..." * (len(call.inputs) - 1)
    return _matrices_rule(call, f"... i j{tolerances} -> ... j i")


def _cross(call: OpCall) -> OpShardingRule:
    names = dim_names(len(call.outputs[0].shape))
    operands = [names[len(names) - len(shape) :] for shape in call.shapes]
    whole = names[wrap_dim(call.arg(2, "dim", -1), len(names))]
    passthroughs = [PartialPassthrough(frozenset({position})) for position in range(2)] if len(call.inputs) == 2 else []
    text = rule_text(operands, [names], {"whole": [whole]})
    return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs)


LINALG: dict[str, OpEntry] = {
    "aten.linalg_inv_ex": matrices("... i j -> ... i j, ..."),
    "aten.linalg_cholesky_ex": matrices("... i j -> ... i j, ..."),
    "aten.cholesky": matrices("... i j -> ... i j"),
    "aten.cholesky_inverse": matrices("... i j -> ... i j"),
    "aten.linalg_matrix_exp": matrices("... i j -> ... i j"),
    "aten.linalg_pinv": OpEntry(_pseudo_inverse),
    "aten._linalg_det": factored(matrices("... i j -> ..., ... i j, ... p")),
    "aten._linalg_slogdet": factored(matrices("... i j -> ..., ..., ... i j, ... p")),
    "aten._linalg_eigh": matrices("... i j -> ... p, ... i j"),
    "aten.linalg_eig": matrices("... i j -> ... p, ... i j"),
    "aten._linalg_eigvals": matrices("... i j -> ... p"),
    "aten._linalg_svd": matrices("... i j -> ... a b, ... c, ... d e"),
    "aten.linalg_qr": matrices("... i j -> ... a b, ... c d"),
    "aten.geqrf": matrices("... i j -> ... i j, ... p"),
    "aten.linalg_householder_product": matrices("... i j, ... p -> ... i j"),
    "aten.ormqr": matrices("... i j, ... p, ... a b -> ... a b"),
    "aten.linalg_lu": matrices("... i j -> ... a b, ... c d, ... e f"),
    "aten.linalg_lu_factor_ex": matrices("... i j -> ... i j, ... p, ..."),
    "aten.lu_unpack": matrices("... i j, ... p -> ... a b, ... c d, ... e f"),
    "aten.linalg_ldl_factor_ex": matrices("... i j -> ... i j, ... p, ..."),
    "aten.linalg_ldl_solve": matrices("... i j, ... p, ... i k -> ... j k"),
    "aten._linalg_solve_ex": factored(
        sided(
            "... i j, ... i k -> ... j k, ... i j, ... p, ...",
            "... i j, ... k j -> ... k i, ... i j, ... p, ...",
            "... i j, ... i -> ... j, ... i j, ... p, ...",
        )
    ),
    "aten.linalg_lu_solve": sided("... i j, ... p, ... i k -> ... j k", "... i j, ... p, ... k j -> ... k i"),
    "aten.linalg_solve_triangular": sided("... i j, ... i k -> ... j k", "... i j, ... k j -> ... k i"),
    "aten.triangular_solve": matrices("... i k, ... i j -> ... j k, ... i j"),
    "aten.cholesky_solve": matrices("... i k, ... i j -> ... j k"),
    "aten.linalg_lstsq": OpEntry(_least_squares),
    "aten.linalg_cross": OpEntry(_cross),
}
