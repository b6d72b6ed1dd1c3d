"""The part of the fuzzer that belongs to every `make test`: programs of fixed seeds, and that it finds what is wrong.

`make fuzz SECONDS=600` makes new programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fuzz.__main__ import failure
from tests.fuzz.compare import close, difference, on_gt
from tests.fuzz.programs import Leaf, Program, Step, draw_program
from tests.fuzz.shrink import shrink

SEEDS_A_TEST, TESTS = 40, 9
LEFT, RIGHT = Leaf((4, 6), seed=1), Leaf((4, 6), "permuted", seed=2)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    yield
    close()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of some calls that nobody would write
@pytest.mark.parametrize("first", range(0, SEEDS_A_TEST * TESTS, SEEDS_A_TEST))
def test_random_programs_give_what_torch_gives(first: int) -> None:
    found = [text for seed in range(first, first + SEEDS_A_TEST) if (text := failure(seed))]
    assert not found, "\n".join(found)


def test_a_seed_is_a_program() -> None:
    assert draw_program(5) == draw_program(5) != draw_program(6)


def test_a_wrong_value_is_found_and_its_program_made_small() -> None:
    steps = (Step("add", (0, 1)), Step("sin", (2,)), Step("mul", (3, 2)), Step("permute", (4,), ([1, 0],)))
    ours = on_gt()
    wrong = replace(ours, place=lambda tensor, seed: ours.place(tensor + (seed == 1), seed))

    def differs(program: Program) -> bool:
        return bool(difference(program, wrong))

    small = shrink(Program((LEFT, RIGHT), steps), differs)
    assert len(small.steps) <= 1 and LEFT.seed in [leaf.seed for leaf in small.leaves]


@pytest.mark.parametrize(
    "leaf",
    [
        LEFT,
        RIGHT,
        Leaf((2, 3, 4, 4), "channels_last"),
        Leaf((3, 2), "expanded"),
        Leaf((2, 4), "stored expanded", seed=2),
        Leaf((3, 4), "stored stepped"),
        Leaf((3, 4), "stored windows"),
    ],
)
def test_formats_are_views_of_memory_that_gets_the_gradient(leaf: Leaf) -> None:
    assert not difference(Program((leaf,), (Step("square", (0,)),)))
