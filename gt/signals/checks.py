"""Checks of a configuration, for Python and YAML alike. They take plain values and return problems, each with the path
of the wrong value, so that the parser can add its line."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeGuard

from gt.core.errors import nearest
from gt.core.meta import MAX_DIMS

NOT_CUT = "-"
REST = "..."
"""In a layout: any number of dims that are not cut."""
ALL: Final = "all"
"""In place of a list of workers: those that are connected, however many there are."""
MODEL = "model"
"""The one section of a file that is not a signal."""
INPUTS, OUTPUTS, EAGER_MEMORY = "inputs", "outputs", "eager_memory"
RESERVED = ("mesh", "workers", INPUTS, OUTPUTS, EAGER_MEMORY)
"""The keys of the model section that are not patterns."""

MAX_NAME = 512
MAX_AXES = 16
MAX_WORKERS = 1 << 16
AXIS_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"

KeyPath: TypeAlias = tuple[str | int, ...]


class Problem(NamedTuple):
    """An error in a value, and the keys and list indices that lead to the value."""

    path: KeyPath
    text: str


def as_int(value: object) -> int | None:
    """A value as an int; None if it is a bool or not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def pairs_of(mesh: object) -> list[tuple[object, object]] | None:
    """Axis names and sizes, from a mapping or from pairs."""
    if isinstance(mesh, Mapping):
        return list(mesh.items())
    pairs = [tuple(pair) for pair in mesh if is_list(pair) and len(pair) == 2] if is_list(mesh) else []
    return [(name, size) for name, size in pairs] if is_list(mesh) and len(pairs) == len(mesh) else None


def show_mesh(mesh: Sequence[tuple[object, object]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh)


def shard_problems(axis: object, workers: object, mesh: object, dims: object, replicate: object) -> Iterator[Problem]:
    """The problems of the arguments of a ShardConfig; None for arguments that were not given."""
    yield from worker_problems(workers, mesh)
    yield from _choice_problems(axis, mesh, dims, replicate)
    if axis is not None and (number := as_int(axis)) not in range(-MAX_DIMS, MAX_DIMS):
        why = (
            f"has to be a whole number, not {show(axis)}" if number is None else f"{number} is not a dim of any tensor"
        )
        yield Problem(("axis",), f"axis {why}; a tensor dim is -{MAX_DIMS} to {MAX_DIMS - 1}, negative from the end")
    if dims is not None:
        yield from dims_problems(("dims",), dims, None if mesh is None else mesh_axes(mesh))


def _choice_problems(axis: object, mesh: object, dims: object, replicate: object) -> Iterator[Problem]:
    if not isinstance(replicate, bool):
        yield Problem(("replicate",), f"replicate has to be true or false, not {show(replicate)}")
        return
    given = {"axis": axis is not None, "dims": dims is not None, "replicate": replicate}
    chosen = [name for name, is_given in given.items() if is_given]
    if not chosen:
        yield Problem((), "it does not say how tensors are laid out; give one of axis, dims and replicate")
    elif len(chosen) > 1:
        yield Problem((chosen[1],), f"{' and '.join(chosen)} exclude one another; keep one of them")
    elif axis is not None and mesh is not None:
        yield Problem(("mesh",), "axis cuts over a list of workers and takes no mesh; use dims in place of axis")
    elif replicate and mesh is not None:
        yield Problem(("mesh",), "replicate puts the whole on every worker and takes no mesh; leave mesh out")
    elif dims is not None and mesh is None:
        yield Problem(("dims",), "dims names axes of a mesh and there is none; add one, such as mesh: {dp: 2, tp: 2}")


def worker_problems(workers: object, mesh: object) -> list[Problem]:
    """The problems of a mesh, of a list of workers, and of the two together."""
    found = [] if workers is None else list(_worker_list_problems(workers))
    found += [] if mesh is None else list(_mesh_problems(mesh))
    if not found and is_list(workers) and mesh is not None:
        pairs = pairs_of(mesh) or []
        needed = math.prod([as_int(size) or 0 for _, size in pairs])
        if needed != len(workers):
            text = f"mesh {show_mesh(pairs)} has {needed} places and workers names {len(workers)}; give each place one"
            found.append(Problem(("workers",), text))
    return found


def memory_problems(memory: object) -> Iterator[Problem]:
    if memory is not None and (as_int(memory) or 0) < 1:
        yield Problem((EAGER_MEMORY,), f"{EAGER_MEMORY} has to be a number of bytes, not {show(memory)}")


def _worker_list_problems(workers: object) -> Iterator[Problem]:
    if workers == ALL:
        return
    if not is_list(workers):
        yield Problem(("workers",), f"workers has to be a list such as [0, 1], or {ALL}, not {show(workers)}")
    elif not 0 < len(workers) <= MAX_WORKERS:
        text = f"workers names {len(workers)}; name 1 to {MAX_WORKERS}, or leave workers out for all that are there"
        yield Problem(("workers",), text)
    else:
        seen: set[int] = set()
        for position, worker in enumerate(workers):
            number = as_int(worker)
            if number is None or number < 0:
                yield Problem(("workers", position), f"{show(worker)} is not a worker; they are numbered 0, 1, 2, ...")
            elif number in seen:
                yield Problem(("workers", position), f"worker {number} is named twice; name each worker once")
            else:
                seen.add(number)


def _mesh_problems(mesh: object) -> Iterator[Problem]:
    pairs = pairs_of(mesh)
    if pairs is None:
        yield Problem(("mesh",), f"mesh has to give axes their sizes, such as {{dp: 2, tp: 2}}, not {show(mesh)}")
        return
    if not 0 < len(pairs) <= MAX_AXES:
        yield Problem(("mesh",), f"a mesh has 1 to {MAX_AXES} axes, not {len(pairs)}")
        return
    for name, size in pairs:
        path = ("mesh", name) if isinstance(name, str) else ("mesh",)
        if not isinstance(name, str) or not re.fullmatch(AXIS_NAME, name):
            yield Problem(path, f"{show(name)} cannot name a mesh axis; use up to 64 letters, digits and underscores")
        elif (number := as_int(size)) is None or number < 1:
            yield Problem(path, f"axis {name!r} of the mesh has size {show(size)}; use a whole number of at least 1")
    names = [name for name, _ in pairs if isinstance(name, str)]
    for name in {name for name in names if names.count(name) > 1}:
        yield Problem(("mesh", name), f"the mesh has axis {name!r} twice; give each axis its own name")


def mesh_axes(mesh: object) -> list[str] | None:
    """The axis names of a mesh; empty without a mesh, None for a value that is not a mesh."""
    pairs = [] if mesh is None else pairs_of(mesh)
    return None if pairs is None else [name for name, _ in pairs if isinstance(name, str)]


def dims_problems(path: KeyPath, dims: object, axes: Collection[str] | None) -> Iterator[Problem]:
    """The problems of a layout over a mesh with these axes; None if the mesh itself is wrong, which is reported
    separately."""
    if not is_list(dims):
        yield Problem(path, f"a layout has to be a list with an entry for each dim, such as [dp, -], not {show(dims)}")
        return
    if len(dims) > MAX_DIMS:
        yield Problem(path, f"the layout has {len(dims)} dims; a tensor has at most {MAX_DIMS}")
        return
    used: set[str] = set()
    for position, dim in enumerate(dims):
        if is_list(dim):
            for minor, axis in enumerate(dim):
                yield from _axis_problems((*path, position, minor), axis, axes, used)
        elif isinstance(dim, str) and dim == REST and dim in used:
            yield Problem((*path, position), f"{REST!r} stands for any number of dims; use it once")
        elif isinstance(dim, str) and dim == REST:
            used.add(dim)
        elif dim is not None and not (isinstance(dim, str) and dim == NOT_CUT):
            yield from _axis_problems((*path, position), dim, axes, used)


def _axis_problems(path: KeyPath, axis: object, axes: Collection[str] | None, used: set[str]) -> Iterator[Problem]:
    if not isinstance(axis, str) or axis in ("", NOT_CUT, REST):
        text = f'{show(axis)} is not an axis of a mesh; use a name, a list of names, or "-" for a dim that is not cut'
        yield Problem(path, text)
    elif axes is not None and axis not in axes:
        hint = nearest(axis, axes) if axes else f"there is no mesh: add one, such as mesh: {{{axis}: 2}}"
        yield Problem(path, f"axis {show(axis)} is not in the mesh; {hint}")
    elif axis in used:
        yield Problem(path, f"axis {axis!r} cuts two dims; an axis can cut one")
    else:
        used.add(axis)


def name_problem(name: object, what: str) -> str:
    """Why a value cannot be the name of a signal; empty if it can."""
    if not isinstance(name, str):
        return f"{what} has to be text, not {show(name)}; put it in quotes"
    if not 0 < len(name) <= MAX_NAME:
        return f"{what} has {len(name)} characters; use 1 to {MAX_NAME}"
    if name == MODEL:
        return f"{what} cannot be {MODEL!r}: that is the section of a model's parameters; use another name"
    return ""


_WORDS_APART = re.compile(r"\d|(?<![^\W_])[^\W_](?![^\W_])")  # digits, and words of one letter


def misspelt_of(name: str, known: Iterable[str]) -> str | None:
    """The known name from which a name differs by one letter: missing, added, replaced, or swapped with the next one.
    Names of different parts of a program, as `layer_1` and `layer_2` or `stage_a` and `stage_b`, do not count."""
    word = _WORDS_APART.sub("", name)
    for other in known:
        if _WORDS_APART.sub("", other) != word and min(len(name), len(other)) > 3 and _differ_by_one(name, other):
            return other
    return None


def _differ_by_one(name: str, other: str) -> bool:
    short, long = sorted((name, other), key=len)
    start = next((at for at, letter in enumerate(short) if letter != long[at]), len(short))
    tail, rest = short[start:], long[start:]
    return rest[1:] in (tail, tail[1:]) or (rest[1::-1] == tail[:2] and rest[2:] == tail[2:])


def pattern_problems(pattern: object) -> Iterator[Problem]:
    path = (pattern,) if isinstance(pattern, str) else ()
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_NAME:
        yield Problem(path, f"{show(pattern)} cannot be a pattern of names; use text of 1 to {MAX_NAME} characters")
    elif pattern in RESERVED:
        yield Problem(
            path, f"{pattern!r} is a key of the model section and no pattern; write '[{pattern[0]}]{pattern[1:]}'"
        )


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 8
_short.maxlevel = 3


def show(value: object) -> str:
    """A value as text for an error message, shortened."""
    return "nothing" if value is None else _short.repr(value)
