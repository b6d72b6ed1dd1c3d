"""Signal scopes: the stack of those that the program has entered, and the scope of each op and gradient.

A stack belongs to a thread, or to a task of asynchronous code. A gradient runs in the backward scope of the op that it
is the gradient of, wherever backward is called: autograd numbers the nodes of its graph as they are made, so a node
belongs to the frame that was on top while its number was given.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec

from gt.client.geometry import Geometry
from gt.client.storage import TensorRef
from gt.client.torch_patches.autograd_nodes import (
    FIRST_ACCUMULATING,
    current_node,
    next_sequence_number,
    sequence_number,
)
from gt.core.errors import SignalError
from gt.core.messages import DefineScope, WorkerInfo
from gt.core.signatures import PolicyRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.signals.config import SignalConfig, at
from gt.signals.policy import Policy
from gt.signals.registry import registry
from gt.signals.resolution import ROW, resolve_policy

if TYPE_CHECKING:
    from gt.client.session import Session

log = logging.getLogger("gt.signals")

_MOST_MARKS = 1 << 15  # gradients of graphs older than this many changes of scope run without a scope


class ScopeFrame:
    """A scope that was entered. `backward` is the signal of its gradients, where the program named one; `owner` is the
    object that leaves it; `autograd_node` is the node whose gradient was being computed then, if any."""

    __slots__ = ("_backward_frame", "autograd_node", "backward", "name", "outer", "owner", "resolved")

    def __init__(
        self,
        name: str,
        backward: str | None,
        outer: ScopeFrame | None,
        owner: object = None,
        autograd_node: object = None,
    ) -> None:
        self.name = name
        self.backward = backward
        self.outer = outer
        self.owner = owner
        self.autograd_node = autograd_node
        self.resolved: tuple[ScopeResolver, int, tuple[WorkerInfo, ...], int, int] | None = None
        self._backward_frame: tuple[int, ScopeFrame] | None = None

    def backward_frame(self) -> ScopeFrame:
        """The frame of the gradients of ops that ran in this one: that of the nearest named backward signal."""
        version = registry.version
        if self._backward_frame is None or self._backward_frame[0] != version:
            self._backward_frame = (version, self._find_backward())
        return self._backward_frame[1]

    def _find_backward(self) -> ScopeFrame:
        frame: ScopeFrame | None = self
        while frame is not None:
            config = registry.get(frame.name)
            backward = frame.backward or (config.backward_signal if config is not None else None)
            if backward is not None:
                return ScopeFrame(backward, None, frame.outer)
            if config is not None and config.shard is not None:
                return self
            frame = frame.outer
        return self


class _Marks:
    """The frames that were on top while a thread made autograd nodes, and the node numbers at which that changed."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.frames: list[ScopeFrame | None] = []
        self.seen = next_sequence_number()

    def note(self, frame: ScopeFrame | None) -> None:
        """Assign the nodes that were made since the last note to a frame."""
        number = next_sequence_number()
        if number == self.seen:
            return
        if not self.frames or self.frames[-1] is not frame:
            self.starts.append(self.seen)
            self.frames.append(frame)
            if len(self.starts) > _MOST_MARKS:
                del self.starts[: _MOST_MARKS // 2], self.frames[: _MOST_MARKS // 2]
        self.seen = number

    def owner(self, number: int) -> ScopeFrame | None:
        """The frame of a node that this thread made."""
        index = bisect_right(self.starts, number) - 1
        return self.frames[index] if index >= 0 else None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.marks = _Marks()
        _all_marks.add(self.marks)


_all_marks: WeakSet[_Marks] = WeakSet()
_thread = _Thread()
_top: ContextVar[ScopeFrame | None] = ContextVar("gt.signal", default=None)
_in_use = False


def in_use() -> bool:
    """Whether this process has entered any scope."""
    return _in_use


def push(name: str, backward: str | None = None, owner: object = None) -> ScopeFrame:
    """Enter a scope."""
    global _in_use
    _in_use = True
    for given in (name, *([] if backward is None else [backward])):
        if not isinstance(given, str) or not given:
            raise SignalError(f"the name of a signal is a text that is not empty, not {given!r}")
    registry.check_backward(name)
    outer = _top.get()
    _thread.marks.note(outer)
    frame = ScopeFrame(name, backward, outer, owner, current_node())
    _top.set(frame)
    return frame


def pop(frame: ScopeFrame) -> None:
    """Leave a scope, and those inside it that were not left."""
    _thread.marks.note(_top.get())
    _top.set(frame.outer)


def leave(owner: object) -> ScopeFrame | None:
    """Leave the scope that an owner has entered last; None where this thread or task is in none of its scopes."""
    frame = _top.get()
    while frame is not None and frame.owner is not owner:
        frame = frame.outer
    if frame is not None:
        pop(frame)
    return frame


def top() -> ScopeFrame | None:
    return _top.get()


def owner_of_gradient(number: int) -> ScopeFrame | None:
    """The frame in which an autograd node was made: by this thread, if it has made so many, or else by another."""
    marks = _thread.marks
    if number >= next_sequence_number():
        marks = next((others for others in list(_all_marks) if number < others.seen), marks)
    return marks.owner(number)


class ScopeResolver:
    """Resolves the scope of each op of a session to a policy for the connected workers. `auto`: whether tensors that
    are created outside any scope are cut along their first dim (None: those that are cut evenly). `scope_ids` are the
    scopes that the dispatcher knows."""

    def __init__(self, session: Session, auto: bool | None) -> None:
        self._session = session
        self._auto = auto
        self._next_id = itertools.count(1)
        self.scope_ids: dict[tuple[str, PolicyRecord | None, bool], int] = {}
        self._unknown: set[str] = set()

    def scope_id(self, refs: Sequence[TensorRef], geometry: Geometry | None) -> int:
        """The id of an op's scope, 0 for none; `geometry` is that of its single result. Hot path."""
        frame = _top.get()
        autograd_node = current_node()
        if autograd_node is not None and (frame is None or frame.autograd_node is not autograd_node):
            number = sequence_number(autograd_node)
            if number >= FIRST_ACCUMULATING:
                return 0  # accumulation runs where the gradient is
            forward = owner_of_gradient(number)
            frame = forward.backward_frame() if forward is not None else frame
        _thread.marks.note(frame)
        scope_id = self._id_of_frame(frame, refs) if frame is not None else 0
        return scope_id if scope_id or refs or geometry is None else self._id_of_created(geometry)

    def _id_of_frame(self, frame: ScopeFrame, refs: Sequence[TensorRef]) -> int:
        resolved, workers = frame.resolved, self._session.workers
        if resolved is None or resolved[0] is not self or resolved[1] != registry.version or resolved[2] is not workers:
            resolved = frame.resolved = (self, registry.version, workers, *self._resolve(frame))
        return resolved[4] if refs and all(map(_is_neutral, refs)) else resolved[3]

    def _connected(self) -> list[int]:
        return [info.worker for info in self._session.workers]

    def _resolve(self, frame: ScopeFrame) -> tuple[int, int]:
        """The ids of a scope as it is configured now: for ops in general, and for ops on parameters alone, which
        introduce no sharding. 0 where none of the frames is configured."""
        found = self._configured(frame)
        if not found:
            return 0, 0
        name, config = found[0]
        placed = next(((n, c) for n, c in found if c.shard is not None), None)
        policy = self._policy(*placed) if placed is not None else None
        scope_id = self._define(name, policy, config.compile)
        if policy is None:
            return scope_id, scope_id
        return scope_id, self._define(name, msgspec.structs.replace(policy, constrains=False), config.compile)

    def _configured(self, frame: ScopeFrame | None) -> list[tuple[str, SignalConfig]]:
        """The configured signals of a stack, the innermost first."""
        found = []
        while frame is not None:
            config = registry.get(frame.name)
            if config is not None:
                found.append((frame.name, config))
            elif frame.name not in self._unknown:
                self._unknown.add(frame.name)
                log.info("signal %r has no configuration and changes nothing", frame.name)
            frame = frame.outer
        return found

    def _policy(self, name: str, config: SignalConfig) -> PolicyRecord | None:
        """None where the only worker is in this process: layouts are ignored there."""
        if self._session.embedded or config.shard is None:
            return None
        return resolve_policy(config.shard, self._connected(), f"{at(config.source)}signal {name!r}")

    def layout(self, name: str, shape: Sequence[int]) -> ShardingSpec | None:
        """The layout of a tensor created in a scope; None where the signal names none."""
        found = self._configured(ScopeFrame(name, None, None))
        policy = self._policy(*found[0]) if found else None
        return Policy(policy).layout(tuple(shape)) if policy is not None else None

    def _id_of_created(self, geometry: Geometry) -> int:
        """The scope of a tensor that is created outside any scope: it is cut over all workers."""
        shape, count = geometry.shape, len(self._session.workers)
        if count < 2 or self._auto is False or not shape or shape[0] < 2:
            return 0
        if self._auto is None and (len(shape) != 2 or shape[0] % count):
            return 0
        mesh = DeviceMesh([count], [ROW], self._connected())
        return self._define("auto", PolicyRecord(mesh.record(), lead=((ROW,),), pins=False), False)

    def _define(self, name: str, policy: PolicyRecord | None, compile_: bool) -> int:
        key = (name, policy, compile_)
        scope_id = self.scope_ids.get(key)
        if scope_id is None:
            scope_id = self.scope_ids[key] = next(self._next_id)
            self._session.outbox.emit(DefineScope(scope_id, name, policy, compile_))
        return scope_id


def _is_neutral(ref: TensorRef) -> bool:
    """A parameter, or a single number."""
    return ref.storage.is_parameter or not ref.geometry.shape
