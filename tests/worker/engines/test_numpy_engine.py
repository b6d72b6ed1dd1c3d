"""The NumPy engine against torch: every op of its table through the whole path, on both backends."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_map_only

from gt.client import creation as gt
from gt.client.session import Session, activate
from gt.core.errors import OpError
from gt.core.meta import TensorMeta
from gt.core.signatures import DType, ListArg, ViewStep
from gt.launch.in_process_channel import InProcessChannel
from gt.worker.engines.numpy_engine import NumPyEngine
from gt.worker.engines.numpy_ops import OPS
from gt.worker.engines.numpy_random import RANDOM
from gt.worker.engines.numpy_types import DTYPES, result_dtype
from gt.worker.engines.numpy_views import VIEWS, memory_owner


@contextmanager
def running(backend: str) -> Iterator[Session]:
    channel = InProcessChannel(1, backend)
    session = Session(channel, channel.welcome())
    activate(session)
    try:
        yield session
    finally:
        activate(None)
        session.close("end")


@pytest.fixture
def on_numpy() -> Iterator[Session]:
    with running("numpy") as session:
        yield session


class Inputs(NamedTuple):
    x: torch.Tensor  # float32 (4, 3)
    y: torch.Tensor  # float32 (4, 3), with repeated values
    pos: torch.Tensor  # float32 (4, 3), positive
    d: torch.Tensor  # float64 (4, 3)
    h: torch.Tensor  # float16 (4, 3)
    i: torch.Tensor  # int64 (4, 3)
    u: torch.Tensor  # uint8 (4, 3)
    m: torch.Tensor  # bool (4, 3)
    v: torch.Tensor  # float32 (3,)
    b: torch.Tensor  # float32 (2, 4, 3)
    pick: torch.Tensor  # int64 (5,), below 3
    zero: torch.Tensor  # float64 (), a 0-d tensor
    one: torch.Tensor  # int64 (1, 3, 1)


def make_inputs() -> Inputs:
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    x, y = normal(4, 3), whole(-2, 3, 4, 3).float()
    return Inputs(
        x, y, x.abs() + 0.1, normal(4, 3).double(), normal(4, 3).half(), whole(-5, 6, 4, 3), whole(0, 9, 4, 3).byte(),
        y > 0, normal(3), normal(2, 4, 3), torch.tensor([0, 2, 1, 1, 0]), torch.tensor(2.5, dtype=torch.float64),
        whole(0, 9, 1, 3, 1),
    )  # fmt: skip


Expression = Callable[[Inputs], Any]
aten = torch.ops.aten


def written(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A copy of a tensor, after a write to it or to a view of it."""
    copy = tensor.clone()
    write(copy)
    return copy


def gradient(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaf = tensor.clone().requires_grad_()
    result = function(leaf)
    (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum().backward()
    return leaf.grad


CREATION: dict[str, Expression] = {
    "zeros": lambda t: (torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool), torch.zeros(())),
    "ones": lambda t: (torch.ones(2, 3), torch.ones(2, dtype=torch.int32)),
    "full": lambda t: (
        torch.full((2,), 3), torch.full((2,), 3.5), torch.full((), True), torch.full((2,), 3, dtype=torch.half),
    ),
    "empty": lambda t: (torch.empty(2, 3).zero_(), torch.empty(2, dtype=torch.int64).fill_(3)),
    "empty_strided": lambda t: torch.empty_strided((2, 3), (1, 4), dtype=torch.float64).fill_(2),
    "arange": lambda t: (torch.arange(5), torch.arange(2.5), torch.arange(0), torch.arange(3, dtype=torch.uint8)),
    "arange.start": lambda t: (torch.arange(1, 5), torch.arange(1, 2.5), torch.arange(1, 4, dtype=torch.float64)),
    "arange.step": lambda t: (torch.arange(0, 1, 0.1), torch.arange(9, 0, -2), torch.arange(0, 7, 3)),
    "eye": lambda t: (torch.eye(3), torch.eye(2, 4), torch.eye(3, 2, dtype=torch.int64)),
    "linspace": lambda t: (
        torch.linspace(-1, 1, 7), torch.linspace(0, 1, 1), torch.linspace(3, 5, 4, dtype=torch.double),
    ),
    "like": lambda t: (torch.zeros_like(t.x), torch.ones_like(t.i), torch.full_like(t.i, 2), torch.full_like(t.x, 2)),
    "like dtype": lambda t: (torch.ones_like(t.x.t(), dtype=torch.int8), torch.full_like(t.i, 1.5, dtype=torch.double)),
    "empty_like": lambda t: (torch.empty_like(t.x).fill_(1), torch.empty_like(t.x, dtype=torch.int32).zero_()),
    "scalar_tensor": lambda t: (torch.scalar_tensor(2), torch.scalar_tensor(2, dtype=torch.int64)),
    "new": lambda t: (t.x.new_zeros(2), t.i.new_ones(2, 2), t.h.new_full((2,), 3), t.d.new_empty((2,)).fill_(1)),
}  # fmt: skip

ARITHMETIC: dict[str, Expression] = {
    "add": lambda t: (
        t.x + t.y, t.x + t.v, t.x + 2, t.x + 2.5, torch.add(t.x, t.y, alpha=3), torch.add(t.i, 1, alpha=2),
    ),
    "sub": lambda t: (
        t.x - t.y, t.x - 2, 1 - t.x, 1.5 - t.i, torch.sub(t.x, t.y, alpha=0.5), torch.rsub(t.x, 3, alpha=2),
    ),
    "mul": lambda t: (t.x * t.y, t.x * 2.5, t.i * 3, t.m * t.x, t.m * 2, t.b * t.v, t.m * True),
    "div": lambda t: (
        t.x / t.pos, t.x / 2, t.i / 2, t.i / t.u.clamp(min=1), 1 / t.pos, 3 / t.i.abs().clamp(min=1), t.m / 2,
    ),
    "div by zero": lambda t: (t.x / 0, t.y / t.y, torch.log(t.x), torch.sqrt(t.x)),
    "float16": lambda t: (t.h + 1, t.h * t.h, t.h + t.x, t.h + t.i, t.h / 3, t.h + t.zero),
    "float64": lambda t: (t.d + 1, t.d * t.x, t.d + t.i, t.d / 3, t.d - t.h),
    "mixed ints": lambda t: (t.u + t.i, t.u + 1, t.u + t.m, t.m + t.m, t.m + 1, t.u + 1.5, t.u * t.i.to(torch.int8)),
    "0-d": lambda t: (t.x + t.zero, t.i + t.zero, t.zero + 1, t.zero * t.zero, t.zero + t.d, t.zero.long() + t.zero),
    "neg": lambda t: (-t.x, -t.i, -t.h, -t.u, -t.zero),
    "abs": lambda t: (t.x.abs(), t.i.abs(), t.zero.abs()),
    "pow": lambda t: (
        t.x**2, t.i**2, t.i**2.0, t.pos**0.5, t.pos**t.y, t.x**3, 2**t.x, 2**t.i.abs(), 2.5**t.i, t.x**-1,
    ),
    "sqrt": lambda t: (t.pos.sqrt(), t.u.sqrt(), t.h.abs().sqrt(), t.pos.rsqrt(), t.u.rsqrt()),
    "exp and log": lambda t: (t.x.exp(), t.i.exp(), t.pos.log(), t.u.log(), t.m.exp(), t.d.exp(), (t.x * 999).exp()),
    "reciprocal": lambda t: (t.pos.reciprocal(), t.i.reciprocal(), t.zero.reciprocal()),
    "sin and cos": lambda t: (t.x.sin(), t.x.cos(), t.i.sin(), t.h.cos()),
    "complex": lambda t: ((t.x * 2j).abs(), t.x * 2j + t.y, t.d * 1j, t.i * 1j, (t.x * 1j).sum()),
}  # fmt: skip

COMPARISON: dict[str, Expression] = {
    "eq and ne": lambda t: (t.y == t.y.abs(), t.y != 1, t.i == 1, t.i == 1.5, t.m == t.m, t.x == t.zero, t.i != t.u),
    "less": lambda t: (t.x < t.y, t.x <= 0, t.i < 1.5, t.i <= t.y, t.zero < 3),
    "greater": lambda t: (t.x > t.y, t.x >= 0, t.i > 1.5, t.i >= t.y, t.u > 3),
    "where": lambda t: (
        torch.where(t.m, t.x, t.y), torch.where(t.m, t.x, 0), torch.where(t.m, t.i, 1.5), torch.where(t.m, t.i, t.d),
    ),
    "logical": lambda t: (
        torch.logical_and(t.y, t.m), torch.logical_or(t.i, t.u), torch.logical_not(t.y), t.zero.logical_not(),
    ),
    "bitwise": lambda t: (t.m & ~t.m, t.m | (t.x > 0), t.i & 3, t.i | 4, ~t.i, t.u & t.i),
    "maximum": lambda t: (
        torch.maximum(t.x, t.y), torch.minimum(t.x, t.v), torch.maximum(t.i, t.u), torch.maximum(t.x, t.zero),
    ),
    "clamp": lambda t: (
        t.x.clamp(-0.5, 0.5), t.x.clamp(min=0), t.x.clamp(max=0), t.i.clamp(-1, 1), t.i.clamp(0.5), t.x.clamp(1, 0),
    ),
    "clamp_min": lambda t: torch.clamp_min(t.x, 0.25),
    "nan": lambda t: (torch.maximum(t.x.log(), t.y), t.x.log().clamp(0, 1), t.x.log().relu(), t.x.log().amax()),
}  # fmt: skip

PRODUCTS: dict[str, Expression] = {
    "mm": lambda t: (t.x @ t.y.t(), t.x.t() @ t.y, t.i @ t.i.t(), t.h @ t.h.t(), torch.zeros(2, 0) @ torch.zeros(0, 3)),
    "bmm": lambda t: (t.b @ t.b.transpose(1, 2), torch.bmm(t.b, t.b.mT), torch.einsum("bij,kj->bik", t.b, t.x)),
    "addmm": lambda t: (F.linear(t.x, t.y, t.v[:1]), torch.addmm(t.v, t.x, t.x.t() @ t.y, beta=2, alpha=0.5)),
    "addmm beta 0": lambda t: torch.addmm(t.v.log(), t.x, t.x.t() @ t.y, beta=0),
    "mv and dot": lambda t: (t.x @ t.v, torch.mv(t.i, t.i[0]), t.v @ t.v, t.h[0] @ t.h[1], torch.dot(t.i[0], t.i[1])),
}  # fmt: skip

REDUCTIONS: dict[str, Expression] = {
    "sum": lambda t: (t.x.sum(), t.i.sum(), t.u.sum(), t.m.sum(), t.h.sum(), t.zero.sum(), t.x.sum(dtype=torch.double)),
    "sum dim": lambda t: (
        t.x.sum(0), t.x.sum(-1, keepdim=True), t.b.sum((0, 2)), t.m.sum(1), t.x.sum([]), t.zero.sum(0),
    ),
    "sum of nothing": lambda t: (t.x[:0].sum(), t.x[:0].sum(1), t.x[:0].sum(0), t.x[:0].prod(), t.x[:0].mean()),
    "mean": lambda t: (
        t.x.mean(), t.x.mean(0), t.b.mean((1, 2), keepdim=True), t.h.mean(), t.i.mean(dtype=torch.float32),
    ),
    "prod": lambda t: (
        t.x.prod(), t.i.prod(), t.u.prod(), t.x.prod(1), t.m.prod(0, keepdim=True), t.x.prod(0, dtype=torch.double),
    ),
    "var": lambda t: (
        t.x.var(), t.x.var(0), t.x.var(1, unbiased=False), t.b.var((0, 1), correction=2, keepdim=True), t.h.var(),
    ),
    "var of one": lambda t: (t.zero.var(), t.x[:1].var(0), t.x[:1].std(0)),
    "std": lambda t: (t.x.std(), t.x.std(0, keepdim=True), t.d.std(correction=0)),
    "amax": lambda t: (t.x.amax(), t.x.amax(0), t.b.amax((0, 2), keepdim=True), t.i.amin(1), t.x.amin(), t.m.amax(0)),
    "max": lambda t: (t.x.max(), t.i.max(), t.m.max(), t.x.min(), t.u.min(), t.zero.max()),
    "max dim": lambda t: (*t.x.max(0), *t.i.min(1, keepdim=True), *t.x.min(-1), *t.zero.max(0)),
    "argmax": lambda t: (
        t.x.argmax(), t.y.argmax(1), t.y.argmin(0), t.x.argmin(1, keepdim=True), t.x.argmax(keepdim=True),
        t.zero.argmin(),
    ),
    "any": lambda t: (t.m.any(), t.x.any(0), t.m.any((0, 1)), t.u.any(), t.i.any(1, keepdim=True), t.x[:0].any()),
    "all": lambda t: (t.m.all(), t.x.all(0), t.m.all((0, 1)), t.u.all(1), t.i.all(1, keepdim=True), t.x[:0].all()),
}  # fmt: skip

DIFFERENTIABLE = [torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.neg, F.gelu]

ACTIVATIONS: dict[str, Expression] = {
    "relu": lambda t: (t.x.relu(), t.i.relu(), t.h.relu(), t.zero.relu()),
    "sigmoid": lambda t: (t.x.sigmoid(), t.i.sigmoid(), t.d.sigmoid(), (t.x * 999).sigmoid()),
    "tanh": lambda t: (t.x.tanh(), t.i.tanh(), t.h.tanh()),
    "gelu": lambda t: (F.gelu(t.x), F.gelu(t.x, approximate="tanh"), F.gelu(t.h), F.gelu(t.zero), F.gelu(t.x[:0])),
    "softmax": lambda t: (
        t.x.softmax(0), t.b.softmax(-1), t.h.softmax(1), t.x.softmax(1, dtype=torch.double), t.zero.softmax(0),
    ),
    "log_softmax": lambda t: (t.x.log_softmax(0), t.b.log_softmax(-1), t.h.log_softmax(1), (t.x * 999).log_softmax(1)),
    "backward": lambda t: [gradient(t.x, f) for f in DIFFERENTIABLE],
    "gelu backward": lambda t: gradient(t.x, lambda x: F.gelu(x, approximate="tanh")),
    "softmax backward": lambda t: (gradient(t.x, lambda x: x.softmax(1)), gradient(t.x, lambda x: x.log_softmax(0))),
    "reduction backward": lambda t: (gradient(t.x, lambda x: x.mean(0)), gradient(t.x, lambda x: (x * x).sum() / 2)),
}  # fmt: skip

SHAPES: dict[str, Expression] = {
    "view": lambda t: (
        t.x.view(12), t.x.view(-1, 2), t.b.view(8, -1), t.zero.view(1), t.x[:0].view(-1, 3), t.x.view(torch.int32),
    ),
    "t": lambda t: (t.x.t(), t.v.t(), t.b.transpose(0, 2), t.b.transpose(-1, -2), t.zero.transpose(0, 0)),
    "permute": lambda t: (t.b.permute(2, 0, 1), t.b.permute(-1, 0, 1).contiguous(), t.b.permute(2, 0, 1).reshape(-1)),
    "expand": lambda t: (
        t.v.expand(2, 3), t.v.expand(4, -1), t.one.expand(2, 3, 4), t.zero.expand(3), t.x.expand(2, -1, -1),
    ),
    "unsqueeze": lambda t: (t.x.unsqueeze(0), t.x.unsqueeze(-1), t.zero.unsqueeze(0), t.x[:, None]),
    "squeeze": lambda t: (
        t.one.squeeze(), t.one.squeeze(0), t.one.squeeze(1), t.one.squeeze((0, -1)), t.zero.squeeze(0),
    ),
    "slice": lambda t: (t.x[1:], t.x[:, :-1], t.x[::2], t.x[-2:], t.x[9:], t.b[:, 1:3, ::2], t.x[1:][1:]),
    "select": lambda t: (t.x[0], t.x[-1], t.x[:, 1], t.v[2], t.b[1, :, 2], t.b.select(-1, 0)),
    "split": lambda t: (
        *t.x.split(3), *t.x.split(2, 1), *t.x.chunk(3), *t.x.split([1, 3]), *t.b.split([2, 1], -1), *t.x[:0].split(2),
    ),
    "unbind": lambda t: (*t.x.unbind(), *t.b.unbind(-1), *t.v.unbind(0)),
    "as_strided": lambda t: (
        t.x.as_strided((2, 2), (1, 3), 1), t.x.t().as_strided((3,), (4,)), t.x.t().clone().as_strided((5,), (2,)),
    ),
    "detach": lambda t: (t.x.detach(), t.x[1].detach(), aten.alias(t.x)),
    "reshape": lambda t: (t.x.t().reshape(12), t.x.reshape(3, 4), t.b.flatten(1), t.x.t().flatten()),
}  # fmt: skip

COPIES: dict[str, Expression] = {
    "cat": lambda t: (
        torch.cat([t.x, t.y]), torch.cat([t.x, t.i], 1), torch.cat([t.x, torch.zeros(0)]), torch.cat([t.u, t.m]),
    ),
    "stack": lambda t: (torch.stack([t.x, t.y]), torch.stack([t.v, t.v], -1), torch.stack([t.zero, t.zero])),
    "clone": lambda t: (t.x.clone(), t.x.t().clone(), t.x.t().contiguous(), t.v.expand(2, 3).clone(), t.zero.clone()),
    "to": lambda t: (
        t.x.double(), t.x.half(), t.x.long(), t.i.bool(), t.m.float(), t.u.to(torch.int8),
        t.x.to(torch.float64, copy=True),
    ),
    "index": lambda t: (
        t.v[t.pick], t.x[:, t.pick], t.x[t.pick, t.pick], t.x[t.m], t.x[t.pick[0]],
        t.b[t.pick[:2, None].clamp(max=1), :, t.pick],
    ),
    "index mask": lambda t: (t.b[:, t.m], t.x[:, t.v > 0], t.x[t.m & ~t.m], t.v[(t.v > 0).byte()]),
    "index 0-d": lambda t: (aten.index(t.v, [t.pick[1]]), aten.index(t.x, [t.pick[1]])),
    "index_select": lambda t: (
        t.x.index_select(0, t.pick), t.b.index_select(-1, t.pick), t.v.index_select(0, t.pick[1]),
    ),
    "gather": lambda t: (
        t.x.gather(1, t.x.argmax(1, keepdim=True)), t.x.gather(0, t.pick[None, :3]),
        t.b.gather(-1, t.b[:1].long() * 0),
    ),
    "embedding": lambda t: (
        F.embedding(t.pick, t.x), F.embedding(t.pick[:4].view(2, 2), t.x), F.embedding(t.pick[0], t.x),
    ),
    "nonzero": lambda t: (t.y.nonzero(), t.m.nonzero(), t.v.nonzero(as_tuple=True)[0], t.zero.nonzero()),
    "masked_select": lambda t: (t.x.masked_select(t.m), t.x.masked_select(t.v > 0), t.i.masked_select(t.m)),
    "masked_fill": lambda t: (
        t.x.masked_fill(t.m, 2), t.x.masked_fill(t.v > 0, -float("inf")), t.i.masked_fill(t.m, 2.5),
    ),
}  # fmt: skip

IN_PLACE = [
    torch.neg_, torch.abs_, torch.relu_, torch.sqrt_, torch.rsqrt_, torch.reciprocal_, torch.exp_, torch.log_,
    torch.sin_, torch.cos_, torch.tanh_, torch.sigmoid_,
]  # fmt: skip

WRITES: dict[str, Expression] = {
    "add_": lambda t: (
        written(t.x, lambda x: x.add_(t.y, alpha=2)), written(t.x, lambda x: x.add_(t.d)),
        written(t.i, lambda i: i.add_(t.u)),
    ),
    "sub_": lambda t: (written(t.x, lambda x: x.sub_(t.v)), written(t.x, lambda x: x.sub_(1))),
    "mul_": lambda t: (
        written(t.x, lambda x: x.mul_(0.5)), written(t.x, lambda x: x.mul_(t.m)), written(t.h, lambda h: h.mul_(t.x)),
    ),
    "div_": lambda t: (written(t.x, lambda x: x.div_(2)), written(t.x, lambda x: x.div_(t.pos))),
    "number": lambda t: [f(t.x, 2) for f in (aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar)],
    "number in place": lambda t: [
        written(t.x, lambda x, f=f: f(x, 2))
        for f in (aten.add_.Scalar, aten.sub_.Scalar, aten.mul_.Scalar, aten.div_.Scalar)
    ],
    "unary": lambda t: [written(t.pos, f) for f in IN_PLACE],
    "clamp_": lambda t: written(t.x, lambda x: x.clamp_(-0.5, 0.5)),
    "copy_": lambda t: (
        written(t.x, lambda x: x.copy_(t.i)), written(t.i, lambda i: i.copy_(t.y)),
        written(t.x, lambda x: x.copy_(t.v)),
    ),
    "fill_": lambda t: (
        written(t.x, lambda x: x.fill_(2)), written(t.i, lambda i: i.fill_(t.i[0, 0])),
        written(t.x, lambda x: x.zero_()),
    ),
    "masked_fill_": lambda t: written(t.x, lambda x: x.masked_fill_(t.m, 0.5)),
    "index_put_": lambda t: (
        written(t.x, lambda x: x.__setitem__(t.pick[:2], 5.0)), written(t.x, lambda x: x.__setitem__(t.m, 0.0)),
    ),
    "index_put_ sum": lambda t: written(t.v, lambda v: v.index_put_((t.pick,), torch.ones(5), accumulate=True)),
    "row": lambda t: written(t.x, lambda x: x[1].add_(10)),
    "column": lambda t: written(t.x, lambda x: x[:, 1].mul_(t.x[:, 0])),
    "transposed": lambda t: (
        written(t.x, lambda x: x.t()[0].zero_()), written(t.x.t(), lambda x: x.t().view(-1)[:5].zero_()),
    ),
    "flattened": lambda t: (
        written(t.x, lambda x: x.view(-1)[::2].fill_(7)), written(t.x, lambda x: x.view(2, 6)[0].neg_()),
    ),
    "element": lambda t: (written(t.x, lambda x: x[1, 2].fill_(9)), written(t.zero, lambda z: z.add_(1))),
    "pieces": lambda t: (written(t.x, lambda x: x.split(2)[1].zero_()), written(t.x, lambda x: x.unbind(1)[2].exp_())),
    "expanded": lambda t: written(t.v, lambda v: v.expand(1, 3).add_(1)),
    "strided": lambda t: (
        written(t.x, lambda x: x.as_strided((3,), (4,)).fill_(1)),
        written(t.x.t(), lambda x: x.as_strided((3,), (4,)).fill_(1)),
    ),
    "reinterpreted": lambda t: written(t.x, lambda x: x.view(torch.int32)[0].fill_(1065353216)),
    "deep": lambda t: written(t.x, lambda x: x[1:].t()[1:].unsqueeze(0).squeeze(0).detach()[:, 1:][0].mul_(-1)),
    "very deep": lambda t: written(t.x, lambda x: [x := x.t() for _ in range(11)][-1][1:].mul_(-1)),
}  # fmt: skip

GROUPS = (CREATION, ARITHMETIC, COMPARISON, PRODUCTS, REDUCTIONS, ACTIVATIONS, SHAPES, COPIES, WRITES)
CASES: dict[str, Expression] = {name: case for group in GROUPS for name, case in group.items()}


def evaluate_on_gt(expression: Expression) -> Any:
    inputs = Inputs(*[gt.to(tensor) for tensor in make_inputs()])
    with gt.device():
        results = expression(inputs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), results)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
@pytest.mark.parametrize("name", CASES)
def test_values_dtypes_and_shapes_are_those_of_torch(name: str, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, such as var of one element
        expected = tree_map_only(torch.Tensor, torch.Tensor.detach, CASES[name](make_inputs()))
    with running(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's
        actual = evaluate_on_gt(CASES[name])
    torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False)


def used_ops(session: Session) -> set[str]:
    signatures = session.signatures.values()
    return {sig.op for sig in signatures} | {step.op for sig in signatures for path in sig.paths for step in path}


def test_every_op_of_the_table_has_a_case(on_numpy: Session) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expression in CASES.values():
            evaluate_on_gt(expression)
    handles_only = {"aten.alias.default", "aten.detach.default", "aten._reshape_alias.default"}
    assert set(OPS) - used_ops(on_numpy) == handles_only | set(RANDOM)


def test_results_share_no_memory(on_numpy: Session) -> None:
    inputs = Inputs(*[gt.to(tensor) for tensor in make_inputs()])
    with gt.device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [expression(inputs) for expression in CASES.values()]
    on_numpy.synchronize()
    values = on_numpy._channel.executors[0].store.values()  # type: ignore[attr-defined]
    assert len({id(memory_owner(value)) for value in values}) == len(values) > len(results)


def test_every_name_of_the_table_is_an_aten_overload() -> None:
    for name in OPS:
        namespace, op, overload = name.split(".")
        assert str(getattr(getattr(aten, op), overload)) == name and namespace == "aten"


@pytest.mark.parametrize("left", DTYPES)
def test_promotion_is_that_of_torch(left: str) -> None:
    shapes = [(2,), ()]
    for right, first, second in itertools.product(DTYPES, shapes, shapes):
        arrays = np.zeros(first, DTYPES[left]), np.zeros(second, DTYPES[right])
        try:
            expected = torch.result_type(torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]))
        except RuntimeError:
            continue  # torch does not mix these
        if expected != torch.complex32:
            assert str(expected) == f"torch.{result_dtype(*arrays)}", (right, first, second)


RANDOM_CASES: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype, float, float]] = {
    "rand": (lambda: gt.rand(50, 2), torch.float32, 0, 1),
    "rand half": (lambda: gt.rand(50, 2, dtype=torch.float16), torch.float16, 0, 1),
    "rand generator": (lambda: gt.rand(50, 2, generator=torch.Generator().manual_seed(1)), torch.float32, 0, 1),
    "rand_like": (lambda: torch.rand_like(gt.zeros(50, 2, dtype=torch.float64)), torch.float64, 0, 1),
    "randn": (lambda: gt.randn(50, 2), torch.float32, -9, 9),
    "randn generator": (lambda: gt.randn(50, 2, generator=torch.Generator().manual_seed(1)), torch.float32, -9, 9),
    "randn_like": (lambda: torch.randn_like(gt.zeros(50, 2), dtype=torch.float64), torch.float64, -9, 9),
    "randint": (lambda: gt.randint(5, (50, 2)), torch.int64, 0, 5),
    "randint low": (lambda: gt.randint(-3, 5, (50, 2), dtype=torch.int32), torch.int32, -3, 5),
    "randperm": (lambda: gt.randperm(100).view(50, 2), torch.int64, 0, 100),
    "uniform_": (lambda: gt.zeros(50, 2).uniform_(-2, 3), torch.float32, -2, 3),
    "normal_": (lambda: gt.zeros(50, 2).normal_(1, 0.1), torch.float32, 0, 2),
    "bernoulli": (lambda: gt.bernoulli(gt.full((50, 2), 0.5)), torch.float32, 0, 1.1),
    "bernoulli_": (lambda: gt.zeros(50, 2, dtype=torch.int64).bernoulli_(0.5), torch.int64, 0, 1.1),
}


@pytest.mark.parametrize("name", RANDOM_CASES)
def test_random_ops_follow_the_seed(name: str, on_numpy: Session) -> None:
    draw, dtype, low, high = RANDOM_CASES[name]
    torch.manual_seed(3)
    first, other = draw().cpu(), draw().cpu()
    torch.manual_seed(3)
    assert torch.equal(draw().cpu(), first)
    assert torch.equal(other, first) is ("generator" in name)
    assert (first.dtype, first.shape) == (dtype, (50, 2))
    assert first.min() >= low and first.max() < high and first.unique().numel() > 1


def test_every_random_op_has_a_case(on_numpy: Session) -> None:
    for draw, *_ in RANDOM_CASES.values():
        draw().cpu()
    assert set(RANDOM) <= used_ops(on_numpy)


def test_float16_is_drawn_below_one(on_numpy: Session) -> None:
    assert gt.rand(50_000, dtype=torch.float16).cpu().max() < 1


def test_a_permutation_has_every_number_once(on_numpy: Session) -> None:
    assert gt.randperm(20).cpu().sort().values.tolist() == list(range(20))


def test_a_missing_op_is_named_when_its_result_is_read(on_numpy: Session) -> None:
    result = torch.special.bessel_j0(gt.ones(3))
    with pytest.raises(OpError, match=r"NotImplementedError.*aten\.special_bessel_j0\.default"):
        result.cpu()


def test_what_depends_on_a_missing_op_fails_alike_and_the_rest_goes_on(on_numpy: Session) -> None:
    fine = gt.ones(3)
    broken = torch.special.bessel_j0(fine) + 1
    with pytest.raises(OpError, match="special_bessel_j0"):
        broken.cpu()
    assert (fine + 1).tolist() == [2.0, 2.0, 2.0]


def test_a_missing_view_op_is_named(on_numpy: Session) -> None:
    with pytest.raises(OpError, match=r"aten\.diagonal\.default"):
        gt.ones(3, 3).diagonal().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_missing_dtype_is_named(dtype: torch.dtype, on_numpy: Session) -> None:
    with pytest.raises(OpError, match=f"NumPy has no dtype {str(dtype).removeprefix('torch.')}"):
        gt.ones(3).to(dtype).cpu()


REFUSED: dict[str, Expression] = {
    "mm of other shapes": lambda t: t.x @ t.x,
    "mm of other dtypes": lambda t: t.x @ t.d.t(),
    "mm of too many dims": lambda t: torch.mm(t.b, t.x),
    "broadcast": lambda t: t.x + t.pick,
    "float into int": lambda t: t.i.clone().add_(1.5),
    "division into int": lambda t: t.i.clone().div_(2),
    "growing in place": lambda t: t.v.clone().add_(t.x),
    "more dims in place": lambda t: t.v.clone().add_(t.v[None]),
    "mean of ints": lambda t: t.i.mean(),
    "var of ints": lambda t: t.i.var(),
    "minus bools": lambda t: t.m - t.m,
    "view across strides": lambda t: t.x.t().view(12),
    "t of many dims": lambda t: t.b.t(),
    "embedding out of range": lambda t: F.embedding(t.pick + 3, t.x),
    "embedding of a negative": lambda t: F.embedding(t.pick - 1, t.x),
    "index out of range": lambda t: t.x[:, t.pick + 3],
    "gather of a negative": lambda t: t.x.gather(1, t.pick[:, None] - 1),
    "max of nothing": lambda t: t.x[:0].max(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str, on_numpy: Session) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        REFUSED[name](make_inputs())
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):  # the last two are NumPy's
        evaluate_on_gt(REFUSED[name])


def test_training_follows_torch(on_numpy: Session) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    twin = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Tanh())
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    expected = train(model, x, y)
    assert train(gt.to(twin), gt.to(x), gt.to(y)) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    for ours, plain in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), plain.detach(), rtol=1e-4, atol=1e-5)


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_module_can_be_made_on_the_engine(on_numpy: Session) -> None:
    with gt.device():
        layer = torch.nn.Linear(3, 4)
    assert layer(gt.ones(2, 3)).detach().cpu().shape == (2, 4)
    assert layer.weight.detach().cpu().abs().max() <= 3**-0.5


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name: str) -> None:
    engine = NumPyEngine()
    args = {
        "aten.view.default": (ListArg((6,)),),
        "aten._reshape_alias.default": (ListArg((6,)), ListArg((1,))),
        "aten.view.dtype": (DType("int32"),),
        "aten.transpose.int": (0, 1),
        "aten.permute.default": (ListArg((1, 0)),),
        "aten.expand.default": (ListArg((4, 2, 3)),),
        "aten.unsqueeze.default": (0,),
        "aten.squeeze.dim": (0,),
        "aten.squeeze.dims": (ListArg((0, 1)),),
        "aten.select.int": (0, 1),
        "aten.split.Tensor": (1,),
        "aten.split_with_sizes.default": (ListArg((1, 1)),),
    }.get(name, ())
    pick = 1 if name in ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int") else None
    base = np.zeros((2, 3), np.float32)
    view = engine.make_view(ViewStep(name, args, {}, pick))(base)
    view[...] = 1
    assert engine.aliases(view, base) and base.any()


def test_a_view_of_a_received_buffer_shares_memory() -> None:
    engine, meta = NumPyEngine(), TensorMeta((2, 3), (3, 1), 0, "float32")
    base = engine.from_buffer(bytearray(24), meta, owned=True)
    assert engine.aliases(engine.make_view(ViewStep("aten.t.default", (), {}))(base), base)
    assert not engine.aliases(base.copy(), base)
    assert not engine.aliases(engine.from_buffer(bytearray(24), meta, owned=True), base)


@pytest.mark.parametrize("owned", [True, False])
def test_only_an_owned_buffer_is_kept(owned: bool) -> None:
    buffer = bytearray(np.arange(3, dtype=np.int64).tobytes())
    value = NumPyEngine().from_buffer(buffer, TensorMeta((3,), (1,), 0, "int64"), owned)
    value[0] = 7
    assert (buffer[0] == 7) is owned
    NumPyEngine().from_buffer(bytes(buffer), TensorMeta((3,), (1,), 0, "int64"), owned)[0] = 1


def test_a_view_that_must_be_a_copy_is_written_through() -> None:
    engine = NumPyEngine()
    view = engine.make_view(ViewStep("aten.view.default", (ListArg((6,)),), {}))
    base = np.zeros((3, 2), np.float32).T  # the client believes it is contiguous
    assert not engine.aliases(view(base), base)
    engine.write_through(base, view, np.arange(6))
    assert base.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_as_strided_counts_in_the_strides_that_the_client_knows() -> None:
    engine = NumPyEngine()
    step = ViewStep("aten.as_strided.default", (ListArg((2,)), ListArg((2,)), 1), {}, None, (1, 2))
    base = np.arange(6).reshape(2, 3)
    view = engine.make_view(step)
    assert view(base).tolist() == [3, 4]  # the storage with strides (1, 2) is 0 3 1 4 2 5
    engine.write_through(base, view, np.array([30, 40]))
    assert base.tolist() == [[0, 1, 2], [30, 40, 5]]


def test_as_strided_of_the_storage_itself_shares_memory() -> None:
    engine, base = NumPyEngine(), np.zeros((1, 3))  # any stride will do for a dim of size 1
    step = ViewStep("aten.as_strided.default", (ListArg((2,)), ListArg((2,)), 0), {}, None, (1, 1))
    assert engine.aliases(engine.make_view(step)(base), base)


@pytest.mark.parametrize(("size", "stride", "offset"), [(4, 2, 0), (3, 2, 2), (1, 1, 6), (2, 1, -1), (2, -1, 3)])
def test_as_strided_beyond_the_storage_is_refused(size: int, stride: int, offset: int) -> None:
    step = ViewStep("aten.as_strided.default", (ListArg((size,)), ListArg((stride,)), offset), {}, None, (3, 1))
    with pytest.raises(RuntimeError, match="out of bounds of 6 elements"):
        NumPyEngine().make_view(step)(np.zeros((2, 3)))


def test_bytes_leave_in_row_major_order() -> None:
    engine, value = NumPyEngine(), np.arange(6, dtype=np.int16).reshape(2, 3).T
    target = memoryview(bytearray(12))
    engine.read_into(value, target)
    assert bytes(target) == np.array([0, 3, 1, 4, 2, 5], np.int16).tobytes()


def test_the_bytes_of_an_array_are_those_of_its_memory() -> None:
    value = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert NumPyEngine().bytes_of(value).tobytes() == np.arange(6, dtype=np.int16).tobytes()


def test_there_are_no_collectives() -> None:
    engine = NumPyEngine()
    assert not engine.supports_distributed()
    for collective in (engine.all_reduce_sum, engine.all_gather, engine.reduce_scatter):
        with pytest.raises(NotImplementedError, match=collective.__name__):
            collective(np.zeros(3))
