"""Dynamic scalars: numbers that compiled code takes as 0-dim tensors because they change, such as learning rates.

The dynamic form of an op computes the same as torch's kernel does with a number: in float32 for shorter floats, with
the number rounded to that dtype. Numbers of ops without a dynamic form are constants of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch

DynamicForm: TypeAlias = Callable[..., Any]
"""Takes the arguments of the op, with 0-dim float64 tensors (`DynamicScalar`) in place of some numbers."""


class DynamicScalar:
    """A number that is known only when the code runs, as a 0-dim float64 tensor. A separate class, because torch
    promotes the dtypes of a 0-dim tensor and of a number by different rules."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def has_dynamic_scalars(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, DynamicScalar) or (isinstance(value, list) and has_dynamic_scalars(value)) for value in values
    )


def _result_dtype(values: Sequence[Any]) -> torch.dtype:
    plain = [1.0 if isinstance(value, DynamicScalar) else value for value in values if value is not None]
    if len(plain) == 1:
        return torch.result_type(plain[0], plain[0])
    tensors = [value for value in plain if isinstance(value, torch.Tensor)]
    numbers = [value for value in plain if not isinstance(value, torch.Tensor)]
    dtype = reduce(torch.promote_types, [torch.result_type(tensors[0], tensor) for tensor in tensors])
    like = torch.empty([1] * max(tensor.dim() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    return reduce(torch.promote_types, [torch.result_type(like, number) for number in numbers], dtype)


def _opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, DynamicScalar):
        return value.tensor.to(dtype)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _computed(formula: DynamicForm) -> DynamicForm:
    """A formula in the dtype in which torch computes, rounded to the dtype of the result."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = _result_dtype((*args, *kwargs.values()))
        cast = [_cast(arg, _opmath(dtype)) for arg in args]
        named = {name: _cast(arg, _opmath(dtype)) for name, arg in kwargs.items()}
        return formula(*cast, **named).to(dtype)

    return run


def _compared(compare: DynamicForm) -> DynamicForm:
    """A comparison with a number of the tensor's dtype."""

    def run(left: torch.Tensor, right: DynamicScalar) -> torch.Tensor:
        dtype = _result_dtype((left, right))
        return compare(left.to(dtype), _cast(right, dtype))

    return run


def _scaled(value: Any, alpha: Any) -> Any:
    return value if isinstance(alpha, int) and alpha == 1 else value * alpha


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    return torch.where(weight.abs() < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


def _root_or_power(value: Any, exponent: Any) -> Any:
    root = torch.where(exponent == 0.5, value.sqrt(), torch.pow(value, exponent))
    return torch.where(exponent == -0.5, value.rsqrt(), root)


def _pow(value: torch.Tensor, exponent: Any) -> torch.Tensor:
    """Torch's kernels take roots for the exponents 0.5 and -0.5, except those of float16. Roots and powers differ for
    -0.0 and -inf."""
    formula = torch.pow if value.dtype is torch.float16 else _root_or_power
    return _computed(formula)(value, exponent)  # type: ignore[no-any-return]


def _clamp(value: Any, min: Any = None, max: Any = None) -> Any:
    raised = value if min is None else torch.where(value < min, min, value)
    return raised if max is None else torch.where(raised > max, max, raised)


def _fill(value: torch.Tensor, number: DynamicScalar) -> torch.Tensor:
    return number.tensor.to(value.dtype).expand(value.shape)


def _masked_fill(value: torch.Tensor, mask: torch.Tensor, number: DynamicScalar) -> torch.Tensor:
    return torch.where(mask, number.tensor.to(value.dtype), value)


def _writing(form: DynamicForm) -> DynamicForm:
    """The in-place variant of an op."""
    return lambda target, *args, **kwargs: target.copy_(form(target, *args, **kwargs))


def _for_each(form: DynamicForm) -> DynamicForm:
    """The variant of an op for lists of tensors; a number is that of all of them, a list has one for each."""

    def run(tensors: list[Any], *others: Any, **named: Any) -> list[Any]:
        def item(argument: Any, position: int) -> Any:
            return argument[position] if isinstance(argument, list) else argument

        return [
            form(
                tensor, *[item(other, i) for other in others], **{name: item(other, i) for name, other in named.items()}
            )
            for i, tensor in enumerate(tensors)
        ]

    return run


_ADD = _computed(lambda left, right, alpha=1: left + _scaled(right, alpha))
_SUB = _computed(lambda left, right, alpha=1: left - _scaled(right, alpha))
_MUL = _computed(lambda left, right: left * right)
_DIV = _computed(lambda left, right: left / right)
_LERP = _computed(_lerp)
_ADDCMUL = _computed(lambda base, left, right, value=1: base + _scaled(left, value) * right)
_ADDCDIV = _computed(lambda base, left, right, value=1: base + _scaled(left, value) / right)
_CLAMP = _computed(_clamp)

_PLAIN: dict[str, DynamicForm] = {
    **dict.fromkeys(["add.Tensor", "add.Scalar"], _ADD),
    **dict.fromkeys(["sub.Tensor", "sub.Scalar"], _SUB),
    "rsub.Scalar": _computed(lambda left, right, alpha=1: right - _scaled(left, alpha)),
    **dict.fromkeys(["mul.Tensor", "mul.Scalar"], _MUL),
    **dict.fromkeys(["div.Tensor", "div.Scalar"], _DIV),
    "pow.Tensor_Scalar": _pow,
    "lerp.Scalar": _LERP,
    "addcmul.default": _ADDCMUL,
    "addcdiv.default": _ADDCDIV,
    "clamp.default": _CLAMP,
    "clamp_min.default": _CLAMP,
    "threshold_backward.default": _computed(lambda grad, value, threshold: torch.where(value <= threshold, 0, grad)),
    "clamp_max.default": _computed(lambda value, most: _clamp(value, None, most)),
}
_UNROUNDED: dict[str, DynamicForm] = {
    "fill.Scalar": _fill,
    "masked_fill.Scalar": _masked_fill,
    "eq.Scalar": _compared(torch.eq),
    "ne.Scalar": _compared(torch.ne),
    "lt.Scalar": _compared(torch.lt),
    "le.Scalar": _compared(torch.le),
    "gt.Scalar": _compared(torch.gt),
    "ge.Scalar": _compared(torch.ge),
}
_FOR_EACH: dict[str, DynamicForm] = {
    **{f"_foreach_{name}.{kind}": form for kind in ("Scalar", "ScalarList") for name, form in (
        ("add", _ADD), ("sub", _SUB), ("mul", _MUL), ("div", _DIV), ("addcmul", _ADDCMUL), ("addcdiv", _ADDCDIV),
        ("lerp", _LERP), ("clamp_min", _CLAMP),
    )},
    "_foreach_pow.Scalar": _pow,
    "_foreach_pow.ScalarList": _pow,
    "_foreach_add.List": _ADD,
    "_foreach_sub.List": _SUB,
}  # fmt: skip


def _in_place(forms: dict[str, DynamicForm]) -> dict[str, DynamicForm]:
    return {name.replace(".", "_.", 1): _writing(form) for name, form in forms.items()}


_PER_TENSOR = _PLAIN | _UNROUNDED | _in_place(_PLAIN | _UNROUNDED) | {"pow_.Scalar": _writing(_pow)}
_PER_LIST = {name: _for_each(form) for name, form in (_FOR_EACH | _in_place(_FOR_EACH)).items()}

DYNAMIC_FORMS: dict[str, DynamicForm] = {
    f"aten.{name}": form
    for name, form in (_PER_TENSOR | _PER_LIST).items()
    if name not in ("rsub_.Scalar", "pow_.Tensor_Scalar", "threshold_backward_.default")  # there are no such overloads
}
"""Forms by overload."""
