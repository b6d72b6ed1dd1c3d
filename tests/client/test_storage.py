"""Storages and paths of views, without torch's dispatch."""

import sys
from collections import deque

import pytest
import torch

from gt.client.storage import (
    CONJUGATE,
    NEGATE,
    ROOT,
    Storage,
    collect_into,
    geometry_of,
    is_collected_into,
    is_lazy,
    reinterpreted,
    restrided,
    storage_elements,
    strided_view,
    view_of,
)
from gt.core.signatures import ViewStep


class Session:
    pass


def storage(*shape, dtype=torch.float32):
    return Storage(Session(), 7, geometry_of(torch.empty(shape, dtype=dtype, device="meta")))


def geometry(shape, stride, offset=0, dtype=torch.float32):
    return geometry_of(torch.empty(100, dtype=dtype, device="meta").as_strided(shape, stride, offset))


def step(name):
    return ViewStep(name, (), {})


@pytest.fixture
def collected():
    before, storages = Storage.__del__, deque()
    collect_into(storages)
    yield storages
    Storage.__del__ = before


def test_a_storage_is_collected_once(collected):
    storage(2, 3)
    assert [(each.id, each.geometry.nbytes) for each in collected] == [(7, 24)]
    collected.clear()
    assert not collected and is_collected_into(collected)


def test_no_python_code_runs_while_a_storage_is_collected(collected):
    """Python drops what is raised in a finalizer: an interrupt there would be lost."""
    made, entered = storage(2, 3), []
    sys.setprofile(lambda frame, event, function: entered.append((event, function)))
    del made
    sys.setprofile(None)
    assert [event for event, function in entered if event == "call"] == [] and len(collected) == 1


def test_a_view_has_the_current_id_of_its_storage():
    made = storage(2, 3)
    view = strided_view(made, geometry((3,), (1,)))
    made.id = 8
    assert (view.id, view.storage, view.session) == (8, made, made.session)


def test_equal_views_have_one_path():
    first, second = storage(2, 3), storage(2, 3)
    part = geometry((3,), (1,))
    assert strided_view(first, part).path is strided_view(second, part).path
    assert strided_view(first, part).key is not strided_view(first, geometry((2,), (1,))).key


def test_a_long_path_is_replaced_by_one_step():
    view = storage(100)
    for length in range(99, 80, -1):
        view = view_of(view, length, step("aten.slice.Tensor"), geometry((length,), (1,)), strided=True)
    assert len(view.path.steps) <= 8


def test_a_long_path_of_reinterpretations_is_kept():
    view = storage(4, dtype=torch.complex64)
    for number in range(12):
        view = view_of(view, number, step(CONJUGATE), view.geometry, strided=False)
    assert len(view.path.steps) == 12


@pytest.mark.parametrize(
    ("names", "lazy"),
    [([], []), ([CONJUGATE], [CONJUGATE]), ([CONJUGATE, CONJUGATE], []), ([NEGATE, CONJUGATE], [CONJUGATE, NEGATE])],
)
def test_conjugation_and_negation_cancel_themselves(names, lazy):
    view = storage(4, dtype=torch.complex64)
    for number, name in enumerate(names):
        view = view_of(view, (name, number), step(name), view.geometry, strided=False)
    assert reinterpreted(view) == lazy and is_lazy(view) is bool(lazy)


def test_another_view_keeps_the_dtype_and_the_conjugation():
    made = storage(6)
    path = ROOT.extend("complex", step("aten.view.dtype")).extend("conj", step(CONJUGATE))
    source = type(strided_view(made, made.geometry))(made, path, geometry((3,), (1,), dtype=torch.complex64))
    view = restrided(source, geometry((2,), (1,), 1, torch.complex64))
    assert [made_by.op.split(".")[1] for made_by in view.path.steps] == ["as_strided", "view", "as_strided", "_conj"]


def test_the_size_of_a_storage_is_counted_in_the_dtype_of_the_view():
    made = storage(6)
    view = view_of(made, 0, step("aten.view.dtype"), geometry((3,), (1,), dtype=torch.complex64), strided=False)
    assert (storage_elements(made), storage_elements(view)) == (6, 3)
