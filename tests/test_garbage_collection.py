"""The garbage collector pauses in a block, and goes on after the last one as the program has set it."""

import gc
import threading
from collections.abc import Iterator

import pytest

from gt.garbage_collection import paused_collection


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def collections_while_objects_are_made() -> int:
    before, kept = collections(), []
    kept.extend([] for _ in range(100_000))
    return collections() - before


def test_nothing_is_collected_in_a_block_and_again_after_it(threshold: tuple[int, int, int]) -> None:
    with paused_collection():
        assert collections_while_objects_are_made() == 0
    assert gc.get_threshold() == threshold
    assert collections_while_objects_are_made() > 0


def test_blocks_within_blocks_end_with_the_outermost(threshold: tuple[int, int, int]) -> None:
    with paused_collection():
        with paused_collection():
            pass
        assert gc.get_threshold() != threshold
    assert gc.get_threshold() == threshold


def test_blocks_of_threads_may_overlap(threshold: tuple[int, int, int]) -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collection():
            is_inside.set()
            assert may_end.wait(20)

    thread = threading.Thread(target=pause)
    with paused_collection():
        thread.start()
        assert is_inside.wait(20)
    assert gc.get_threshold() != threshold
    may_end.set()
    thread.join(20)
    assert gc.get_threshold() == threshold


def test_what_a_program_sets_in_a_block_stays() -> None:
    with paused_collection():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_block_that_raises_ends_the_pause(threshold: tuple[int, int, int]) -> None:
    with pytest.raises(ImportError), paused_collection():
        raise ImportError
    assert gc.get_threshold() == threshold
