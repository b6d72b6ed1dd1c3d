"""Blocks of `gt.debug.comm` that overlap: each has the traffic of its own time."""

import pytest

import gt


@pytest.fixture
def exchange():
    """A function that exchanges 32 bytes."""
    gt.init(workers=2, mode="virtual")
    mesh = gt.mesh(2, ("x",))
    yield lambda: gt.ones(4, 2, mesh=mesh, placements="x, -").redistribute(mesh, "-, -")
    gt.shutdown()


def test_blocks_nest(exchange):
    with gt.debug.comm() as outer:
        exchange()
        with gt.debug.comm() as inner:
            exchange()
        exchange()
    assert (outer.bytes, outer.count("all-gather")) == (96, 3)
    assert (inner.bytes, inner.count("all-gather")) == (32, 1)
    assert all(event.way for event in (*outer.events, *inner.events))


def test_blocks_may_end_in_any_order(exchange):
    first, second = gt.debug.comm(), gt.debug.comm()
    first.__enter__()
    exchange()
    second.__enter__()
    exchange()
    first.__exit__(None, None, None)
    exchange()
    second.__exit__(None, None, None)
    for block in (first, second):
        assert (block.bytes, block.count("all-gather")) == (64, 2)
