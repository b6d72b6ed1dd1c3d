"""The two sides on which a sample runs: plain torch, and GT. Each copies the sample's tensors to itself first."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from gt.client import creation
from gt.client.active_session import activate
from gt.client.session import Session
from gt.core.errors import GTError
from gt.core.meta import is_dense
from gt.launch.in_process_channel import InProcessChannel
from gt.sharding.spec import DeviceMesh, ShardingSpec

MODES = {"embedded": 1, "virtual2": 2, "sharded": 8}  # how many workers
_MESHES = [(2,), (3,), (4,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)]


class Side(Protocol):
    def place(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """A place for a result, to be written to."""

    def settle(self) -> None: ...
    def factories(self) -> contextlib.AbstractContextManager[Any]: ...


class PlainSide:
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.place(tensor)

    def settle(self) -> None:
        """Nothing is under way when a plain op returns."""

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class GTSide:
    """Owns this process's session. `fresh` says that no sample has run in it yet, `sums` that sums may be made in
    another order than torch's."""

    sums = False

    def __init__(self, mode: str) -> None:
        self._workers = MODES[mode]
        self._session: Session | None = None
        self.fresh = False

    def reopen(self) -> None:
        self.close()
        channel = InProcessChannel(self._workers, "pytorch")
        self._session = Session(channel, channel.welcome())
        activate(self._session)
        self.fresh = True

    def close(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):  # it may be what a sample broke
                self._session.close("end")
            activate(None)
            self._session = None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return creation.to(tensor)

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.place(tensor)

    def settle(self) -> None:
        """Raises the failure of an op whose result nobody read."""
        assert self._session is not None
        self._session.synchronize()

    def drain(self) -> None:
        """Forget failures that a sample left behind, so that they are not blamed on the next one."""
        assert self._session is not None
        self.fresh = False
        try:
            while self._session.inbox.failures:
                with contextlib.suppress(GTError):
                    self._session.synchronize()
        except Exception:
            self.reopen()

    def factories(self) -> contextlib.AbstractContextManager[Any]:
        return creation.device()


class ShardedSide(GTSide):
    """Lays every tensor out at random over some mesh: dims cut by one axis or several, partial, replicated. What is
    chosen depends on the tensor alone, so that a failure can be repeated."""

    sums = True

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        ours = creation.to(tensor)
        return ours if tensor.layout is not torch.strided else distribute_at_random(ours, seed_of(tensor))


def seed_of(tensor: torch.Tensor) -> int:
    return zlib.crc32(repr((tuple(tensor.shape), tensor.dtype, tensor.flatten()[:64].tolist())).encode())


def distribute_at_random(tensor: Any, seed: int, kinds: Sequence[str] = ("sum",)) -> torch.Tensor:
    """Mostly on the one mesh that a sample's tensors have in common, sometimes on another or on one worker only.
    `kinds` are those of partial values."""
    chance = random.Random(seed)
    if chance.random() < 0.1:
        return tensor
    shape = (2, 2) if chance.random() < 0.7 else chance.choice(_MESHES)
    names = [f"a{place}" for place in range(len(shape))]
    mesh = DeviceMesh(shape, names)
    dims: list[list[str]] = [[] for _ in range(tensor.dim())]
    partial = []
    for axis in chance.sample(names, len(names)):
        role = chance.random()
        if role < 0.6 and dims:
            dims[chance.randrange(len(dims))].append(axis)
        elif role < 0.75 and tensor.dtype is not torch.bool and tensor.dtype.itemsize > 1:
            partial.append(axis)
    return creation.distribute(tensor, mesh, ShardingSpec(mesh, dims, partial, chance.choice(kinds)))


def make_side(mode: str) -> GTSide:
    return ShardedSide(mode) if mode == "sharded" else GTSide(mode)


@dataclass(frozen=True, slots=True)
class Call:
    """A sample's arguments at one side; `tensors` are the copies that it holds, each once."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]


def copy_call(sample: Any, side: Side, requires_grad: bool) -> Call:
    made: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = _relocate(tensor.detach(), side.place).detach()
            made[id(tensor)] = new.requires_grad_(requires_grad and tensor.requires_grad)
        return made[id(tensor)]

    with torch.no_grad():
        target, args, kwargs = tree_map_only(torch.Tensor, copy, (sample.input, sample.args, sample.kwargs))
    return Call(target, args, kwargs, list(made.values()))


def _relocate(tensor: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Strides, offset, and lazy conjugate and negative bits are kept: a view is made again over the moved storage."""
    if tensor.is_conj():
        return _relocate(tensor.conj(), place).conj()
    if tensor.is_neg():
        return torch._neg_view(_relocate(torch._neg_view(tensor), place))
    if tensor.layout is not torch.strided or _is_whole(tensor):
        return place(tensor)
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return place(storage).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_whole(tensor: torch.Tensor) -> bool:
    return bool(is_dense(tensor.shape, tensor.stride()) and tensor.untyped_storage().nbytes() == tensor.nbytes)
