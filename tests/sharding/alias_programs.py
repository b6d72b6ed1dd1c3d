"""Random programs of views, reads and writes that alias one tensor, and random layouts of that tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch

import gt
from gt.sharding.spec import ShardingSpec

MESHES = [(2,), (3,), (2, 2)]
SHAPES = [(6,), (7,), (4, 3), (5, 4), (3, 2, 4), (1, 5), (2, 1, 3), (1,), (0, 3), (2, 0), (4, 4)]
REPLICATED, PARTIAL = -1, -2


class Layout(NamedTuple):
    """The role of each axis of a mesh: it cuts a dim (modulo the rank), replicates, or is partial. `ragged`: cuts other
    than the default."""

    mesh: tuple[int, ...]
    roles: tuple[int, ...]
    ragged: bool = False

    def spec(self, shape: Sequence[int]) -> ShardingSpec:
        mesh = gt.mesh(self.mesh, ["x", "y"][: len(self.mesh)])
        dims: list[list[str]] = [[] for _ in shape]
        partial = []
        for axis, role in zip(mesh.axis_names, self.roles, strict=False):
            if role == PARTIAL:
                partial.append(axis)
            elif role != REPLICATED and dims:
                dims[role % len(dims)].append(axis)
        spec = ShardingSpec(mesh, dims, partial)
        if not self.ragged:
            return spec
        cuts = [_ragged(size, spec.shards(dim)) if dims[dim] else None for dim, size in enumerate(shape)]
        return ShardingSpec(mesh, dims, partial, cuts=cuts).normal(tuple(shape))


def _ragged(size: int, count: int) -> tuple[tuple[int, int], ...]:
    """The first shard is empty, the second has most."""
    bounds = [0, 0, *[max(size - shard, 0) for shard in range(count - 2, 0, -1)], size]
    return tuple(zip(bounds, bounds[1:], strict=False))


roles = st.one_of(st.integers(0, 2), st.sampled_from([0, 1, REPLICATED, PARTIAL]))
layouts = st.builds(Layout, st.sampled_from(MESHES), st.tuples(roles, roles), st.booleans())
Distribute = Callable[[torch.Tensor], torch.Tensor]


def distribute_as(layout: Layout) -> Distribute:
    return lambda tensor: gt.distribute(tensor, layout.spec(tensor.shape).mesh, layout.spec(tensor.shape))


def numbers(shape: Sequence[int], first: int = 0) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(tuple(shape)) - first


def longer(x: torch.Tensor, dim: int = 0, than: int = 0) -> bool:
    return x.dim() > 0 and x.shape[dim] > than


def reshaped(x: torch.Tensor, n: int) -> torch.Tensor:
    """As another view: the first dim cut in two, or the last two joined."""
    if n % 2 and longer(x) and x.shape[0] % 2 == 0:
        return x.view(2, x.shape[0] // 2, *x.shape[1:]) if x.dim() < 4 else x
    return x.reshape(*x.shape[:-2], -1) if x.dim() > 1 and x.numel() else x


VIEWS: dict[str, Callable[[Any, int], Any]] = {
    "x[1:]": lambda x, n: x[1:] if longer(x, than=1) else x,
    "x[-2:]": lambda x, n: x[-2:] if x.dim() else x,
    "x[:n]": lambda x, n: x[..., :n] if x.dim() else x,
    "x[..., ::2]": lambda x, n: x[..., ::2] if x.dim() else x,
    "select": lambda x, n: x[n % x.shape[0]] if longer(x) and x.dim() > 1 else x,
    "select last": lambda x, n: x.select(-1, -1) if longer(x, -1) and x.dim() > 1 else x,
    "transpose": lambda x, n: x.transpose(0, -1) if x.dim() > 1 else x,
    "permute": lambda x, n: x.movedim(0, -1) if x.dim() > 1 else x,
    "view(-1)": lambda x, n: x.view(-1) if x.is_contiguous() else x,
    "reshape": reshaped,
    "unsqueeze": lambda x, n: x.unsqueeze(n % (x.dim() + 1)) if x.dim() < 4 else x,
    "squeeze": lambda x, n: x.squeeze(),
    "diagonal": lambda x, n: x.diagonal() if x.dim() > 1 else x,
    "split": lambda x, n: x.split(2)[n % -(-x.shape[0] // 2)] if longer(x) else x,
    "unbind": lambda x, n: x.unbind(-1)[n % x.shape[-1]] if longer(x, -1) and x.dim() > 1 else x,
    "detach": lambda x, n: x.detach(),
}
READS: dict[str, Callable[[Any, int], Any]] = {
    "expand": lambda x, n: x.unsqueeze(0).expand(3, *x.shape),
    "sum": lambda x, n: x.sum(0) if x.dim() else x + 1,
    "product": lambda x, n: x * x,
    "clone": lambda x, n: x.clone(),
    "matmul": lambda x, n: x @ x.transpose(-1, -2) if x.dim() == 2 else x + x,
    "cat": lambda x, n: torch.cat([x, x]) if x.dim() else x + 0,
}


def fill_out(x: Any, n: int, distribute: Distribute) -> None:
    torch.add(x, distribute(numbers(x.shape)), out=x)


def index_put(x: Any, n: int, distribute: Distribute) -> None:
    if longer(x):
        rows = torch.tensor([n % x.shape[0], 0])
        x.index_put_((distribute(rows),), distribute(torch.tensor(1.0)), accumulate=True)


def assign_rows(x: Any, n: int, distribute: Distribute) -> None:
    if longer(x):
        x[distribute(torch.tensor([n % x.shape[0]]))] = 3.0


def shift(x: Any, n: int, distribute: Distribute) -> None:
    """From one alias into another."""
    if longer(x, than=1):
        x[1:] = x[:-1].clone()


def fold_halves(x: Any, n: int, distribute: Distribute) -> None:
    """Two parts of one tensor in one op, one of them written."""
    if longer(x, than=1):
        half = x.shape[0] // 2
        x[:half].add_(x[half : 2 * half])


def foreach(x: Any, n: int, distribute: Distribute) -> None:
    """Several parts of one tensor written in one op."""
    if longer(x, than=1):
        torch._foreach_add_([x[:1], x[1:]], [distribute(numbers(x[:1].shape)), x[1:] * 0.5])


Write = Callable[[Any, int, Distribute], Any]
WRITES: dict[str, Write] = {
    "add_": lambda x, n, distribute: x.add_(n),
    "add_ tensor": lambda x, n, distribute: x.add_(distribute(numbers(x.shape, n))),
    "add_ row": lambda x, n, distribute: x.add_(distribute(numbers(x.shape[-1:], n))),
    "sub_ itself": lambda x, n, distribute: x.sub_(x * 0.5),
    "mul_": lambda x, n, distribute: x.mul_(0.5),
    "mul_ x": lambda x, n, distribute: x.mul_(x.sign()),
    "fill_": lambda x, n, distribute: x.fill_(n),
    "zero_": lambda x, n, distribute: x.zero_(),
    "copy_": lambda x, n, distribute: x.copy_(distribute(numbers(x.shape, n))),
    "copy_ cpu": lambda x, n, distribute: x.copy_(numbers(x.shape, n)),
    "x[0] =": lambda x, n, distribute: x.__setitem__(0, n) if longer(x) else x,
    "x[-1] = row": lambda x, n, distribute: x.__setitem__(-1, distribute(numbers(x.shape[1:]))) if longer(x) else x,
    "x[..., 1:] = ": lambda x, n, distribute: x.__setitem__((..., slice(1, None)), n) if x.dim() else x,
    "x[rows] =": assign_rows,
    "x[mask] =": lambda x, n, distribute: x.__setitem__(x < n, 9.0),
    "masked_fill_": lambda x, n, distribute: x.masked_fill_(x > n, -1.0),
    "index_put_": index_put,
    "out=": fill_out,
    "clamp_": lambda x, n, distribute: x.clamp_(-5, 20),
    "x += x.sum()": lambda x, n, distribute: x.add_(x.sum() * 0.125),
    "flip": lambda x, n, distribute: x.copy_(x.flip(0)) if x.dim() else x,
    "cumsum_": lambda x, n, distribute: x.cumsum_(0) if x.dim() and x.numel() < 20 else x,
    "shift": shift,
    "halves": fold_halves,
    "foreach": foreach,
}  # fmt: skip


class Step(NamedTuple):
    kind: str
    name: str
    which: int
    n: int
    other: Layout

    def apply(self, pool: list[Any], distribute: Distribute) -> None:
        target = pool[self.which % len(pool)]
        if self.kind == "view":
            pool.append(VIEWS[self.name](target, self.n))
        else:
            WRITES[self.name](target, self.n, distribute)


def steps_of(views: Sequence[str], writes: Sequence[str]) -> st.SearchStrategy[Step]:
    names = st.sampled_from([("view", name) for name in views] + [("write", name) for name in writes])
    return st.builds(lambda name, *rest: Step(*name, *rest), names, st.integers(0, 6), st.integers(0, 4), layouts)


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def same(ours: Any, plain: torch.Tensor, told: object) -> None:
    assert ours.shape == plain.shape and ours.stride() == plain.stride(), told
    torch.testing.assert_close(ours.detach().cpu(), plain.detach(), msg=lambda m: f"{told}\n{m}")
