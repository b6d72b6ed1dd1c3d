"""Scopes that a program enters and leaves: by `with`, as a decorator, and by gt.signal.enter and exit."""

from __future__ import annotations

import asyncio

import pytest

import gt
from gt.core.errors import SignalError
from tests.signals.recorded_scopes import configure, layout_and_workers

pytestmark = pytest.mark.usefixtures("no_signals")


def test_an_exception_leaves_the_scope(four_workers):
    configure("s", 0, [0, 1])
    with pytest.raises(RuntimeError, match="mat1 and mat2"), gt.signal.context("s"):
        gt.zeros(2, 3) @ gt.zeros(2, 3)
    assert gt.zeros(4, 4).spec.mesh.size == 4
    with pytest.raises(KeyError), gt.signal.context("s"):
        gt.signal.enter("other")
        raise KeyError
    assert gt.zeros(4, 4).spec.mesh.size == 4


def test_enter_and_exit(four_workers):
    configure("a", 0, [0, 1])
    configure("b", 0, [2, 3])
    gt.signal.enter("a")
    gt.signal.enter("b")
    with pytest.raises(SignalError, match=r"exit\('a'\), but the scope that was entered last is 'b'"):
        gt.signal.exit("a")
    assert layout_and_workers(gt.zeros(2, 2)) == "w, - on 2 3"
    gt.signal.exit("b")
    assert layout_and_workers(gt.zeros(2, 2)) == "w, - on 0 1"
    gt.signal.exit("a")
    with pytest.raises(SignalError, match="no scope was entered"):
        gt.signal.exit("a")
    with gt.signal.context("a"), pytest.raises(SignalError, match="exit\\('a'\\).*'a'"):
        gt.signal.exit("a")
    with pytest.raises(SignalError, match="'a' ends, and 'b' inside it was not left"), gt.signal.context("a"):
        gt.signal.enter("b")
    assert gt.zeros(4, 4).spec.mesh.size == 4


@pytest.mark.parametrize("name", ["", 3, None, b"a"])
def test_a_name_is_a_text(name):
    with pytest.raises(SignalError, match="not empty"), gt.signal.context(name):
        pass
    with pytest.raises(SignalError, match="not empty"):
        gt.signal.enter(name)


def test_a_decorator(four_workers):
    configure("s", 0, [1, 2])

    @gt.signal.context("s")
    def fill(depth):
        return fill(depth - 1) if depth else gt.zeros(2, 2)

    @gt.signal.context("s")
    async def later():
        await asyncio.sleep(0)
        return gt.zeros(2, 2)

    assert layout_and_workers(fill(3)) == "w, - on 1 2"
    assert layout_and_workers(asyncio.run(later())) == "w, - on 1 2"
    assert fill.__name__ == "fill"
    with pytest.raises(SignalError, match="generator"):

        @gt.signal.context("s")
        def numbers():
            yield 1
