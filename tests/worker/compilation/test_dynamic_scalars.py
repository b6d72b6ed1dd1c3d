"""Ops with numbers as tensors give what the ops give with the numbers."""

import pytest
import torch

from gt.worker.compilation.dynamic_scalars import DYNAMIC_FORMS, DynamicScalar
from gt.worker.engines.torch_private import find_overload, find_schema

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def number(value: float) -> DynamicScalar:
    return DynamicScalar(torch.tensor(value, dtype=torch.float64))


def arguments(
    op: str, dtype: torch.dtype, *, is_form: bool, shape: tuple[int, ...]
) -> tuple[list[object], dict[str, object]]:
    """Values for the parameters of an op: numbers of its type `number`, in a form or as they are."""
    generator = torch.Generator().manual_seed(0)
    args: list[object] = []
    named: dict[str, object] = {}
    for parameter in find_schema(op).arguments:
        kind = str(parameter.type)
        scalar = number(0.7) if is_form else 0.7
        value: object = torch.rand(shape, generator=generator).add(0.1).to(dtype)
        if parameter.name == "mask":
            value = torch.ones(shape, dtype=torch.bool)
        elif "number" in kind:
            value = [scalar, scalar] if kind.startswith("List") else scalar
        elif kind == "List[Tensor]":
            value = [torch.rand(shape, generator=generator).add(0.1).to(dtype) for _ in range(2)]
        if parameter.kwarg_only:
            named[parameter.name] = value
        else:
            args.append(value)
    if op in ("aten.add.Tensor", "aten.sub.Tensor", "aten.add_.Tensor", "aten.sub_.Tensor"):
        named["alpha"] = number(0.7) if is_form else 0.7
    return args, named


@pytest.mark.parametrize("shape", [(3, 5), ()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", DYNAMIC_FORMS)
def test_a_form_gives_what_the_op_gives(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    args, named = arguments(op, dtype, is_form=False, shape=shape)
    expected = find_overload(op)(*args, **named)
    expected = args[0] if expected is None else expected
    args, named = arguments(op, dtype, is_form=True, shape=shape)
    # Where a difference is small, torch's kernels for shorter floats have rounded its parts before.
    rounding = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 1.6e-2} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(DYNAMIC_FORMS[op](*args, **named), expected, **rounding)


@pytest.mark.parametrize("op", ["aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.gt.Scalar"])
def test_a_number_in_place_of_a_tensor(op: str) -> None:
    for x in (torch.arange(4), torch.tensor(2), torch.rand(3), torch.rand(3).bfloat16()):
        torch.testing.assert_close(DYNAMIC_FORMS[op](x, number(1.3)), find_overload(op)(x, 1.3))


@pytest.mark.parametrize(
    ("op", "tensors", "value"),
    [
        ("aten.pow.Tensor_Scalar", ["base"], 0.5),
        ("aten.pow.Tensor_Scalar", ["base"], -0.5),
        ("aten.lerp.Scalar", ["base", "end"], -2.5),
        ("aten.lerp.Scalar", ["base", "end"], -0.25),
        ("aten.threshold_backward.default", ["end", "base"], 0.1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_form_takes_the_branches_of_the_kernel(op: str, tensors: list[str], value: float, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    values = {
        "base": torch.tensor([-0.0, 0.0, -inf, inf, nan, 2.0, 0.1], dtype=dtype),
        "end": torch.tensor([1.0, inf, 0.0, 3.0, 2.0, inf, 1.0], dtype=dtype),
    }
    given = [values[name] for name in tensors]
    found = DYNAMIC_FORMS[op](*given, number(value))
    torch.testing.assert_close(found, find_overload(op)(*given, value), equal_nan=True)
