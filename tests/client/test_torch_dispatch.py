"""How `dispatch` sorts the arguments of a call."""

import pytest
import torch

import gt
from gt.client import active_session
from gt.client import torch_dispatch as dispatching
from gt.client.tensor import Tensor
from gt.client.torch_dispatch import dispatch

aten = torch.ops.aten


def run(func, *args, **kwargs):
    return dispatch(Tensor, func, (), args, kwargs)


@pytest.fixture
def inferred(monkeypatch):
    """The ops of calls that were not cached."""
    ops = []

    def recording(session, op, *rest):
        ops.append(op.name)
        return infer_call(session, op, *rest)

    infer_call = dispatching.infer_call
    monkeypatch.setattr(dispatching, "infer_call", recording)
    return ops


def test_equal_calls_are_inferred_once(embedded, inferred):
    x, y = gt.ones(2, 3), gt.zeros(2, 3)
    inferred.clear()
    for left, right in ((x, y), (y, x), (x, x)):
        run(aten.add.Tensor, left, right)
    assert inferred == ["aten.add.Tensor"]


@pytest.mark.parametrize(
    "calls",
    [
        [(gt.ones, 2), (gt.ones, 3)],
        [(lambda n: gt.ones(n), 4), (lambda n: gt.ones(n, dtype=torch.float64), 4)],
        [(lambda n: gt.ones(n, n), 3), (lambda n: gt.ones(n, n).t(), 3)],
    ],
    ids=["shape", "dtype", "strides"],
)
def test_other_geometries_are_inferred_again(embedded, inferred, calls):
    tensors = [make(size) for make, size in calls]
    inferred.clear()
    for x in tensors:
        run(aten.neg.default, x)
    assert inferred == ["aten.neg.default"] * 2


def test_scalars_are_sent_and_constants_are_inferred(embedded, inferred):
    x = gt.ones(2, 3)
    inferred.clear()
    assert [run(aten.mul.Tensor, x, factor)[0, 0].item() for factor in (2.0, 3.0)] == [2, 3]
    assert inferred.count("aten.mul.Tensor") == 1
    for dim in (0, 1):
        run(aten.sum.dim_IntList, x, [dim])
    assert inferred.count("aten.sum.dim_IntList") == 2


def test_true_and_one_are_different_scalars(embedded):
    x = gt.ones(2, dtype=torch.int64)
    assert [run(aten.add.Tensor, x, value).dtype for value in (1, 1.0)] == [torch.int64, torch.float32]


def test_a_default_dtype_is_part_of_the_key(embedded):
    x = gt.ones(2, dtype=torch.int64)
    assert run(aten.true_divide.Tensor, x, 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run(aten.true_divide.Tensor, x, 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_plain_operands_are_uploaded_once_for_each_content(embedded):
    x = gt.ones(2)
    results = [run(aten.add.Tensor, x, torch.tensor([1.0, 2.0])) for _ in range(2)]
    assert [result.tolist() for result in results] == [[2, 3]] * 2
    uploads = active_session.current().upload_cache
    assert uploads.storage_of(torch.tensor([1.0, 2.0])) is uploads.storage_of(torch.tensor([1.0, 2.0]))


def test_a_write_to_aliases_is_another_call(embedded, inferred):
    x, y = gt.ones(2), gt.ones(2)
    inferred.clear()
    torch._foreach_add_([x, y], 1)
    torch._foreach_add_([x, x], 1)
    assert inferred == [*2 * ["aten._foreach_add_.Scalar"], "aten.add_.Scalar"], "aliases are written one after another"
    assert (x.tolist(), y.tolist()) == ([4, 4], [2, 2])


def test_a_write_to_a_plain_tensor_runs_in_this_process(embedded):
    plain = torch.zeros(2)
    assert run(aten.copy_.default, plain, gt.ones(2)) is plain and plain.tolist() == [1, 1]


def test_an_unsupported_op_is_refused(embedded):
    with pytest.raises(NotImplementedError, match="pad_sequence"):
        run(aten._nested_tensor_from_tensor_list.default, [gt.ones(2)])
