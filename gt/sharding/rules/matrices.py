"""Linear algebra and Fourier transforms: ops that work on whole matrices, or whole dims, of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg
from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Expansion, OpCall
from gt.sharding.rules.entry import OpEntry
from gt.sharding.rules.support.decomposition import Decomposition, meta_of
from gt.sharding.rules.support.dims import named, rule_text, wrap, wrap_all
from gt.sharding.rules.support.local_programs import unless_empty
from gt.sharding.rules.support.statistics import LINEAR
from gt.sharding.spec import ShardingSpec

# --- Matrices of a batch ----------------------------------------------------------------------------------------------


def matrices(text: str) -> OpEntry:
    """All factors that the text names are whole, but for k: the columns of right-hand sides, which do not depend on
    each other."""
    return OpEntry(lambda call: _matrices_rule(call, text))


def _matrices_rule(call: OpCall, text: str) -> OpShardingRule:
    left, _, right = text.partition("->")
    operands = [dims.split() for dims in left.split(",")]
    results = [_present(dims.split(), meta) for dims, meta in zip(right.split(","), call.outputs, strict=True)]
    whole = {name for names in [*operands, *results] for name in names} - {"...", "k", "1"}
    full = rule_text(operands, results, {"whole": sorted(whole)})
    return bind(full, call.shapes, call.result_shapes)


def _present(names: list[str], meta: TensorMeta) -> list[str]:
    """A result that was not asked for is an empty vector."""
    return ["1"] if meta.shape == (0,) and len(names) > 1 else names


def sided(left: str, right: str, vector: str | None = None) -> OpEntry:
    """A solve with the coefficients on the left or the right of the unknown, or for a vector."""

    def rule(call: OpCall) -> OpShardingRule:
        if vector is not None and _is_vector(*call.shapes[:2]):
            return _matrices_rule(call, vector)
        return _matrices_rule(call, left if call.kwargs.get("left", True) else right)

    return OpEntry(rule)


def _is_vector(coefficients: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """How torch tells vectors from matrices."""
    return len(others) == 1 or others == coefficients[:-1]


def _least_squares(call: OpCall) -> OpShardingRule | None:
    """Other drivers than the default give residuals where all matrices of the batch have full rank."""
    if call.kwargs.get("driver") not in (None, "gelsy"):
        return None
    if _is_vector(*call.shapes[:2]):
        return _matrices_rule(call, "... i j, ... i -> ... j, ... r, ..., ... s")
    return _matrices_rule(call, "... i j, ... i c -> ... j c, ... r, ..., ... s")  # no columns, no rank


def _pseudo_inverse(call: OpCall) -> OpShardingRule:
    tolerances = ", ..." * (len(call.inputs) - 1)
    return _matrices_rule(call, f"... i j{tolerances} -> ... j i")


def _cross(call: OpCall) -> OpShardingRule:
    names = named(len(call.outputs[0].shape))
    operands = [names[len(names) - len(shape) :] for shape in call.shapes]
    whole = names[wrap(call.arg(2, "dim", -1), len(names))]
    passes = [PartialPassthrough(frozenset({place})) for place in range(2)] if len(call.inputs) == 2 else []
    text = rule_text(operands, [names], {"whole": [whole]})
    return bind(text, call.shapes, call.result_shapes, passes=passes)


# --- Fourier transforms -----------------------------------------------------------------------------------------------


def _fft(call: OpCall) -> OpShardingRule:
    names = named(len(call.inputs[0].shape))
    dims = wrap_all(call.arg(1, "dim"), len(names))
    results = [f"r{dim}" if dim in dims else name for dim, name in enumerate(names)]
    whole = [side[dim] for side in (names, results) for dim in dims]
    text = rule_text([names], [results], {"whole": whole})
    return bind(text, call.shapes, call.result_shapes, passes=LINEAR, lowering=unless_empty())


def _split_dims(call: OpCall, spec: ShardingSpec) -> tuple[list[int], list[int], int] | None:
    """The transformed dims but the last that are whole, those that are cut, and the last; None where one step does."""
    rank = len(call.inputs[0].shape)
    dims = [wrap(dim, rank) for dim in call.arg(1, "dim")]
    cut = [dim for dim in dims if spec.dims[dim]]
    if not cut or len(dims) == 1 or not call.inputs[0].elements:
        return None
    others = dims[:-1]
    return [dim for dim in others if dim not in cut], [dim for dim in others if dim in cut], dims[-1]


def _complex_fft(pieces: Decomposition, values: Input, dims: Sequence[int], call: OpCall, forward: bool) -> Input:
    if not dims:
        return values
    args = (values, ListArg(tuple(dims)), call.arg(2, "normalization"), forward)
    return pieces.one("aten._fft_c2c.default", args, meta_of(pieces.shape(values), pieces.dtype(values)))


def _expand_c2c(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """One dim after the other, so that what cuts a dim can move to one that is not being transformed."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    pieces = Decomposition(call)
    values, forward = Input(0), call.arg(3, "forward")
    first, then = (whole, [*cut, last]) if specs[0].dims[last] else ([*whole, last], cut)
    for dims in [first, *[[dim] for dim in then]]:
        values = _complex_fft(pieces, values, dims, call, forward)
    return pieces.finish(values)


def _expand_r2c(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The last dim is that of which only half may be kept: it comes first."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    pieces = Decomposition(call)
    first = [last] if specs[0].dims[last] else [*whole, last]
    halved = [*call.inputs[0].shape]
    halved[last] = call.outputs[0].shape[last]
    args = (Input(0), ListArg(tuple(first)), *call.args[2:])
    values = pieces.one(call.op, args, meta_of(halved, call.outputs[0].dtype))
    for dims in [[dim for dim in whole if dim not in first], *[[dim] for dim in cut]]:
        values = _complex_fft(pieces, values, dims, call, forward=True)
    return pieces.finish(values)


def _expand_c2r(call: OpCall, specs: Sequence[ShardingSpec]) -> Expansion | None:
    """The last dim is that of which only half is given: it comes last."""
    split = _split_dims(call, specs[0])
    if split is None:
        return None
    whole, cut, last = split
    pieces = Decomposition(call)
    values = Input(0)
    for dims in [whole, *[[dim] for dim in cut]]:
        values = _complex_fft(pieces, values, dims, call, forward=False)
    return pieces.finish(pieces.one(call.op, (values, ListArg((last,)), *call.args[2:]), call.outputs[0]))


MATRICES: dict[str, OpEntry] = {
    "aten.linalg_inv_ex": matrices("... i j -> ... i j, ..."),
    "aten.linalg_cholesky_ex": matrices("... i j -> ... i j, ..."),
    "aten.cholesky": matrices("... i j -> ... i j"),
    "aten.cholesky_inverse": matrices("... i j -> ... i j"),
    "aten.linalg_matrix_exp": matrices("... i j -> ... i j"),
    "aten.linalg_pinv": OpEntry(_pseudo_inverse),
    "aten._linalg_det": matrices("... i j -> ..., ... i j, ... p"),
    "aten._linalg_slogdet": matrices("... i j -> ..., ..., ... i j, ... p"),
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
    "aten._linalg_solve_ex": sided(
        "... i j, ... i k -> ... j k, ... i j, ... p, ...",
        "... i j, ... k j -> ... k i, ... i j, ... p, ...",
        "... i j, ... i -> ... j, ... i j, ... p, ...",
    ),
    "aten.linalg_lu_solve": sided("... i j, ... p, ... i k -> ... j k", "... i j, ... p, ... k j -> ... k i"),
    "aten.linalg_solve_triangular": sided("... i j, ... i k -> ... j k", "... i j, ... k j -> ... k i"),
    "aten.triangular_solve": matrices("... i k, ... i j -> ... j k, ... i j"),
    "aten.cholesky_solve": matrices("... i k, ... i j -> ... j k"),
    "aten.linalg_lstsq": OpEntry(_least_squares),
    "aten.linalg_cross": OpEntry(_cross),
    "aten._fft_c2c": OpEntry(_fft, _expand_c2c),
    "aten._fft_r2c": OpEntry(_fft, _expand_r2c),
    "aten._fft_c2r": OpEntry(_fft, _expand_c2r),
}
