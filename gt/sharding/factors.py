"""The rule language: an op's dims in terms of factors, as in einops.

    "b i k, b k j -> b i j | reduce(sum): k"

is all that sharding needs to know of a matrix product: tensors cut along b, i or j are computed shard by shard, and
cutting k gives partial sums. `(a b)` is a dim made of two factors, major first; `...` are leading dims, aligned from
the right as in broadcasting; `1` is a dim that nothing cuts.

A factor may be cut freely (its role is "pass") unless the part after the bar says otherwise:

reduce(kind)  cutting the factor gives partial results
mask(kind)    each shard handles its own range of indices and gives a partial result
halo          shards need some elements of their neighbours
whole         the op cannot run while the factor is cut
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError
from gt.sharding.boxes import Cuts, Shape
from gt.sharding.op_calls import Lowering
from gt.sharding.spec import REDUCTIONS

PASS, REDUCE, WHOLE, MASK, HALO = "pass", "reduce", "whole", "mask", "halo"


class Factor(NamedTuple):
    """The size of a factor, and its `role`: what cutting it means. `reduction` is the kind of the partial results of
    the roles reduce and mask."""

    size: int
    role: str = PASS
    reduction: str = "sum"


class Window(NamedTuple):
    """A dim that shows the elements offset, offset + step, ... of a factor, `size` of them."""

    offset: int
    size: int
    step: int = 1

    def cuts(self, cuts: Cuts) -> Cuts:
        """The intervals of this dim that correspond to intervals of the factor."""
        return tuple([(self._first(start), self._first(stop)) for start, stop in cuts])

    def _first(self, position: int) -> int:
        """The first element at or after `position` of the factor."""
        return min(max(-((self.offset - position) // self.step), 0), self.size)


class HaloWindow(NamedTuple):
    """A dim whose elements o * stride - before to o * stride + after are needed for element o of the factor: the input
    of a convolution or a pooling. Its intervals overlap."""

    stride: int
    before: int
    after: int
    size: int

    def cuts(self, cuts: Cuts) -> Cuts:
        return tuple([self._needed(start, stop) for start, stop in cuts])

    def _needed(self, start: int, stop: int) -> tuple[int, int]:
        if start >= stop:
            return (0, 0)
        low = min(max(start * self.stride - self.before, 0), self.size)
        return low, max(min((stop - 1) * self.stride + self.after + 1, self.size), low)


class BlockWindow(NamedTuple):
    """A dim computed block by block: its elements `parts[i]` come from the elements `blocks[i]` of the factor, such as
    one total for each block. It can be cut between blocks only."""

    blocks: Cuts
    parts: Cuts

    def cuts(self, cuts: Cuts) -> Cuts | None:
        """The intervals of this dim; None unless every interval of the factor has the same number of whole blocks."""
        count, rest = divmod(len(self.blocks), len(cuts))
        aligned = count and not rest and _joined(self.blocks, count) == tuple(cuts)
        return _joined(self.parts, count) if aligned else None


def _joined(cuts: Cuts, count: int) -> Cuts:
    """Each run of `count` intervals merged into one."""
    return tuple([(cuts[i][0], cuts[i + count - 1][1]) for i in range(0, len(cuts), count)])


class FactorRef(NamedTuple):
    """One factor of a dim, and the elements of the factor that the dim shows (None: all)."""

    factor: str
    window: Window | HaloWindow | BlockWindow | None = None


Dim: TypeAlias = tuple[FactorRef, ...]
"""The factors of a dim, major to minor. Empty: a dim that nothing cuts, such as one of size 1."""


class PartialPassthrough(NamedTuple):
    """One way in which an op may run on partial values along a mesh axis, with partial results.

    - `operands`: all of them are partial by `kind`; the other operands are replicated along the axis
    - `result_kind`: the kind of the partial results
    - `may_grow`: allowed even if the results are larger than the operands, although reducing them costs more
    """

    operands: frozenset[int]
    kind: str = "sum"
    result_kind: str = "sum"
    may_grow: bool = False


LINEAR = (PartialPassthrough(frozenset({0})),)
"""The passthrough of an op that is linear in its first operand."""


@dataclass(frozen=True)
class OpShardingRule:
    """How an op may be cut.

    - `operands`, `results`: per tensor and dim, its factors
    - `lowering`: makes the program of one worker; None: the op itself, with unchanged arguments
    - `reads_values`: False for an op that takes only shape and dtype from its operands, which may then be partial
    """

    factors: Mapping[str, Factor]
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    passthroughs: tuple[PartialPassthrough, ...] = ()
    lowering: Lowering | None = None
    reads_values: bool = True

    def reducing_first(self) -> OpShardingRule:
        """The rule for an op that neither takes nor gives partial values."""
        factors = {
            name: factor._replace(role=WHOLE) if factor.role in (REDUCE, MASK) else factor
            for name, factor in self.factors.items()
        }
        return replace(self, factors=factors, passthroughs=())

    def __str__(self) -> str:
        sides = [", ".join(" ".join(map(_print_dim, dims)) for dims in side) for side in (self.operands, self.results)]
        roles: dict[str, list[str]] = {}
        for name, factor in self.factors.items():
            if factor.role != PASS:
                label = f"{factor.role}({factor.reduction})" if factor.role in (REDUCE, MASK) else factor.role
                roles.setdefault(label, []).append(name)
        text = "; ".join(f"{label}: {' '.join(names)}" for label, names in roles.items())
        return " -> ".join(sides) + (f" | {text}" if text else "")


def _print_dim(dim: Dim) -> str:
    if len(dim) == 1:
        return dim[0].factor
    return "(" + " ".join(ref.factor for ref in dim) + ")" if dim else "1"


# --- Text to rules ----------------------------------------------------------------------------------------------------


class RuleTemplate(NamedTuple):
    """A parsed rule. A dim is a tuple of factor names; the name `...` is any number of dims."""

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    roles: dict[str, tuple[str, str]]


_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|\w+)")
_ROLE = re.compile(r"\s*(reduce|mask|whole|halo)(?:\((\w+)\))?\s*:\s*(.+?)\s*\Z")


@functools.lru_cache(maxsize=4096)
def parse_rule(text: str) -> RuleTemplate:
    body, _, tail = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise LayoutError(f"the rule {text!r} has no '->'")
    roles: dict[str, tuple[str, str]] = {}
    for part in filter(str.strip, tail.split(";")):
        match = _ROLE.match(part)
        if match is None or (match[2] or "sum") not in REDUCTIONS:
            raise LayoutError(f"{part.strip()!r} in the rule {text!r} is not of the form 'reduce(sum): k'")
        roles.update(dict.fromkeys(match[3].split(), (match[1], match[2] or "sum")))
    template = RuleTemplate(_parse_side(left, text), _parse_side(right, text), roles)
    known = {name for side in template[:2] for dims in side for dim in dims for name in dim}
    if unknown := roles.keys() - known:
        raise LayoutError(f"the rule {text!r} gives a role to {', '.join(sorted(unknown))}, which no dim has")
    return template


def _parse_side(side: str, text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple([_parse_dims(tensor, text) for tensor in side.split(",")]) if side.strip() else ()


def _parse_dims(tensor: str, text: str) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    rest = tensor.rstrip()
    while rest.strip():
        match = _TOKEN.match(rest)
        if match is None:
            raise LayoutError(f"cannot read {rest.strip()!r} in the rule {text!r}")
        token, rest = match[1], rest[match.end() :]
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif token in "()":
            raise LayoutError(f"unbalanced parentheses in the rule {text!r}")
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None or dims.count(("...",)) > 1:
        raise LayoutError(f"unbalanced parentheses, or two '...' in one tensor, in the rule {text!r}")
    return tuple(dims)


# --- Rules for given shapes -------------------------------------------------------------------------------------------


def bind(
    text: str,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    sizes: Mapping[str, int] | None = None,
    passthroughs: Sequence[PartialPassthrough] = (),
    lowering: Lowering | None = None,
) -> OpShardingRule:
    """The rule of a text for tensors of the given shapes. `sizes` are those of factors that appear only in compound
    dims. A dim of size 1 whose factor is larger is broadcast: nothing cuts it."""
    template = parse_rule(text)
    shapes = [*operands, *results]
    tensors = [*template.operands, *template.results]
    if len(shapes) != len(tensors) or len(operands) != len(template.operands):
        raise LayoutError(f"the rule {text!r} is not one of {len(operands)} operands and {len(results)} results")
    named = [_expand(dims, shape, text) for dims, shape in zip(tensors, shapes, strict=True)]
    found = _sizes(named, shapes, dict(sizes or {}), text)
    # cutting a factor of size 1 cannot be expressed in a dim of several factors, so it is not cut in other dims either
    hidden = {name for dims in named for dim in dims if len(dim) > 1 for name in dim if found[name] == 1}
    factors = {
        name: Factor(size, *template.roles.get(name, (PASS,))) for name, size in found.items() if name not in hidden
    }
    bound = [
        tuple([_bind_dim(dim, size, found, hidden) for dim, size in zip(dims, shape, strict=True)])
        for dims, shape in zip(named, shapes, strict=True)
    ]
    count = len(operands)
    return OpShardingRule(factors, tuple(bound[:count]), tuple(bound[count:]), tuple(passthroughs), lowering)


def _expand(dims: tuple[tuple[str, ...], ...], shape: Shape, text: str) -> list[tuple[str, ...]]:
    """Replace `...` by the remaining dims of the shape, named by their distance from the right."""
    if ("...",) not in dims:
        if len(dims) != len(shape):
            raise LayoutError(f"a tensor of shape {shape} does not fit the rule {text!r}")
        return list(dims)
    position = dims.index(("...",))
    free = len(shape) - len(dims) + 1
    if free < 0:
        raise LayoutError(f"a tensor of shape {shape} does not fit the rule {text!r}")
    return [*dims[:position], *[(f"...{free - 1 - i}",) for i in range(free)], *dims[position + 1 :]]


def _sizes(named: list[list[tuple[str, ...]]], shapes: list[Shape], sizes: dict[str, int], text: str) -> dict[str, int]:
    simple = [
        (dim[0], size)
        for dims, shape in zip(named, shapes, strict=True)
        for dim, size in zip(dims, shape, strict=True)
        if len(dim) == 1
    ]
    for name, size in simple:
        if sizes.get(name, 1) == 1:
            sizes[name] = size
        elif size not in (1, sizes[name]):
            raise LayoutError(
                f"factor {name} of the rule {text!r} is {sizes[name]} in one tensor and {size} in another"
            )
    for dims, shape in zip(named, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            unknown = [name for name in dim if name not in sizes]
            if len(unknown) == 1:
                rest = math.prod([sizes[name] for name in dim if name in sizes])
                sizes[unknown[0]] = size // rest if rest else 0
            elif unknown:
                raise LayoutError(f"the sizes of {', '.join(unknown)} in the rule {text!r} have to be given")
            if len(dim) > 1 and math.prod([sizes[name] for name in dim]) != size:
                raise LayoutError(f"({' '.join(dim)}) of the rule {text!r} does not make a dim of size {size}")
    return sizes


def _bind_dim(dim: tuple[str, ...], size: int, sizes: Mapping[str, int], hidden: set[str]) -> Dim:
    if len(dim) == 1 and sizes[dim[0]] != size:
        return ()  # broadcast
    return tuple([FactorRef(name) for name in dim if name not in hidden])


@dataclass
class RuleBuilder:
    """Builds rules that text cannot express: with windows, or with factors named in loops."""

    factors: dict[str, Factor] = field(default_factory=dict)
    operands: list[tuple[Dim, ...]] = field(default_factory=list)
    results: list[tuple[Dim, ...]] = field(default_factory=list)

    def factor(self, name: str, size: int, role: str = PASS, reduction: str = "sum") -> str:
        self.factors[name] = Factor(size, role, reduction)
        return name

    def build(
        self, passthroughs: Sequence[PartialPassthrough] = (), lowering: Lowering | None = None
    ) -> OpShardingRule:
        return OpShardingRule(self.factors, tuple(self.operands), tuple(self.results), tuple(passthroughs), lowering)
