"""torch's profilers show the ops of a program with their lines, and the kernels of a worker in the same process."""

import json

import pytest
import torch

import gt
from gt.client import torch_dispatch


@pytest.fixture(autouse=True, scope="module")
def profiler_was_used():
    """The first profile imports modules of torch, whose names are sometimes garbage in a profile with stacks."""
    with torch.profiler.profile():
        torch.ones(1)


@pytest.mark.parametrize("with_stack", [False, True])
def test_a_profile_has_ops_with_lines_and_kernels(anywhere, tmp_path, with_stack):
    x = gt.ones(4, 4).requires_grad_()
    with torch.profiler.profile(with_stack=with_stack) as profile:
        y = torch.mm(x, x)
        (y + 1).sum().backward()
        x.grad.sum().item()
    names = [event.name for event in profile.events()]
    issued = [name for name in names if name.startswith("gt::aten.mm.default test_profiles.py:")]
    ran = [name for name in names if name.startswith("gt worker 0::aten.mm.default test_profiles.py:")]
    assert len(issued) == 3 and len(ran) == 3  # one forward, two backward
    assert "aten::mm" in names
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    traced = [event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert set(issued) <= set(traced)


def test_nothing_is_named_without_a_profiler(embedded):
    with torch.profiler.profile():
        assert torch_dispatch._is_profiled
    assert not torch_dispatch._is_profiled


def test_segments_are_shown_op_by_op(embedded):
    y = gt.ones(4)
    for step in range(40):
        if step == 30:
            profile = torch.profiler.profile()
            profile.start()
        for _ in range(3):
            y = (y * 0.5).relu() + 1.0
        y.sum().item()
    profile.stop()
    names = [event.name for event in profile.events() if event.name.startswith("gt worker 0::aten.relu.default")]
    assert len(names) == 30
