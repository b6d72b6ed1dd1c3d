"""The reference product: each worker pulls the tiles that it lacks, one at a time, and keeps none. It knows nothing of
rules, strategies or collectives."""

from __future__ import annotations

import itertools
import math

import torch

from gt.sharding.spec import ShardingSpec, local_box

Box = tuple[tuple[int, int], ...]


class PulledProduct:
    """`a @ b` of matrices that lie on workers as specs say, without partial values. `parts` are the parts of the result
    by worker; `pulled` counts the elements that some worker pulled from another, each once."""

    def __init__(self, a, spec_a: ShardingSpec, b, spec_b: ShardingSpec, out: ShardingSpec, tile: int) -> None:
        self._tile = tile
        self._pulled: set[tuple[int, str, Box]] = set()
        self._operands = {"a": (a, spec_a), "b": (b, spec_b)}
        shape = (a.shape[0], b.shape[1])
        self.parts = {worker: self._part(worker, local_box(out, shape, worker)) for worker in out.mesh.workers}

    @property
    def pulled(self) -> int:
        return sum(math.prod(stop - start for start, stop in box) for _, _, box in self._pulled)

    def _part(self, worker: int, box: Box) -> torch.Tensor:
        (top, bottom), (left, right) = box
        part = torch.zeros(bottom - top, right - left, dtype=torch.float64)
        inner = self._operands["a"][0].shape[1]
        for rows, columns, summed in itertools.product(
            self._tiles(top, bottom), self._tiles(left, right), self._tiles(0, inner)
        ):
            first, second = self._pull(worker, "a", (rows, summed)), self._pull(worker, "b", (summed, columns))
            part[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left] += first @ second
        return part

    def _tiles(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(at, min(at + self._tile, stop)) for at in range(start, stop, self._tile)]

    def _pull(self, worker: int, name: str, box: Box) -> torch.Tensor:
        """A tile of an operand, element by element from a worker that holds it."""
        value, spec = self._operands[name]
        found = torch.empty([stop - start for start, stop in box], dtype=torch.float64)
        for place in itertools.product(*[range(start, stop) for start, stop in box]):
            element: Box = tuple([(along, along + 1) for along in place])
            holders = [each for each in spec.mesh.workers if _holds(spec, value.shape, each, place)]
            assert holders, "each element is on some worker"
            if worker not in holders:
                self._pulled.add((worker, name, element))
            found[tuple([along - start for along, (start, _) in zip(place, box, strict=True)])] = value[place]
        return found


def _holds(spec: ShardingSpec, shape, worker: int, place: tuple[int, ...]) -> bool:
    box = local_box(spec, tuple(shape), worker)
    return all(start <= along < stop for along, (start, stop) in zip(place, box, strict=True))
