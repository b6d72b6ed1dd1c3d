"""The random keys of a recorded call: how many each generator gives, and for which ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gt.client.compilation.call_recorder import Recording
from gt.core.signatures import random_key


class KeyPlan(NamedTuple):
    """How to draw the random keys of a call. `counts` are the numbers of keys to draw from each generator, `places`
    the positions of instructions that take a key, with the position of that key among all that are drawn. Two ops
    have the same key if the second computes the first again, as checkpointing does."""

    counts: tuple[tuple[torch.Generator, int], ...]
    places: tuple[tuple[int, int], ...]

    def draw(self) -> list[int]:
        """The keys of one call, as the ops would draw them one after another."""
        keys: list[int] = []
        for generator, count in self.counts:
            keys.extend(torch.empty(count, dtype=torch.int64).random_(generator=generator).tolist())
        return keys


def plan_keys(recording: Recording) -> KeyPlan | None:
    """The keys that a recorded call has drawn; None if a generator was also used otherwise, or set, during the call."""
    generators: list[torch.Generator] = [torch.default_generator]
    states: list[torch.Tensor] = [recording.random_state]
    found: list[list[int]] = [[]]  # the keys of each generator
    uses: list[tuple[int, int, int]] = []  # position of the instruction, generator, number of the key
    for position, generator, state in recording.draws:
        if all(generator is not other for other in generators):
            generators.append(generator)
            states.append(state)
            found.append([])
        which = next(n for n, other in enumerate(generators) if other is generator)
        key = random_key(recording.instructions[position].scalars)  # type: ignore[union-attr]
        if key not in found[which]:
            found[which].append(key)
        uses.append((position, which, found[which].index(key)))
    for generator, state, keys in zip(generators, states, found, strict=True):
        if not _gives(state, keys, generator.get_state()):
            return None
    starts = [sum(map(len, found[:which])) for which in range(len(found))]
    places = tuple((position, starts[which] + number) for position, which, number in uses)
    counts = zip(generators, map(len, found), strict=True)
    return KeyPlan(tuple((generator, count) for generator, count in counts if count), places)


def _gives(state: torch.Tensor, keys: Sequence[int], end: torch.Tensor) -> bool:
    """Whether a generator in `state` gives these keys, and is in the state `end` after the last one."""
    generator = torch.Generator()
    generator.set_state(state)
    drawn = torch.empty(len(keys), dtype=torch.int64).random_(generator=generator).tolist()
    return drawn == list(keys) and torch.equal(generator.get_state(), end)
