"""Boxes in one buffer of bytes, each after a flag."""

import numpy as np
import pytest
import torch

from gt.worker.engines import NumPyEngine
from gt.worker.exchange.message_layout import MessageLayout
from tests.dispatcher_harness import over
from tests.worker.exchange.tasks import ENGINE, FAILING, dense, task_of

WHOLE = (slice(0, 3),)
DTYPES = ("float32", "bfloat16", "bool", "complex64", "int8")


def layout_of(*dtypes):
    return MessageLayout([dense((3,), dtype) if dtype else None for dtype in dtypes])


@pytest.mark.parametrize("engine", [ENGINE, NumPyEngine()], ids=["pytorch", "numpy"])
def test_boxes_of_several_dtypes_share_a_buffer(engine):
    dtypes = DTYPES if engine is ENGINE else ("float32", "bool", "complex64", "int8")
    layout = layout_of(*dtypes)
    buffer = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    values = [torch.tensor([0, 1, 1]).to(getattr(torch, dtype)) for dtype in dtypes]
    for position, (dtype, value) in enumerate(zip(dtypes, values, strict=True)):
        held = value if engine is ENGINE else value.numpy()
        task = task_of(0, held, over("- + x"), over("-"), dense((3,), dtype), engine)
        assert layout.write(buffer, task, position, WHOLE) is None
    for position, value in enumerate(values):
        assert not layout.flag(buffer, position)
        box = layout.box(engine, buffer, position)
        assert torch.equal(torch.as_tensor(box) if isinstance(box, np.ndarray) else box, value)


def test_a_task_without_a_value_sets_its_own_flag_only():
    layout = layout_of("float32", None, "float32")
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    failing, good = (task_of(0, each, over("- + x"), over("-"), dense((3,))) for each in (FAILING, torch.ones(3)))
    assert layout.write(buffer, failing, 0, WHOLE) is FAILING
    assert layout.write(buffer, good, 2, WHOLE) is None
    assert [int(layout.flag(buffer, position)) for position in (0, 2)] == [1, 0]


def test_a_box_that_cannot_be_copied_is_a_failure():
    layout = layout_of("float32")
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    task = task_of(0, torch.ones(5), over("- + x"), over("-"), dense((3,)))
    failed = layout.write(buffer, task, 0, (slice(0, 5),))
    assert "size" in failed.failure.message and bool(layout.flag(buffer, 0))
