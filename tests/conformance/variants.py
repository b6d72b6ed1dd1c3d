"""The ways to call an op: as it is, in place, into `out=`; with gradients of all inputs, or of some of them; with
tangents."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.conformance.sides import Call, PlainSide, Side, copy_call

MOST_MASKED = 4  # inputs of which every choice is tried


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to call an op: `steps` yields a tree of tensors after each of the named stages. `intended` yields what
    torch means to give, where its kernels may give something else."""

    stages: tuple[str, ...]
    steps: Callable[[OpInfo, Any, Side], Iterator[Any]]
    intended: Callable[[OpInfo, Any, Side], Iterator[Any]] | None = None
    is_forward_mode: bool = False


def forward_variant(grad: bool) -> Variant:
    return Variant(("forward", "backward"), _forward_backward) if grad else Variant(("forward",), _forward)


def written_variants(op: OpInfo, grad: bool) -> Iterator[Variant]:
    """Those that overwrite a tensor."""
    if op.inplace_variant is not None and grad and op.supports_inplace_autograd:
        yield Variant(("inplace", "inplace backward"), _inplace_backward)
    elif op.inplace_variant is not None:
        yield Variant(("inplace",), _inplace)
    if op.supports_out:
        yield Variant(("out",), _out, _out_by_copy)


def tangent_variants(op: OpInfo) -> Iterator[Variant]:
    """Forward-mode derivatives, where an op has them."""
    if op.supports_forward_ad:
        yield Variant(("tangent",), functools.partial(_tangents, op.op, False), is_forward_mode=True)
        if op.inplace_variant is not None and op.supports_inplace_autograd:
            steps = functools.partial(_tangents, op.inplace_variant, True)
            yield Variant(("inplace tangent",), steps, is_forward_mode=True)


def _tangents(function: Callable[..., Any], writes: bool, op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    """Derivatives along a random tangent of all inputs. An input that is overwritten is a clone, and a part of a
    larger tensor: its tangent is then a part of another one."""
    call = copy_call(sample, side, requires_grad=True)
    with forward_ad.dual_level():
        duals = {
            id(tensor): forward_ad.make_dual(tensor.detach(), side.place(_cotangent(tensor, place)))
            for place, tensor in enumerate(call.tensors)
            if tensor.requires_grad
        }
        target, args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: duals.get(id(tensor), tensor), (call.input, call.args, call.kwargs)
        )
        if writes:
            target = tree_map_only(torch.Tensor, lambda tensor: torch.stack([tensor, tensor])[0], target)
        result = _call(function, Call(target, args, kwargs, call.tensors), target, side)
        leaves = [leaf for leaf in tree_leaves((result, target)) if isinstance(leaf, torch.Tensor)]
        tangents = [forward_ad.unpack_dual(leaf).tangent for leaf in leaves]
    yield {"tangent": tangents}


def differentiable(sample: Any) -> int:
    """How many tensors of a sample need a gradient, each counted once."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return len({id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad})


def mask_variants(sample: Any) -> Iterator[Variant]:
    """Gradients of some of the inputs that have one: of each choice of them; where there are many, of each alone
    and of all but one."""
    count = differentiable(sample)
    masks = itertools.product((False, True), repeat=count) if count <= MOST_MASKED else _masks_of_one(count)
    for mask in masks:
        if 0 < sum(mask) < count:
            text = "".join(str(int(needs)) for needs in mask)
            yield Variant((f"mask {text}",), functools.partial(_masked_backward, mask))


def _masks_of_one(count: int) -> Iterator[tuple[bool, ...]]:
    for alone, place in itertools.product((True, False), range(count)):
        yield tuple([(place == other) is alone for other in range(count)])


def _masked_backward(mask: Sequence[bool], op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    call = copy_call(sample, side, requires_grad=True)
    leaves = [tensor for tensor in call.tensors if tensor.requires_grad]
    for tensor, needs in zip(leaves, mask, strict=True):
        tensor.requires_grad_(needs)
    yield _gradients(sample, _call(op.op, call, call.input, side), call, side)


def _forward(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    call = copy_call(sample, side, requires_grad=False)
    yield {"result": _call(op.op, call, call.input, side), "inputs": call.tensors}


def _forward_backward(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    call = copy_call(sample, side, requires_grad=True)
    result = _call(op.op, call, call.input, side)
    yield {"result": result, "inputs": call.tensors}
    yield _gradients(sample, result, call, side)


def _inplace(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    call = copy_call(sample, side, requires_grad=False)
    result = _call(op.inplace_variant, call, call.input, side)
    yield {"result": result, "same": result is call.input, "inputs": call.tensors}


def _inplace_backward(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    """A leaf cannot be overwritten, so a clone of it is."""
    call = copy_call(sample, side, requires_grad=True)
    target = tree_map_only(torch.Tensor, torch.clone, call.input)
    result = _call(op.inplace_variant, call, target, side)
    yield {"result": result, "same": result is target, "target": target, "inputs": call.tensors}
    yield _gradients(sample, result, call, side)


def _out_by_copy(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    """Some kernels write to `out=` as if it were contiguous. The op's result, copied there, is what they mean."""
    call = copy_call(sample, side, requires_grad=False)
    made = _call(op.op, call, call.input, side)
    outs = _allocated(made, side)
    for target, value in zip(tree_leaves(outs), tree_leaves(made), strict=True):
        target.copy_(value)
    yield {"result": outs, "same": [True for _ in tree_leaves(outs)], "out": outs, "inputs": call.tensors}


def _allocated(shapes: Any, side: Side) -> Any:
    """Memory for the results of an op, which are tensors like these."""
    outs = tree_map_only(
        torch.Tensor, lambda tensor: side.allocate(torch.zeros(tensor.shape, dtype=tensor.dtype)), shapes
    )
    return outs if isinstance(outs, torch.Tensor) else tuple(outs)


def _out(op: OpInfo, sample: Any, side: Side) -> Iterator[Any]:
    shapes = next(_forward(op, sample, PlainSide()))["result"]
    call = copy_call(sample, side, requires_grad=False)
    outs = _allocated(shapes, side)
    result = _call(functools.partial(op.op, out=outs), call, call.input, side)
    same = [left is right for left, right in zip(tree_leaves(result), tree_leaves(outs), strict=False)]
    yield {"result": result, "same": same, "out": outs, "inputs": call.tensors}


def _call(function: Callable[..., Any], call: Call, target: Any, side: Side) -> Any:
    """An op of no tensors makes one: it is called where factories make them on this side."""
    if call.tensors:
        return function(target, *call.args, **call.kwargs)
    with side.factories():
        return function(target, *call.args, **call.kwargs)


def _gradients(sample: Any, result: Any, call: Call, side: Side) -> dict[str, Any]:
    processed = sample.output_process_fn_grad(result)
    outputs = [leaf for leaf in tree_leaves(processed) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    cotangents = [side.place(_cotangent(output, place)) for place, output in enumerate(outputs)]
    if outputs:
        torch.autograd.backward(outputs, cotangents)
    return {"gradient": [tensor.grad for tensor in call.tensors if tensor.requires_grad]}


def _cotangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(seed))
