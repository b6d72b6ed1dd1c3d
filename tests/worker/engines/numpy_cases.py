"""Expressions that together use every op of the NumPy engine, by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812


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
    "index_fill_": lambda t: written(t.x, lambda x: x.index_fill_(1, t.pick[:2], 5.0)),
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
