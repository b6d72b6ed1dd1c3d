"""Chains of backward signals: a signal may name another for its gradients, and so on. Chains must not have cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gt.signals.checks import misspelt_of


def unknown_backward(backward: str, known: Iterable[str]) -> str:
    """The warning of a backward signal that has no configuration."""
    close = misspelt_of(backward, known)
    hint = f"did you mean {close!r}?" if close else "register it to lay gradients out"
    return f"backward names signal {backward!r}, which is not configured and changes nothing; {hint}"


def cycle_text(cycle: Iterable[str]) -> str:
    return f"backward goes in a circle: {' -> '.join(cycle)}; remove one of these backward entries"


def backward_chain(name: str, following: Callable[[str], str | None]) -> tuple[str, ...]:
    """A signal, its backward signal, and so on. The last one has no backward signal, or closes a cycle."""
    chain = {name: None}
    while after := following(name):
        if after in chain:
            return (*chain, after)
        chain[after] = None
        name = after
    return tuple(chain)


def backward_cycles(following: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Every cycle once, from the first of its signals in the mapping and back to it."""
    cycles: list[tuple[str, ...]] = []
    done: set[str] = set()
    for start in following:
        path: dict[str, None] = {}
        name = start
        while name and name not in done and name not in path:
            path[name] = None
            name = following.get(name, "")
        if name in path:
            members = list(path)
            cycles.append((*members[members.index(name) :], name))
        done.update(path)
    return cycles
