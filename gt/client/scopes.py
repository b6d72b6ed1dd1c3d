"""Signal scopes: which one an op is issued in.

Scopes are frames on a stack that belongs to the thread, or to the task of asynchronous code. A gradient runs in the
backward scope of the op that it is the gradient of, whoever calls backward: torch numbers the nodes of its graph as
they are made, so the numbers that appeared while a frame was on top say which frame a node belongs to.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec
import torch

from gt.client.geometry import Geometry
from gt.client.storage import Node
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

_ACCUMULATES = 1 << 63  # nodes that accumulate gradients have numbers from here on
_MOST_MARKS = 1 << 15  # graphs older than this many changes of scope run their gradients where their tensors are
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


class ScopeFrame:
    """One entry into a scope. `backward` is the signal that its gradients run under, if that was said where it was
    entered; `owner` is what has to leave it; `node` is the gradient that was being computed then, if any."""

    __slots__ = ("backward", "name", "node", "outer", "owner", "resolved", "turned")

    def __init__(
        self, name: str, backward: str | None, outer: ScopeFrame | None, owner: object = None, node: object = None
    ) -> None:
        self.name = name
        self.backward = backward
        self.outer = outer
        self.owner = owner
        self.node = node
        self.resolved: tuple[ScopeResolver, int, tuple[WorkerInfo, ...], int, int] | None = None
        self.turned: tuple[int, ScopeFrame] | None = None

    def gradients(self) -> ScopeFrame:
        """The frame that gradients of what ran in this one run in: the nearest backward that is named."""
        version = registry.version
        if self.turned is None or self.turned[0] != version:
            self.turned = (version, self._turn())
        return self.turned[1]

    def _turn(self) -> ScopeFrame:
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
    """Which frame was on top while a thread made the nodes of its graphs: the numbers at which that changed."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.frames: list[ScopeFrame | None] = []
        self.seen = _node_number()

    def note(self, frame: ScopeFrame | None) -> None:
        """The nodes that were made since the last note belong to a frame."""
        number = _node_number()
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
        place = bisect_right(self.starts, number) - 1
        return self.frames[place] if place >= 0 else None


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
    frame = ScopeFrame(name, backward, outer, owner, _current_node())
    _top.set(frame)
    return frame


def pop(frame: ScopeFrame) -> None:
    """Leave a scope, and those inside it that were not left."""
    _thread.marks.note(_top.get())
    _top.set(frame.outer)


def leave(owner: object) -> ScopeFrame | None:
    """Leave the scope that its owner has entered last; None where this thread or task is in none of it."""
    frame = _top.get()
    while frame is not None and frame.owner is not owner:
        frame = frame.outer
    if frame is not None:
        pop(frame)
    return frame


def top() -> ScopeFrame | None:
    return _top.get()


def owner_of_gradient(number: int) -> ScopeFrame | None:
    """The frame in which a node of a graph was made: by this thread, if it has made so many, or else by another."""
    marks = _thread.marks
    if number >= _node_number():
        marks = next((others for others in list(_all_marks) if number < others.seen), marks)
    return marks.owner(number)


class ScopeResolver:
    """The scopes of a session: what its frames mean with the workers that are there. `auto`: whether tensors that are
    created outside any scope are cut along their first dim (None: those for which that is even)."""

    def __init__(self, session: Session, auto: bool | None) -> None:
        self._session = session
        self._auto = auto
        self._numbers = itertools.count(1)
        self._codes: dict[tuple[str, PolicyRecord | None, bool], int] = {}
        self._unknown: set[str] = set()

    def of(self, nodes: Sequence[Node], geometry: Geometry | None) -> int:
        """The scope of an op with these inputs; `geometry` is that of its one result."""
        frame = _top.get()
        node = _current_node()
        if node is not None and (frame is None or frame.node is not node):
            number = node._sequence_nr()
            if number >= _ACCUMULATES:
                return 0  # where its gradient is
            forward = owner_of_gradient(number)
            frame = forward.gradients() if forward is not None else frame
        _thread.marks.note(frame)
        code = self._code(frame, nodes) if frame is not None else 0
        return code if code or nodes or geometry is None else self._code_of_created(geometry)

    def _code(self, frame: ScopeFrame, nodes: Sequence[Node]) -> int:
        resolved, workers = frame.resolved, self._session.workers
        if resolved is None or resolved[0] is not self or resolved[1] != registry.version or resolved[2] is not workers:
            resolved = frame.resolved = (self, registry.version, workers, *self._resolve(frame))
        return resolved[4] if nodes and all(map(_is_neutral, nodes)) else resolved[3]

    def _there(self) -> list[int]:
        return [info.worker for info in self._session.workers]

    def _resolve(self, frame: ScopeFrame) -> tuple[int, int]:
        """The codes of a scope as it is configured now: for ops in general, and for ops on parameters alone, which
        introduce no sharding. 0 where none of the frames is configured."""
        found = self._configured(frame)
        if not found:
            return 0, 0
        name, config = found[0]
        placed = next(((n, c) for n, c in found if c.shard is not None), None)
        policy = self._policy(*placed) if placed is not None else None
        code = self._define(name, policy, config.compile)
        if policy is None:
            return code, code
        return code, self._define(name, msgspec.structs.replace(policy, constrains=False), config.compile)

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
        """None with the worker of this process alone: the same program runs there as anywhere."""
        if self._session.embedded or config.shard is None:
            return None
        return resolve_policy(config.shard, self._there(), f"{at(config.source)}signal {name!r}")

    def layout(self, name: str, shape: Sequence[int]) -> ShardingSpec | None:
        """How a tensor lies that is created in a scope; None where the signal does not say."""
        found = self._configured(ScopeFrame(name, None, None))
        policy = self._policy(*found[0]) if found else None
        return Policy(policy).layout(tuple(shape)) if policy is not None else None

    def _code_of_created(self, geometry: Geometry) -> int:
        """Tensors that are created outside any scope are shared among all workers."""
        shape, count = geometry.shape, len(self._session.workers)
        if count < 2 or self._auto is False or not shape or shape[0] < 2:
            return 0
        if self._auto is None and (len(shape) != 2 or shape[0] % count):
            return 0
        mesh = DeviceMesh([count], [ROW], self._there())
        return self._define("auto", PolicyRecord(mesh.record(), lead=((ROW,),), pins=False), False)

    def _define(self, name: str, policy: PolicyRecord | None, compile_: bool) -> int:
        key = (name, policy, compile_)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = next(self._numbers)
            self._session.emit(DefineScope(code, name, policy, compile_))
        return code


def _is_neutral(node: Node) -> bool:
    """A parameter, or a single number."""
    return node.base.is_parameter or not node.geometry.shape
