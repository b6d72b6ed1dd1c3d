"""`torch.compile`, which GT replaces for the whole process: other backends are torch's."""

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

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
    assert (compiled.checked, compiled.skipped) == (1, 1)


def test_the_backend_of_gt_as_a_decorator(embedded):
    @torch.compile(backend="gt")
    def double(x):
        return x * 2

    assert [double(gt.ones(1)).item() for _ in range(5)] == [2.0] * 5
    assert (double.checked, double.skipped) == (1, 1)


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


def _attention(x):
    return flex_attention(x.reshape(1, 1, 2, 2), x.reshape(1, 1, 2, 2), x.reshape(1, 1, 2, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("work", "said"),
    [
        (_attention, "flex_attention does not work on GT tensors: .*scaled_dot_product_attention"),
        (lambda x: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1), "torch.cond does not work on GT .* an if"),
        (lambda x: while_loop(lambda a: a.sum() < 9, lambda a: (a + 1,), (x,)), "while_loop does .* use a while"),
        (lambda x: scan(lambda carry, row: (carry + row, row), x[0], x), "^scan does not .* use a for"),
        (lambda x: torch._higher_order_ops.map(lambda row: row + 1, x), "^map does not .* torch.vmap"),
        (lambda x: torch.compile(_attention, backend="eager", fullgraph=True)(x), "_attention .* leave out fullgraph"),
    ],
)
def test_functions_that_torch_compiles_whole_refuse_gt_tensors_with_the_way_out(embedded, work, said):
    with pytest.raises(NotImplementedError, match=said):
        work(gt.ones(2, 2))


def test_functions_that_are_compiled_whole_work_on_plain_tensors_and_keep_their_errors():
    def fails(x):
        raise ValueError("of the user")

    def breaks(x):
        torch._dynamo.graph_break()
        return x

    assert torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2.0
    for function in (fails, breaks):
        with pytest.raises(Exception) as torchs:
            original(function, backend="eager", fullgraph=True)(torch.ones(1))
        with pytest.raises(type(torchs.value)) as own:
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(1))
        assert type(own.value) is type(torchs.value)
