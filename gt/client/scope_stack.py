"""The stack of signal scopes that the program has entered, and the scope in which each autograd node was made.

A stack belongs to a thread, or to a task of asynchronous code. A gradient runs in the backward scope of the op that it
is the gradient of, wherever backward is called: autograd numbers the nodes of its graph as they are made, so a node
belongs to the frame that was on top while its number was given.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from gt.client.call_sites import Sites
from gt.client.torch_patches.autograd_nodes import current_node, next_sequence_number
from gt.core.errors import SignalError
from gt.signals.registry import registry

log = logging.getLogger("gt.signals")

_MAX_MARKS = 1 << 15  # gradients of graphs older than this many changes of scope run without a scope


class ScopeFrame:
    """A scope that was entered. `backward` is the signal of its gradients, if the program named one; `owner` is the
    object that leaves it; `autograd_node` is the node whose gradient was being computed then, if any;
    `resolved` belongs to the ScopeResolver."""

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
        self.resolved: Any = None
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
            if len(self.starts) > _MAX_MARKS:
                del self.starts[: _MAX_MARKS // 2], self.frames[: _MAX_MARKS // 2]
        self.seen = number

    def frame_of_node(self, number: int) -> ScopeFrame | None:
        """The frame of a node that this thread made."""
        index = bisect_right(self.starts, number) - 1
        return self.frames[index] if index >= 0 else None


class _Thread(threading.local):
    """The marks of each thread."""

    def __init__(self) -> None:
        self.marks = _Marks()
        _all_marks.add(self.marks)


_all_marks: WeakSet[_Marks] = WeakSet()
_thread = _Thread()
_top: ContextVar[ScopeFrame | None] = ContextVar("gt.signal", default=None)
_in_use = False


def in_use() -> bool:
    """Whether this process has entered any scope, or ops are followed as if it had."""
    return _in_use


def note_use() -> None:
    """Count as a process that has entered a scope."""
    global _in_use
    _in_use = True


def push(name: str, backward: str | None = None, owner: object = None) -> ScopeFrame:
    """Enter a scope."""
    note_use()
    for given in (name, *([] if backward is None else [backward])):
        if not isinstance(given, str) or not given:
            raise SignalError(f"the name of a signal is a text that is not empty, not {given!r}")
        note_entered(given)
    outer = _top.get()
    _thread.marks.note(outer)
    frame = ScopeFrame(name, backward, outer, owner, current_node())
    _top.set(frame)
    return frame


def note_entered(name: str) -> None:
    """Note that the program uses a signal, and warn of a likely mistake in it, with the user's line."""
    for text in registry.enter(name):
        sites = Sites(lambda _, __: None)
        log.warning("%s: %s", sites.text(sites.current()), text)


def pop(frame: ScopeFrame) -> None:
    """Leave a scope, and those inside it that were not left."""
    _thread.marks.note(_top.get())
    _top.set(frame.outer)


def leave(owner: object) -> ScopeFrame | None:
    """Leave the scope that an owner has entered last; None if this thread or task is in none of its scopes."""
    frame = _top.get()
    while frame is not None and frame.owner is not owner:
        frame = frame.outer
    if frame is not None:
        pop(frame)
    return frame


def top() -> ScopeFrame | None:
    return _top.get()


def note_nodes(frame: ScopeFrame | None) -> None:
    """Assign the autograd nodes that this thread has made since the last note to a frame."""
    _thread.marks.note(frame)


def frame_of_node(number: int) -> ScopeFrame | None:
    """The frame in which an autograd node was made. Threads number their nodes on their own: if this thread has not
    reached `number`, the node is taken to be another thread's."""
    marks = _thread.marks
    if number >= next_sequence_number():
        marks = next((others for others in list(_all_marks) if number < others.seen), marks)
    return marks.frame_of_node(number)
