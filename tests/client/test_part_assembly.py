"""Uploads cut and reads put together by the client: no worker sends anything to another."""

import contextlib

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gt
from gt.client import active_session
from gt.client.storage import geometry_of
from gt.client.transfers import assemble, write_parts
from gt.sharding.held_parts import distinct_parts, parts_to_read
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from gt.worker.failed_value import FailedValue
from tests.client.layout_cases import EVERYWHERE, VALUE, mesh_of
from tests.records import FAILURE


@contextlib.contextmanager
def nothing_moves():
    with gt.debug.comm() as moved:
        yield
    assert moved.bytes == 0


@pytest.mark.parametrize(("grid", "layout"), EVERYWHERE)
def test_an_upload_goes_straight_to_the_shards_and_back(eight_workers, grid, layout):
    with nothing_moves():
        ours = gt.distribute(VALUE, mesh_of(grid), layout)
        assert torch.equal(ours.cpu(), VALUE)
    assert str(ours.spec) == layout


@pytest.mark.parametrize("layout", ["dp, -", "-, tp", "dp, tp", "tp dp, -"])
@pytest.mark.parametrize(
    "value", [VALUE.t(), VALUE[::2, 1:], VALUE.new_zeros(0, 5), VALUE[:1]], ids=lambda v: str(v.shape)
)
def test_strides_gaps_and_missing_elements_are_as_without_a_layout(eight_workers, value, layout):
    ours = gt.distribute(value, mesh_of("2x4"), layout)
    plain = gt.to(value)
    assert (ours.stride(), ours.cpu().stride()) == (plain.stride(), plain.cpu().stride())
    assert torch.equal(ours.cpu(), value)


def test_a_part_of_a_mesh_holds_a_tensor(eight_workers):
    part = mesh_of("2x4").submesh(dp=1)
    with nothing_moves():
        ours = gt.distribute(VALUE, part, "tp, -")
        assert torch.equal(ours.cpu(), VALUE)
    assert set(ours.shards()) == set(part.workers)


def test_tensors_in_a_scope_are_cut_by_the_client(eight_workers, no_signals):
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(0, [0, 1, 2, 3])))
    with nothing_moves():
        with gt.signal.context("rows"):
            ours = gt.tensor(VALUE)
        named = gt.signal.tensor(VALUE, "rows")
        assert torch.equal(ours.cpu(), VALUE) and torch.equal(named.cpu(), VALUE)
    assert ours.spec is named.spec and ours.spec.mesh.size == 4 and any(ours.spec.dims)


def test_parameters_go_straight_to_the_layouts_of_the_model_section(eight_workers, no_signals, tmp_path):
    (tmp_path / "plan.yaml").write_text('model:\n  mesh: {dp: 4}\n  "weight": [dp, -]\n')
    gt.load_config(tmp_path / "plan.yaml")
    layer = torch.nn.Linear(8, 6)
    weight = layer.weight.detach().clone()
    with nothing_moves():
        gt.to(layer)
        assert torch.equal(layer.weight.detach().cpu(), weight)
    assert (str(layer.weight.spec), str(layer.bias.spec)) == ("dp, -", "-")


def test_gradients_pass_an_upload_in_a_layout(eight_workers):
    value = VALUE.clone().requires_grad_()
    (gt.distribute(value, gt.mesh(4), [gt.Shard(0)]) * 3).sum().backward()
    assert torch.equal(value.grad, torch.full_like(VALUE, 3))


# Partial values

NUMBERS = torch.tensor([[3.0, -0.0, 5, float("nan"), 1], [2, -0.0, 7, 1, 0.1], [0.3, 0, -4, 2, 0.2], [1, 0, 2, 3, 0.3]])
REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "and": lambda x: x.all(0),
    "or": lambda x: x.any(0),
}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
CASES = [
    *[(kind, dtype) for kind in ("sum", "prod", "max", "min") for dtype in DTYPES],
    *[(kind, torch.complex64) for kind in ("sum", "prod")],
    *[(kind, torch.bool) for kind in ("and", "or")],
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_partial_values_are_reduced_as_workers_reduce_them(eight_workers, kind, dtype, workers):
    mesh = gt.mesh(workers, ("dp",))
    value = (NUMBERS if dtype.is_floating_point or dtype.is_complex else NUMBERS.nan_to_num().abs()).to(dtype)
    partial = REDUCTIONS[kind](gt.distribute(value, mesh, [gt.Shard(0)]))
    if partial.spec.partial:
        assert partial.spec.kind in (kind, "or", "and")
    else:
        partial = gt.distribute(value[0], mesh, [gt.Partial(kind)])
    on_workers = partial.redistribute(mesh, [gt.Replicate()])
    with nothing_moves():
        read = partial.cpu()
    assert torch.equal(read.view(torch.uint8), on_workers.cpu().view(torch.uint8))


def test_partial_values_over_two_axes_are_reduced(eight_workers):
    mesh = mesh_of("2x4")
    value = torch.arange(64.0).reshape(8, 8) / 7
    product = gt.distribute(value, mesh, "-, dp tp") @ gt.distribute(value, mesh, "dp tp, -")
    assert product.spec.partial == ("dp", "tp")
    with nothing_moves():
        torch.testing.assert_close(product.cpu(), value @ value)
    assert product.spec.partial == ("dp", "tp"), "a read does not change the layout"


@st.composite
def layouts(draw):
    mesh = DeviceMesh(draw(st.sampled_from([(1,), (3,), (2, 2), (2, 3)])), workers=())
    rank = draw(st.integers(1, 3))
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=rank, max_size=rank)))
    return parse_spec(", ".join(" ".join(axes) or "-" for axes in dims), mesh), shape


@given(case=layouts(), dtype=st.sampled_from([torch.float32, torch.bool, torch.complex128]), is_shared=st.booleans())
def test_what_is_cut_out_is_put_together_again(eight_workers, case, dtype, is_shared):
    spec, shape = case
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)
    parts = distinct_parts(spec, shape)
    data = bytearray(value.nbytes)
    write_parts(value, value.stride(), parts, memoryview(data))
    starts = [sum(part.elements for part in parts[:place]) * dtype.itemsize for place in range(len(parts))]
    cut = {
        part: memoryview(data)[start : start + part.elements * dtype.itemsize]
        for part, start in zip(parts, starts, strict=True)
    }
    buffers = [cut[part] for part in parts_to_read(spec, shape)]
    together = assemble(buffers, spec, geometry_of(value), is_shared)
    assert torch.equal(together, value)
    for part in buffers:
        part[:] = bytes(len(part))
    assert not is_shared or torch.equal(together, value)


# Failures


@pytest.mark.parametrize("layout", ["dp, -", "-, - + dp", "-, dp"])
@pytest.mark.parametrize("failing", range(3))
def test_a_failure_on_any_holder_fails_the_read(eight_workers, layout, failing):
    ours = gt.distribute(VALUE, gt.mesh(3, ("dp",)), layout)
    gt.synchronize()
    holder = active_session.current().channel.executors[failing]
    holder.tensors[ours._ref.id] = FailedValue(msgspec.structs.replace(FAILURE, worker=failing, site=0))
    for _ in range(2):
        with pytest.raises(gt.OpError, match="shapes"):
            ours.cpu()
    assert torch.equal(gt.distribute(VALUE, gt.mesh(3, ("dp",)), layout).cpu(), VALUE)
