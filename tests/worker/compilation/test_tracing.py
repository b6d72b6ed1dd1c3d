"""Compile units traced to graphs: the graph of a unit does what its ops do."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from gt.core.signatures import Input, Signature
from gt.worker.compilation.compile_server import UntraceableCall, trace
from gt.worker.compilation.compile_units import CompileUnit, UnitCall
from tests.worker.compilation.recorded_units import code_of, copy, meta_of, record, run_both

F = nn.functional


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(8):
        x = x * 1.0001 + 0.5
    return [x]


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return gradients((torch.tanh(F.linear(F.relu(F.linear(x, w, b)), v)) ** 2).mean(), w, b, v)


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    batch, length, width = x.shape
    h = F.layer_norm(x, (width,), g)
    q, k, v = [part.view(batch, length, 2, width // 2).transpose(1, 2) for part in F.linear(h, qkv).split(width, 2)]
    mixed = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1) @ v
    y = x + F.gelu(F.linear(mixed.transpose(1, 2).reshape(batch, length, width), out))
    return gradients(y.sum(), qkv, out, g)


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return gradients(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), q, k, v)


def adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    p.mul_(0.999)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, (v.sqrt() / 0.9).add_(1e-8), value=-0.001)
    return [p, m, v]


def foreach_adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    torch._foreach_mul_([p], 0.999)
    torch._foreach_lerp_([m], [g], 0.1)
    torch._foreach_mul_([v], 0.99)
    torch._foreach_addcmul_([v], [g], [g], 0.01)
    roots = torch._foreach_sqrt([v])
    torch._foreach_div_(roots, [0.9])
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_([p], [m], roots, [-0.001])
    return [p, m, v]


def views(x: torch.Tensor) -> list[torch.Tensor]:
    y = x + 1.5
    first, second = y.split(4, 1)
    return [y, first, second.t(), x[1:3], x.t() * 2.0]


def several_results(x: torch.Tensor) -> list[torch.Tensor]:
    values, places = (x * 2.0).max(1)
    variance, mean = torch.var_mean(x, 1)
    return [values, places, variance, mean]


def numbers(x: torch.Tensor) -> list[torch.Tensor]:
    total = x.sum()
    return [total * 0.1, (total + 2.5).sqrt(), total.clone().fill_(0.25), x.clamp(0.25, 0.75), x > 0.5]


def convolution(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [F.relu(F.conv2d(x, w, padding=1)) * 0.5]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


CASES: dict[str, tuple[Callable[..., Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]] = {
    "chain": (chain, lambda: [torch.randn(8, 8)]),
    "chain in bfloat16": (chain, lambda: [torch.randn(8, 8).bfloat16()]),
    "chain of a 0-dim tensor": (chain, lambda: [torch.tensor(0.5)]),
    "chain in float64": (chain, lambda: [torch.randn(8).double()]),
    "chain of integers": (chain, lambda: [torch.arange(6)]),
    "mlp": (mlp, lambda: [torch.randn(4, 8), leaf(16, 8), leaf(16), leaf(3, 16)]),
    "attention": (attention, lambda: [torch.randn(2, 6, 8), leaf(24, 8), leaf(8, 8), leaf(8)]),
    "fused attention": (fused_attention, lambda: [leaf(2, 2, 6, 8) for _ in range(3)]),
    "adamw": (adamw, lambda: [torch.rand(4, 6) for _ in range(4)]),
    "adamw in bfloat16": (adamw, lambda: [torch.rand(4, 6).bfloat16() for _ in range(4)]),
    "foreach adamw": (foreach_adamw, lambda: [torch.rand(4, 6) for _ in range(4)]),
    "views": (views, lambda: [torch.randn(6, 8)]),
    "views of columns": (views, lambda: [torch.randn(8, 6).t()]),
    "several results": (several_results, lambda: [torch.randn(5, 7)]),
    "numbers": (numbers, lambda: [torch.rand(5, 7)]),
    "channels last": (
        convolution,
        lambda: [torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last), torch.randn(4, 3, 3, 3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_unit_does_what_its_ops_do(case: str) -> None:
    function, make = CASES[case]
    torch.manual_seed(0)
    inputs = make()
    recorded = record(function, inputs)
    assert run_both(function, inputs, code_of(recorded.unit), recorded.scalars) is None


def test_changed_numbers_need_no_new_code() -> None:
    inputs = [torch.rand(4, 6) for _ in range(4)]
    recorded = record(adamw, inputs)
    assert set(recorded.unit.scalars) == {None}
    code = code_of(recorded.unit)

    def slower(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        p.mul_(0.9999)
        m.lerp_(g, 0.6)
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        p.addcdiv_(m, (v.sqrt() / 0.8).add_(1e-6), value=-0.01)
        return [p, m, v]

    assert run_both(slower, inputs, code, (0.9999, 0.6, 0.9, 0.1, 0.8, 1e-6, -0.01)) is None


def test_live_tensors_share_memory_as_those_of_the_ops_do() -> None:
    x = torch.randn(6, 8)
    y, first, second, part, other = code_of(record(views, [x]).unit)([x], (1.5, 2.0))
    memory = [tensor.untyped_storage().data_ptr() for tensor in (x, y, first, second, part, other)]
    assert memory[1] == memory[2] == memory[3]
    assert memory[4] == memory[0]
    assert len(set(memory)) == 3


def test_written_inputs_that_share_memory_do_not_fit() -> None:
    p, g, m, v = [torch.rand(4, 6) for _ in range(4)]
    code = code_of(record(adamw, [p, g, m, v]).unit)
    assert code.fits([p, g, m, v])
    assert not code.fits([p, p, m, v])
    assert not code.fits([p, g, m, torch.rand(6, 4).t()])


def test_a_constant_of_another_value_does_not_fit() -> None:
    x = torch.randn(4, 4)
    recorded = record(lambda x: [F.leaky_relu(x, 0.1) * 2.0], [x])
    code = code_of(recorded.unit)
    assert recorded.unit.scalars == (0.1, None)
    assert code.has_constants((0.1, 5.0))
    assert not code.has_constants((0.2, 2.0))
    assert not code.has_constants((0.1, 2))


def test_equal_units_have_the_same_key() -> None:
    first, second, third = [record(chain, [torch.randn(8, size)]).unit.key for size in (8, 8, 4)]
    assert first == second != third


def test_an_op_that_cannot_be_traced_is_named() -> None:
    x = torch.randn(4)
    meta = meta_of(x)
    calls = [
        UnitCall(Signature("aten.neg.default", (Input(0),), {}, (), (), (meta,), (0,)), (0,), (), (1,)),
        UnitCall(Signature("aten.nonzero.default", (Input(0),), {}, (), (), (), ()), (1,), (), (2,)),
    ]
    with pytest.raises(UntraceableCall, match="aten.nonzero.default: .*") as caught:
        trace(CompileUnit(tuple(calls), (meta,), (), (2,)))
    assert caught.value.call == 1


def test_inputs_are_not_changed_by_a_trace() -> None:
    inputs = [torch.rand(4, 6) for _ in range(4)]
    before = [copy(tensor) for tensor in inputs]
    code_of(record(adamw, inputs).unit)
    assert all(map(torch.equal, inputs, before))
