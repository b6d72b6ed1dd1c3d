"""Writes through views that are copies on the worker, whose strides differ from those that the client assumes."""

import pytest
import torch

from gt.core.signatures import Input, ListArg, Signature, ViewStep
from gt.worker.bound_ops import BoundOp
from gt.worker.engines import NumPyEngine, PyTorchEngine

FLAT = ViewStep("aten.view.default", (ListArg((6,)),), {})
TAIL = ViewStep("aten.slice.Tensor", (0, 4, 6, 1), {})
STRIDED = ViewStep("aten.as_strided.default", (ListArg((2,)), ListArg((1,)), 4), {}, None, (2, 1))
PATHS = {"view": (FLAT,), "view and slice": (FLAT, TAIL), "as_strided": (STRIDED,)}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("engine", [PyTorchEngine(), NumPyEngine()], ids=["pytorch", "numpy"])
def test_a_write_through_a_copied_view_reaches_its_base(engine, path):
    expected = torch.arange(6.0).reshape(3, 2)  # contiguous, as the client assumes
    held = torch.arange(6.0).reshape(3, 2).t().contiguous().t()  # the same value in other strides
    base = held if isinstance(engine, PyTorchEngine) else held.numpy()
    (expected.view(6) if path == (FLAT,) else expected.view(6)[4:]).mul_(10)
    signature = Signature("aten.mul_.Tensor", (Input(0), 10.0), {}, (path,), (0,), (), ())
    with engine.isolated():
        assert BoundOp(engine, signature).call([base], ()) == []
    assert torch.equal(torch.as_tensor(base), expected)
