"""Layouts of whole programs: an MLP, a transformer block, and the laws that hold for random programs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from gt.sharding.hierarchical_propagation import run_hierarchical_propagation_pass
from gt.sharding.program_trace import ProgramTrace
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_constraint
from tests.sharding.propagated_layouts import GRID, MESH, found
from tests.sharding.recording import record


def mlp(x, w1, b1, w2, b2, target):
    weights = [weight.requires_grad_() for weight in (w1, b1, w2, b2)]
    y = functional.linear(functional.gelu(functional.linear(x, w1, b1)), w2, b2)
    loss = functional.mse_loss(y, target)
    return y, *torch.autograd.grad(loss, weights)


def test_an_mlp_and_its_gradients():
    """Megatron: the first weight by columns, the second by rows. Gradients are cut like their parameters."""
    program = record(mlp, x=(16, 64), w1=(256, 64), b1=(256,), w2=(64, 256), b2=(64,), target=(16, 64))
    layouts = found(program, {"x": "dp, -", "w1": "tp, -", "w2": "-, tp"}, mesh=GRID)
    assert {name: layouts[name] for name in ("b1", "addmm", "gelu", "gelu_backward")} == {
        "b1": "tp", "addmm": "dp, tp", "gelu": "dp, tp", "gelu_backward": "dp, tp",
    }  # fmt: skip
    assert {name: layouts[name] for name in ("b2", "result", "target")} == {
        "b2": "-", "result": "dp, -", "target": "dp, -",
    }  # fmt: skip
    assert [layouts[f"result_{n}"] for n in (1, 2, 3, 4)] == ["tp, -", "tp", "-, tp", "-"]


def attend(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def block(ids, embedding, norm, wq, wk, wv, wo, w1, w2, head):
    x = functional.embedding(ids, embedding)
    batch, length, width = x.shape
    heads = (batch, length, 8, width // 8)
    normal = functional.layer_norm(x, (width,), norm)
    q, k, v = [functional.linear(normal, weight).view(heads).transpose(1, 2) for weight in (wq, wk, wv)]
    attended = attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
    x = x + functional.linear(attended, wo)
    x = x + functional.linear(functional.gelu(functional.linear(x, w1)), w2)
    return functional.linear(x, head), attended


def recorded_block() -> ProgramTrace:
    square, ids = (64, 64), torch.empty(8, 16, dtype=torch.int64, device="meta")
    return record(
        block, ids=ids, embedding=(96, 64), norm=(64,), wq=square, wk=square, wv=square, wo=square, w1=(256, 64),
        w2=(64, 256), head=(96, 64),
    )  # fmt: skip


MEGATRON = {
    "embedding": "tp, -", "wq": "tp, -", "wk": "tp, -", "wv": "tp, -", "wo": "-, tp", "w1": "tp, -", "w2": "-, tp",
    "head": "tp, -",
}  # fmt: skip


@pytest.mark.parametrize(("ids", "batch"), [("dp, -", "dp"), ("-, -", "-")])
def test_a_transformer_block(ids, batch):
    """Constraints on the batch and on weights alone; every activation is as in the textbook."""
    program = recorded_block()
    layouts = found(program, {"ids": ids, **MEGATRON}, mesh=GRID)
    assert layouts["embedding_1"] == layouts["native_layer_norm"] == f"{batch}, -, -"
    for name in ("transpose", "transpose_1", "transpose_2", "_scaled_dot_product_flash_attention_for_cpu"):
        assert layouts[name] == f"{batch}, tp, -, -"  # heads
    assert layouts["result_1"] == layouts["gelu"] == f"{batch}, -, tp"
    assert layouts["add"] == layouts["add_1"] == f"{batch}, -, -"
    assert layouts["result"] == f"{batch}, -, tp"  # logits, by vocabulary


def test_a_sequence_is_cut_through_a_block():
    layouts = found(recorded_block(), {"ids": "-, dp", **MEGATRON}, mesh=GRID)
    assert layouts["add_1"] == "-, dp, -"


MESHES = [DeviceMesh((2,), ("x",)), DeviceMesh((2, 2), ("x", "y")), DeviceMesh((2, 3), ("x", "y")), MESH]
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


@st.composite
def programs(draw) -> ProgramTrace:
    """Random ops on matrices, of which most shapes fit together."""
    rows, columns = draw(SIZES), draw(SIZES)
    plan = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8))

    def body(a, b, w, bias):
        values = [a, b, w, bias]
        for op, left, right in plan:
            one, other = values[left % len(values)], values[right % len(values)]
            values.append(apply(op, one, other))
        return values[4:]

    return record(body, a=(rows, columns), b=(rows, columns), w=(columns, rows), bias=(columns,))


def apply(op: int, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if op == 0 and one.dim() == other.dim() == 2 and one.shape[1] == other.shape[0] and one is not other:
        return one @ other
    if op == 1 and one.shape[-1:] == other.shape[-1:] and other.dim() == 1:
        return one + other
    if op == 2 and one.shape == other.shape:
        return torch.cat([one, other])
    if op == 3:
        return one.reshape(-1)
    if op == 4 and one.dim() == 2:
        return one.t()
    if op == 5 and one.numel() % 2 == 0:
        return one.reshape(2, -1)
    if op == 6 and one.dim() == 2:
        return one.sum(0)
    if op == 7 and one.shape[0] > 2:
        return one[1:]
    return one + other if one.shape == other.shape else one.exp()


@st.composite
def problems(draw):
    program, mesh = draw(programs()), draw(st.sampled_from(MESHES))
    constraints = {}
    for value in draw(st.lists(st.sampled_from(sorted(program.values)), unique=True, max_size=4)):
        axes = draw(st.permutations(mesh.axis_names))
        rank = len(program.values[value].shape)
        positions = [draw(st.integers(-1, rank - 1)) for _ in axes]
        dims = [" ".join([axis for axis, position in zip(axes, positions, strict=True) if position == dim]) or "-"
                for dim in range(rank)]  # fmt: skip
        marks = [draw(st.sampled_from(["", "?", "?", "@1", "?@1", "?@2"])) for _ in range(rank)]
        text = ", ".join([dim + mark for dim, mark in zip(dims, marks, strict=True)])
        constraints[value] = parse_constraint(text, mesh)
    return program, mesh, constraints


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(["basic", "aggressive"]))
def test_propagation_keeps_constraints_and_uses_no_axis_twice(problem, eagerness):
    program, mesh, constraints = problem
    result = run_hierarchical_propagation_pass(program, mesh, constraints, eagerness)
    for value, layout in result.layouts.items():
        used = [axis for dim_constraint in layout.dims for axis in dim_constraint.axes]
        assert len(set(used)) == len(used), f"{value}: {layout} uses an axis twice"
        for dim, dim_constraint in enumerate(layout.dims):
            asked = constraints[value].dims[dim] if value in constraints else None
            have = asked.axes if asked is not None else ()
            assert dim_constraint.axes[: len(have)] == have
            if asked is not None and not asked.is_open:
                assert dim_constraint.axes == have and not dim_constraint.is_open
            count = torch.Size([mesh.axis_size(axis) for axis in dim_constraint.axes]).numel()
            assert dim_constraint.axes == have or count <= program.values[value].shape[dim]
    for decision in result.decisions:
        assert set(decision.axes) <= {
            axis for dim_constraint in result.layouts[decision.source].dims for axis in dim_constraint.axes
        }


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(["basic", "aggressive"]))
def test_propagation_is_deterministic_and_idempotent(problem, eagerness):
    program, mesh, constraints = problem
    first = run_hierarchical_propagation_pass(program, mesh, constraints, eagerness)
    assert run_hierarchical_propagation_pass(program, mesh, constraints, eagerness) == first
    assert run_hierarchical_propagation_pass(program, mesh, first.layouts, eagerness).decisions == ()
