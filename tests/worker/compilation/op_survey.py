"""Calls of all ops that may be compiled, on values at which formulas differ: ties, borders of domains, overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gt.core.meta import TensorMeta
from gt.core.signatures import Signature
from gt.worker.compilation.compilable_spans import reason_to_stay_eager
from gt.worker.engines.torch_private import find_schema, find_tags, registered_ops

SIDE = 24
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)

# Reductions and scans, and ops that torch has not tagged as pointwise though they are.
UNTAGGED = frozenset([
    "_cdist_forward", "_log_softmax", "_log_softmax_backward_data", "_prelu_kernel", "_safe_softmax", "_softmax",
    "_softmax_backward_data", "_to_copy", "all", "amax", "amin", "aminmax", "any", "argmax", "argmin",
    "binary_cross_entropy", "count_nonzero", "cummax", "cummin", "cumprod", "cumsum", "dist", "elu_backward",
    "floor_divide", "gelu_backward", "glu", "hardshrink_backward", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh_backward", "huber_loss", "huber_loss_backward", "isin", "leaky_relu_backward",
    "linalg_vector_norm", "log_sigmoid_backward", "log_sigmoid_forward", "logcumsumexp", "logsumexp", "max", "mean",
    "median", "min", "mode", "mse_loss", "mse_loss_backward", "nanmedian", "nansum", "native_layer_norm", "norm",
    "prod", "renorm", "rsub", "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "softplus_backward", "softshrink_backward", "sort", "std", "std_mean", "sum", "topk",
    "tril", "triu", "var", "var_mean",
])  # fmt: skip


class Case(NamedTuple):
    """A call of an op. `arguments` has None where a tensor is to be put."""

    op: str
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def __str__(self) -> str:
        given = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.named.items())]
        return f"{self.op.removeprefix('aten.')}({', '.join(given)}) in {str(self.dtype).removeprefix('torch.')}"


class _Tensor:
    """The place of a tensor among the arguments of a case."""

    def __init__(self, position: int, dtype: torch.dtype | None = None) -> None:
        self.position = position
        self.dtype = dtype

    def __str__(self) -> str:
        return "xyzuvw"[self.position]


def surveyed_ops() -> list[str]:
    """The pointwise ops and reductions of torch in their functional forms."""
    found = []
    for name in registered_ops():
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = f"aten.{base}.{overload or 'default'}"
        if not name.startswith("aten::") or base.startswith("_foreach") or find_schema(op).is_mutable:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue  # its parts are recorded in its place
        if base in UNTAGGED or {"pointwise", "reduction"} & find_tags(op):
            found.append(op)
    return sorted(found)


NUMBERS: dict[str, Sequence[Any]] = {
    "exponent": (0.5, 2, 3, -1, -0.5, 2.5, 0),
    "self": (2, 0.1),
    "rounding_mode": (None, "floor", "trunc"),
    "approximate": ("none", "tanh"),
    "ord": (2, 1, 0, float("inf"), 3),
    "p": (2, 1),
    "dim": (1,),
    "k": (2,),
    "n": (3,),
    "diagonal": (1,),
    "beta": (1.0,),
    "eps": (None, 0.1),
    "correction": (1, 0),
    "decimals": (2,),
    "nan": (None,),
    "reduction": (0, 1),
    "normalized_shape": ([SIDE],),
    "maxnorm": (1.0,),
    "min": (-0.1,),
    "max": (0.1,),
}
_SECOND_CHOICE: dict[str, Sequence[Any]] = {
    "Scalar": (0.1, 3, -2.5), "float": (0.1,), "int": (1,), "bool": (False,), "number": (0.1, 3, -2.5),
}  # fmt: skip


def cases_of(op: str, dtype: torch.dtype) -> Iterator[Case]:
    """Calls of an op on tensors of a dtype, with one set of numbers each."""
    variants: list[list[tuple[str, bool, Any]]] = [[]]
    position = 0
    for argument in find_schema(op).arguments:
        kind = str(argument.type)
        values: Sequence[Any]
        is_optional = kind.startswith("Optional")
        if kind == "Tensor" or (kind == "Optional[Tensor]" and argument.name not in ("generator", "weight", "bias")):
            is_mask = argument.name in ("mask", "condition", "is_target")
            values = [_Tensor(position, torch.bool if is_mask else None)]
            position += 1
        elif argument.name in ("dtype", "input_dtype") and not is_optional:
            values = [dtype]
        elif argument.name in NUMBERS:
            values = [([v] if "List[int]" in kind and not isinstance(v, list) else v) for v in NUMBERS[argument.name]]
        elif argument.has_default_value():
            continue
        else:
            values = next((v for name, v in _SECOND_CHOICE.items() if name in kind), ())
            values = values if len(variants) == 1 else values[:1]
        variants = [[*before, (argument.name, argument.kwarg_only, value)] for before in variants for value in values]
    for variant in variants:
        named = {name: value for name, kwarg_only, value in variant if kwarg_only}
        yield Case(op, dtype, tuple(value for _, kwarg_only, value in variant if not kwarg_only), named)


def call(case: Case, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def put(value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return value
        tensor = tensors[value.position]
        return tensor if value.dtype is None else tensor > 0

    _, base, overload = case.op.split(".")
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, base), overload)
    made = function(*map(put, case.arguments), **{name: put(value) for name, value in case.named.items()})
    results = made if isinstance(made, list | tuple) else [made]
    return [result for result in results if isinstance(result, torch.Tensor) and result.numel()]


def is_compiled(case: Case) -> bool:
    """Whether a case is let into compiled code and torch can run it."""
    tensors = values_of(case.dtype)["unit"]
    meta = TensorMeta((SIDE, SIDE), (SIDE, 1), 0, str(case.dtype).removeprefix("torch."))
    count = sum(isinstance(value, _Tensor) for value in (*case.arguments, *case.named.values()))
    if not count or reason_to_stay_eager(Signature(case.op, (), {}, (), (), (), ()), [meta] * count) is not None:
        return False
    try:
        results = call(case, tensors)
    except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
        return False
    return bool(results) and not any(result.dtype.is_complex for result in results)


# Where a part of the result overflows, or an input is infinite, their formulas give infinity, NaN or a number by the
# order of their steps. torch's own kernels differ in that from one version, CPU and memory layout to another.
OVERFLOWING = frozenset([
    "_log_softmax_backward_data", "_softmax_backward_data", "addcmul", "gelu", "gelu_backward", "huber_loss_backward",
    "lerp", "mean", "mse_loss_backward", "nansum", "sigmoid_backward", "std", "std_mean", "sum", "var", "var_mean",
])  # fmt: skip
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def differences(
    case: Case, inputs: Sequence[torch.Tensor], found: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor:
    """The elements at which results differ by more than rounding: by more than the tolerances of torch.testing, in
    proportion to the inputs, because the parts of a sum may be larger than the sum."""
    rtol, atol = _TOLERANCES.get(expected.dtype, (0.0, 0.0))
    if not rtol:
        return found != expected
    scale = torch.ones((), dtype=torch.float64)
    for tensor in inputs:
        finite = tensor.double().nan_to_num(0.0, 0.0, 0.0).abs()
        scale = torch.maximum(scale, finite if finite.shape == expected.shape else finite.max())
    if case.op.split(".")[1] in ("var", "var_mean", "std", "std_mean"):
        scale = scale * scale  # squares are added
    wide, wanted = found.double(), expected.double()
    is_near = (wide - wanted).abs() <= max(atol, rtol / 4) * scale + rtol * wanted.abs()
    is_wrong = ~(is_near | (wide == wanted) | (wide.isnan() & wanted.isnan()))
    if case.op.split(".")[1] in OVERFLOWING:
        is_wrong &= wide.isfinite() & wanted.isfinite()
    return is_wrong


def values_of(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Sets of tensors of shape (SIDE, SIDE) that ops are called on."""
    return {name: [_cast(value, dtype).contiguous() for value in values] for name, values in _float_sets().items()}


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return value.to(dtype)
    whole = value.nan_to_num(7, 1 << 30, -(1 << 30)).clamp(-(1 << 30), 1 << 30)
    whole = whole.sign() * whole.abs().ceil()
    if dtype is torch.uint8:
        whole = whole.remainder(256)
    return whole.to(dtype)


def _float_sets() -> dict[str, list[torch.Tensor]]:
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([
        0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -2.5, 0.1, 0.3, 1e-40, -1e-40, 1e10, -1e10, 3e38, -3e38, inf, -inf, nan,
        2.9999998, 1.0000001, -7.0, 88.8, -104.0,
    ], dtype=torch.float64)  # fmt: skip
    assert len(special) == SIDE
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (SIDE, SIDE)), generator=generator, dtype=torch.float64)

    grid = special.expand(SIDE, SIDE)
    count = torch.arange(SIDE * SIDE, dtype=torch.float64).view(SIDE, SIDE)
    tenths = (count - 200) * 0.1
    unit = torch.rand(SIDE, SIDE, generator=generator, dtype=torch.float64)
    ties = torch.randint(-3, 4, (SIDE, SIDE), generator=generator).double()
    holes = random()
    holes[::3, 5], holes[1::3, 7], holes[::4, 11] = nan, inf, -inf
    sets = {
        "random": [random(), random(), random()],
        "special": [grid, grid.t(), grid.roll(5, 1)],
        "special, swapped": [grid.t(), grid, grid.t().roll(3, 0)],
        "tenths": [tenths, torch.full((SIDE, SIDE), 0.1, dtype=torch.float64), tenths.flip(0)],
        "tenths of threes": [tenths * 3, (count % 7 + 1) * 0.1, tenths],
        "halves": [(count - 288) / 2, (count % 5 + 1) / 2, ties],
        "ties": [ties, ties.roll(1, 1), ties.roll(1, 0)],
        "holes": [holes, holes.roll(3, 1), random()],
        "large": [random() * 1e10, random(), random() * 1e5],
        "overflow": [random().sign() * 3e38, random() * 2, random().sign() * 2e38],
        "denormal": [random() * 1e-40, random() * 1e-38, random()],
        "unit": [unit, unit.flip(0), unit.flip(1)],
        "borders": [ties.sign() + random().sign() * 1e-7, ties.clamp(-1, 1), unit],
        "integers": [(count - 300), (count % 11 - 5), ties],
        "exponents": [random() * 90, random() * 700, random() * 20],
    }
    return {name: [*values, values[0].roll(2, 1)] for name, values in sets.items()}
