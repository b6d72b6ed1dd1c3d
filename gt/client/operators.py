"""Python's operators of GT tensors, which bypass torch's dispatcher for cached calls.

Torch's dispatcher takes more than half of the client's time for an op with a number. An operator runs the cached call
that `dispatch` has made of the same op before, if no gradient is recorded and nothing intercepts ops. In every other
case, such as the first call with new shapes, it calls torch's own operator.

Everything in this file is a hot path. `_binary` and `_in_place` repeat their checks, since a shared function would be
one more call in every op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from gt.client import active_session
from gt.client.cached_calls import HandleType, SingleResultCall, WriteCall
from gt.client.op_schema import ArgumentKind, OpSchema
from gt.client.torch_dispatch import alias_pattern, schema_for
from gt.client.torch_patches.avoided_imports import hide_from_dynamo
from gt.client.torch_patches.dispatch import OpOverload, is_intercepted
from gt.core.tracebacks import leave_out_own_frames

Operator: TypeAlias = Callable[..., Any]

_records_gradients = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_MAX_INT = (1 << 63) - 1  # torch refuses larger numbers


class Overloads(NamedTuple):
    """The overloads that torch dispatches for an operator: with a number, and with a tensor as its second operand."""

    number: OpOverload | None
    tensor: OpOverload | None


def _both(overload: OpOverload) -> Overloads:
    """The overloads of an op whose overload for tensors also takes numbers."""
    return Overloads(overload, overload)


def _each(packet: Any) -> Overloads:
    """The overloads of an op with one for numbers and one for tensors."""
    return Overloads(packet.Scalar, packet.Tensor)


_aten = torch.ops.aten
UNARY: dict[str, OpOverload] = {
    "__neg__": _aten.neg.default,
    "__abs__": _aten.abs.default,
    "__invert__": _aten.bitwise_not.default,
    "neg": _aten.neg.default,
    "abs": _aten.abs.default,
    "sqrt": _aten.sqrt.default,
    "reciprocal": _aten.reciprocal.default,
}
BINARY: dict[str, Overloads] = {
    "__add__": _both(_aten.add.Tensor),
    "__sub__": _both(_aten.sub.Tensor),
    "__mul__": _both(_aten.mul.Tensor),
    "__truediv__": _both(_aten.div.Tensor),
    "__floordiv__": _both(_aten.floor_divide.default),
    "__mod__": _each(_aten.remainder),
    "__pow__": Overloads(_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor),
    "__and__": _each(_aten.bitwise_and),
    "__or__": _each(_aten.bitwise_or),
    "__xor__": _each(_aten.bitwise_xor),
    "__lt__": _each(_aten.lt),
    "__le__": _each(_aten.le),
    "__gt__": _each(_aten.gt),
    "__ge__": _each(_aten.ge),
    "__eq__": _each(_aten.eq),
    "__ne__": _each(_aten.ne),
    "add": _both(_aten.add.Tensor),
    "sub": _both(_aten.sub.Tensor),
    "mul": _both(_aten.mul.Tensor),
    "div": _both(_aten.div.Tensor),
}
# Operators of the right operand, each with that of the left operand and its overload. If the left operand is a plain
# tensor, Python calls the right one's first, because GT's class is derived from torch's: torch's left one has to run.
REFLECTED: dict[str, tuple[str, OpOverload]] = {
    "__radd__": ("__add__", _aten.add.Tensor),
    "__rsub__": ("__sub__", _aten.rsub.Scalar),
    "__rmul__": ("__mul__", _aten.mul.Tensor),
}
IN_PLACE: dict[str, Overloads] = {
    "__iadd__": _both(_aten.add_.Tensor),
    "__isub__": _both(_aten.sub_.Tensor),
    "__imul__": _both(_aten.mul_.Tensor),
    "__itruediv__": _both(_aten.div_.Tensor),
    "add_": _both(_aten.add_.Tensor),
    "sub_": _both(_aten.sub_.Tensor),
    "mul_": _both(_aten.mul_.Tensor),
    "div_": _both(_aten.div_.Tensor),
}


def install_operators(base: HandleType, handle: HandleType) -> None:
    """Give GT's class its operators, and the methods of the same ops; `handle` is the class of their results."""
    for name, overload in UNARY.items():
        _install(base, name, _unary(base, handle, getattr(torch.Tensor, name), overload))
    for name, overloads in BINARY.items():
        _install(base, name, _binary(base, handle, getattr(torch.Tensor, name), overloads))
    for name, (forward, overload) in REFLECTED.items():
        original = _of_left_operand(getattr(torch.Tensor, name), getattr(torch.Tensor, forward))
        _install(base, name, _binary(base, handle, original, Overloads(overload, None)))
    for name, overloads in IN_PLACE.items():
        _install(base, name, _in_place(base, handle, getattr(torch.Tensor, name), overloads))


def _install(base: HandleType, name: str, operator: Operator) -> None:
    if not name.startswith("__") and name not in UNARY:
        operator = _method(operator, getattr(torch.Tensor, name))
    operator.__name__ = name
    operator.__qualname__ = f"Tensor.{name}"
    operator.__doc__ = getattr(torch.Tensor, name).__doc__
    hide_from_dynamo(operator)
    setattr(base, name, operator)


def _of_left_operand(reflected: Operator, forward: Operator) -> Operator:
    """Torch's operator for a reflected call: `forward` of the left operand if this is a tensor, else `reflected`."""

    def operator(right: torch.Tensor, left: Any) -> Any:
        return forward(left, right) if isinstance(left, torch.Tensor) else reflected(right, left)

    return operator


def _unary(base: HandleType, handle: HandleType, original: Operator, overload: OpOverload) -> Operator:
    """An operator of one tensor; `original` is torch's."""
    op = schema_for(overload)

    def operator(self: Any) -> Any:
        try:
            session = active_session.active
            if session is None or (type(self) is not handle and type(self) is not base) or is_intercepted():
                return original(self)
            if not (_records_gradients() and self.requires_grad):
                ref = self._ref
                call = session.cached_calls.get((op, _default_dtype(), ref.key))
                if type(call) is SingleResultCall:
                    return call.run(handle, session, [ref], [], (self,), None)
            return original(self)
        except Exception as error:
            leave_out_own_frames(error)
            raise

    return operator


def _binary(base: HandleType, handle: HandleType, original: Operator, overloads: Overloads) -> Operator:
    """An operator of a tensor and a number or another tensor; `original` is torch's."""
    number, tensors = _schemas(overloads)
    value_matters = number is not None and number.kinds[1] is ArgumentKind.CONSTANT

    def operator(self: Any, other: Any) -> Any:
        try:
            session = active_session.active
            if session is None or (type(self) is not handle and type(self) is not base) or is_intercepted():
                return original(self, other)
            if not (_records_gradients() and self.requires_grad):
                ref, kind = self._ref, type(other)
                key: tuple[Any, ...]
                if kind is float or (kind is int and -_MAX_INT <= other <= _MAX_INT) or kind is bool:
                    if value_matters:
                        refs, scalars, key = [ref], [], (number, _default_dtype(), ref.key, other, kind)
                    else:
                        refs, scalars, key = [ref], [other], (number, _default_dtype(), ref.key, kind)
                elif (kind is handle or kind is base) and not (_records_gradients() and other.requires_grad):
                    second = other._ref
                    refs, scalars, key = [ref, second], [], (tensors, _default_dtype(), ref.key, second.key)
                else:
                    return original(self, other)
                call = session.cached_calls.get(key)
                if type(call) is SingleResultCall:
                    return call.run(handle, session, refs, scalars, (self, other), None)
            return original(self, other)
        except Exception as error:
            leave_out_own_frames(error)
            raise

    return operator


def _in_place(base: HandleType, handle: HandleType, original: Operator, overloads: Overloads) -> Operator:
    """An operator that writes to its left operand; `original` is torch's. Autograd compares the versions of the tensors
    that it has saved, so every write increments the version, as in torch. Inference tensors have none: torch's own
    operator refuses to write to them outside of inference mode."""
    number, tensors = _schemas(overloads)

    def operator(self: Any, other: Any) -> Any:
        try:
            session = active_session.active
            if session is None or (type(self) is not handle and type(self) is not base) or is_intercepted():
                return original(self, other)
            if not (_records_gradients() and self.requires_grad):
                ref, kind = self._ref, type(other)
                key: tuple[Any, ...]
                if kind is float or (kind is int and -_MAX_INT <= other <= _MAX_INT) or kind is bool:
                    refs, scalars, key = [ref], [other], (number, _default_dtype(), ref.key, kind, None)
                elif (kind is handle or kind is base) and not (_records_gradients() and other.requires_grad):
                    second = other._ref
                    refs, scalars = [ref, second], []
                    key = (tensors, _default_dtype(), ref.key, second.key, alias_pattern(refs))
                else:
                    return original(self, other)
                call = session.cached_calls.get(key)
                if type(call) is WriteCall and not self.is_inference():
                    call.run(handle, session, refs, scalars, (self, other), None)
                    increment_version(self)
                    return self
            return original(self, other)
        except Exception as error:
            leave_out_own_frames(error)
            raise

    return operator


def _method(operator: Operator, original: Operator) -> Operator:
    """The method of the same op as an operator. With more arguments than the operator it calls torch's `original`."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        try:
            if len(args) == 1 and not options:
                return operator(self, args[0])
            return original(self, *args, **options)
        except Exception as error:
            leave_out_own_frames(error)
            raise

    return method


def _schemas(overloads: Overloads) -> tuple[OpSchema | None, OpSchema | None]:
    number, tensor = overloads
    return number and schema_for(number), tensor and schema_for(tensor)
