"""What the dispatcher knows: workers, sessions, and where every tensor is. Changed by `apply`-like methods only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from gt.core.messages import Command, Signature, WorkerInfo, session_of
from gt.core.meta import TensorMeta

RECENT = 4096  # commands remembered per worker, to tell what it was at when it died


@dataclass
class Worker:
    """`resident` counts the bytes of tensors it holds; `known` are the op codes it was told; a worker that is not
    `ready` cannot exchange tensors with the others yet and gets no work."""

    info: WorkerInfo
    ready: bool = True
    resident: int = 0
    sent: int = 0
    known: set[int] = field(default_factory=set)
    recent: deque[Command] = field(default_factory=lambda: deque(maxlen=RECENT))


class Misfit(Exception):
    """A signature that makes no sense, or an instruction that does not fit its signature."""


class Op(NamedTuple):
    """A signature and what planning it needs, computed once. `gives` counts new tensors and new versions."""

    signature: Signature
    takes: int
    gives: int
    writes: tuple[int, ...]
    outputs: tuple[TensorMeta, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, signature: Signature) -> Op:
        takes, writes, outputs = len(signature.paths), signature.writes, signature.outputs
        if len(set(writes)) < len(writes) or not all(0 <= place < takes for place in writes):
            raise Misfit(f"{signature.op} of {takes} tensors cannot write {writes}")
        sizes = tuple([meta.nbytes for meta in outputs])
        return cls(signature, takes, len(outputs) + len(writes), writes, outputs, sizes)


@dataclass
class Session:
    """`ops`, `sites` and `scopes` are what the client defined, by its codes."""

    ident: int
    host: str
    pid: int
    ops: dict[int, Op] = field(default_factory=dict)
    sites: dict[int, tuple[str, int]] = field(default_factory=dict)
    scopes: dict[int, str] = field(default_factory=dict)

    def site(self, code: int) -> str:
        file, line = self.sites.get(code, ("?", 0))
        return f"{file}:{line}"


@dataclass
class State:
    """`homes`: the workers that hold a tensor, the first being the original and the others copies made for use.
    `lost`: tensors whose last copy went with a worker, and which worker that was."""

    workers: dict[int, Worker] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    homes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    metas: dict[int, TensorMeta] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)

    def place(self, ident: int, meta: TensorMeta, worker: int) -> None:
        self.place_sized(ident, meta, meta.nbytes, worker)

    def place_sized(self, ident: int, meta: TensorMeta, nbytes: int, worker: int) -> None:
        """`place` for whoever has computed the size already."""
        self.homes[ident] = (worker,)
        self.metas[ident] = meta
        self.sizes[ident] = nbytes
        self.workers[worker].resident += nbytes

    def held_by(self, session: int) -> list[int]:
        """The tensors of a session, lost ones included."""
        return [ident for ident in self.metas if session_of(ident) == session]

    def copy(self, ident: int, worker: int) -> None:
        self.homes[ident] += (worker,)
        self.workers[worker].resident += self.sizes[ident]

    def remove(self, ident: int) -> tuple[int, ...]:
        """Forget a tensor; gives the workers that held it."""
        workers = self.homes.pop(ident, ())
        self.metas.pop(ident, None)
        nbytes = self.sizes.pop(ident, 0)
        if self.lost:
            self.lost.pop(ident, None)
        for worker in workers:
            self.workers[worker].resident -= nbytes
        return workers

    def lose(self, ident: int, meta: TensorMeta, worker: int) -> None:
        """A tensor that never got a value, because of a worker that is gone."""
        self.metas[ident] = meta
        self.sizes[ident] = meta.nbytes
        self.lost[ident] = worker

    def lose_worker(self, worker: int) -> None:
        """A worker is gone: copies elsewhere live on, what only it held is lost."""
        del self.workers[worker]
        for ident, homes in list(self.homes.items()):
            if worker in homes:
                rest = tuple([home for home in homes if home != worker])
                if rest:
                    self.homes[ident] = rest
                else:
                    del self.homes[ident]
                    self.lost[ident] = worker

    def validate(self) -> None:
        """The invariants, checked by tests after every message."""
        assert self.homes.keys() | self.lost.keys() == self.metas.keys()
        assert not self.homes.keys() & self.lost.keys()
        assert self.sizes == {ident: meta.nbytes for ident, meta in self.metas.items()}
        for worker in self.workers.values():
            held = [ident for ident, homes in self.homes.items() if worker.info.worker in homes]
            assert worker.resident == sum(self.metas[ident].nbytes for ident in held)
        for ident, homes in self.homes.items():
            assert homes and set(homes) <= self.workers.keys() and len(set(homes)) == len(homes), (ident, homes)
