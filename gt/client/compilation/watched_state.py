"""The objects that a function uses without getting them as arguments: variables of its closure, globals, attributes.

`gt.compile` skips a function only while these are what they were when it was recorded. They are found by walking from
the function through closures, globals that its code names, modules, optimizers, containers and other objects. Each is
of one of three kinds: a value that never changes; an object whose state GT compares; or an object whose state GT does
not know, and then the function is not skipped (`unknown`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from gt.client.compilation.object_visits import check_loggers, visit, watch_schedules
from gt.client.compilation.state_walk import StateWalk

_MAX_WATCHED = 1 << 17


class WatchedState:
    """The objects that can be reached from `roots`, and their values at the time of the walk. `tensors` are the GT
    tensors, `plain` the tensors of this process, `optimizers` the optimizers, `generators` torch's random generators
    with their states, each once. `unknown` tells why a function with these roots is never skipped, or is empty."""

    def __init__(self, roots: Sequence[tuple[str, object]]) -> None:
        walk = _walk(roots)
        self.roots = roots
        self.tensors = walk.tensors
        self.plain = walk.plain
        self.optimizers = walk.optimizers
        self.generators = walk.generators
        self.unknown = walk.unknown
        self._values = walk.values
        self._seen = walk.seen
        self._fixed_in_call = walk.fixed_in_call
        self._values.remember()

    @property
    def known_ids(self) -> Container[int]:
        """The id()s of the objects that were found."""
        return self._seen

    def change_in_call(self) -> str | None:
        """The name of a value that a call has changed, counters of schedules and random generators included; None if it
        has changed none."""
        moved = (name for name, read, value in self._fixed_in_call if read() != value)
        return self.first_change() or next(moved, None)

    def first_change(self) -> str | None:
        """The name of a value that has changed since the walk; None if none has."""
        return self._values.first_change()


def _walk(roots: Sequence[tuple[str, object]]) -> StateWalk:
    walk = StateWalk(roots)
    while walk.is_going_on():
        for name, value, is_trusted in walk.unvisited():
            visit(walk, name, value, is_trusted)
        walk.watch_named_attributes()
        if len(walk.values) > _MAX_WATCHED:
            walk.unknown = f"it uses more than {_MAX_WATCHED} values besides its arguments"
    watch_schedules(walk)
    check_loggers(walk)
    return walk
