"""`torch.compile`, which GT replaces for the whole process: other backends are torch's."""

import pytest
import torch

import gt
from gt.client.compilation.compiled_function import CompiledFunction
from gt.client.torch_patches.torch_compile import original
from tests.subprocesses import finish, start_interpreter


def test_other_backends_are_torchs_own():
    assert torch.compile.__wrapped__ is original
    function = torch.compile(lambda x: x + 1, backend="eager")
    assert function(torch.ones(1)).item() == 2.0


def test_the_backend_of_gt_skips_the_code_of_a_model(embedded):
    model = gt.to(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend="gt", fullgraph=True)
    assert isinstance(compiled, CompiledFunction)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(compiled(gt.ones(1, 2)).cpu(), model(gt.ones(1, 2)).cpu())
    assert compiled.skipped == 2


def test_the_backend_of_gt_as_a_decorator(embedded):
    @torch.compile(backend="gt")
    def double(x):
        return x * 2

    assert [double(gt.ones(1)).item() for _ in range(5)] == [2.0] * 5
    assert double.skipped == 2


def test_a_backward_outside_is_refused_and_never_run_without_compiling(embedded):
    model = torch.compile(gt.to(torch.nn.Linear(2, 2)), backend="gt")
    with pytest.raises(gt.CompileError, match="backward inside"):
        model(gt.ones(1, 2)).sum().backward()


def test_options_without_a_meaning_are_refused():
    with pytest.raises(TypeError, match="has no mode"):
        torch.compile(lambda x: x, backend="gt", mode="max-autotune")
    function = lambda x: x
    assert torch.compile(function, backend="gt", disable=True) is function


def test_a_program_without_gt_is_told_what_to_do():
    program = 'import torch; torch.compile(torch.nn.Linear(1, 1), backend="gt")'
    _, _, errors = finish(start_interpreter("-c", program))
    assert "CompileError" in errors and "gt.compile(model)" in errors
