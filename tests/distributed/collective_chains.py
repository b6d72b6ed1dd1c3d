"""The fewest bytes of a product by collectives along one axis each, found by trying all chains of them: an oracle that
knows nothing of rules, strategies or routes.

Layouts are letters, one for each axis of the mesh: R (whole), P (partial), or the dim that the axis cuts.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math

from gt.sharding.spec import DeviceMesh, ShardingSpec

LETTERS = "RMKNP"
DIM_OF = {"a": {"M": 0, "K": 1}, "b": {"K": 0, "N": 1}, "c": {"M": 0, "N": 1}}
RULES = {"loc": "RRR", "m": "MRM", "n": "RNN", "k": "KKP", "p of a": "PRP", "p of b": "RPP"}


def tensor_letters(tensor):
    return [letter for letter in LETTERS if letter in "RP" or letter in DIM_OF[tensor]]


def states(tensor, axes):
    """All layouts of a tensor on a mesh with this number of axes."""
    return ["".join(letters) for letters in itertools.product(tensor_letters(tensor), repeat=axes)]


def spec_of_letters(tensor, letters, mesh: DeviceMesh) -> ShardingSpec:
    placed = list(zip(mesh.axis_names, letters, strict=True))
    dims = [tuple([axis for axis, letter in placed if letter == own]) for own in DIM_OF[tensor]]
    return ShardingSpec(mesh, dims, [axis for axis, letter in placed if letter == "P"])


def _held(state, shape, nbytes):
    """The bytes that a worker holds."""
    for letter, size in zip(state, shape, strict=True):
        nbytes = nbytes / size if letter not in "RP" else nbytes
    return nbytes


def _step_cost(state, axis, letter, shape, nbytes):
    """The bytes of a change of one placement, by the table of collectives; None if it would leave strided shards."""
    old, size = state[axis], shape[axis]
    is_cut = {old, letter} - {"R", "P"}
    if any(other in is_cut for other in state[axis + 1 :]):
        return None  # only the last axis of a dim can be changed
    total = math.prod(shape) * _held(state, shape, nbytes)
    if old == "R" or (letter == "P" and old != "P"):
        return 0
    if old == "P":
        return total * (size - 1) / size * (2 if letter == "R" else 1)
    return total * (size - 1) * (1 if letter == "R" else 1 / size)


@functools.cache
def _path_costs(tensor, source, shape, nbytes):
    """The fewest bytes from one layout of a tensor to every other one."""
    best, queue = {}, [(0, source)]
    while queue:
        cost, state = heapq.heappop(queue)
        if state in best:
            continue
        best[state] = cost
        for axis, letter in itertools.product(range(len(shape)), tensor_letters(tensor)):
            step = _step_cost(state, axis, letter, shape, nbytes) if letter != state[axis] else None
            if step is not None:
                heapq.heappush(queue, (cost + step, state[:axis] + letter + state[axis + 1 :]))
    return best


def fewest_bytes(shape, a, b, out, sizes, itemsize=4):
    """The fewest bytes on a mesh of this shape, for a product of sizes (m, k, n)."""
    m, k, n = sizes
    found = []
    of_a = _path_costs("a", a, shape, itemsize * m * k)
    of_b = _path_costs("b", b, shape, itemsize * k * n)
    for rules in itertools.product(RULES.values(), repeat=len(shape)):
        left, right, product = ["".join(letters) for letters in zip(*rules, strict=True)]
        ends = _path_costs("c", product, shape, itemsize * m * n)
        costs = of_a.get(left), of_b.get(right), ends.get(out)
        found += [sum(costs)] if None not in costs else []
    return min(found)
