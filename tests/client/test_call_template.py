"""Arguments of calls in wire form."""

import pytest
import torch

import gt
from gt.client.call_template import CallTemplate, to_wire
from gt.client.op_schema import OpSchema
from gt.client.storage import Storage
from gt.core.signatures import Complex, DType, Input, ListArg, MemoryFormat, Scalar, WorkerDevice

aten = torch.ops.aten


def test_placeholders_are_numbered_in_the_order_of_arguments(embedded):
    x, y = gt.ones(2), gt.ones(2)
    op = OpSchema(aten._foreach_add_.List, False)
    template = CallTemplate(op, ([x, y], [x, y]), {"alpha": 2}, [x._ref, y._ref, x._ref, y._ref])
    assert template.args == (ListArg((Input(0), Input(1))), ListArg((Input(2), Input(3))))
    assert template.kwargs == {"alpha": Scalar(0)}
    assert template.writes == (0, 1)


def test_a_storage_that_is_written_twice_is_written_once(embedded):
    x = gt.ones(4)
    first, second = x[:2], x[2:]
    op = OpSchema(aten._foreach_add_.Scalar, False)
    template = CallTemplate(op, ([first, second], 1), {}, [first._ref, second._ref])
    assert template.writes == (0,)
    assert all(isinstance(ref.storage, Storage) for ref in (first._ref, second._ref))


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (None, None),
        ([1, 2.5], ListArg((1, 2.5))),
        (torch.float32, DType("float32")),
        (torch.channels_last, MemoryFormat("channels_last")),
        (2 + 3j, Complex(2.0, 3.0)),
        (torch.device("cpu"), WorkerDevice()),
    ],
    ids=str,
)
def test_constants_in_wire_form(value, wire):
    assert to_wire(value) == wire


def test_other_constants_are_refused():
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        to_wire(object())
