"""Ops that are not one instruction."""

import pytest
import torch

import gt
from gt.client import active_session
from gt.client.op_schema import OpSchema
from gt.client.resizing import allocate, grow
from gt.client.session_reads import fetch
from gt.client.special_ops import SPECIAL, reshape_in_place, run_on_host
from gt.client.tensor import Tensor

aten = torch.ops.aten


def run(func, *args, **kwargs):
    return SPECIAL[str(func)](Tensor, OpSchema(func, True), args, kwargs)


@pytest.fixture
def emitted(embedded):
    """The number of instructions queued so far."""
    return lambda: len(active_session.current().outbox.queue)


def test_every_special_op_exists():
    for name in SPECIAL:
        _, packet, overload = name.split(".")
        assert getattr(getattr(aten, packet), overload)._schema, name


@pytest.mark.parametrize("func", [aten.detach.default, aten.alias.default, aten.lift_fresh.default], ids=str)
def test_another_handle_of_the_same_tensor_sends_nothing(emitted, func):
    x = gt.ones(2)
    before = emitted()
    assert run(func, x)._ref is x._ref and emitted() == before


def test_as_strided_is_a_view(emitted):
    x = gt.arange(6.0)
    view = run(aten.as_strided.default, x, [2, 2], [1, 2], 1)
    assert view._ref.storage is x._ref and view.tolist() == [[1, 3], [2, 4]]


def test_as_strided_beyond_the_storage_raises_torchs_error(embedded):
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 24"):
        run(aten.as_strided.default, gt.ones(6), [7], [1])


def test_resize_within_the_storage_keeps_it_and_beyond_it_grows(embedded):
    x = gt.arange(6.0)
    storage = x._ref
    assert run(aten.resize_.default, x, [2]).tolist() == [0, 1] and x._ref.storage is storage
    run(aten.resize_.default, x, [8])
    assert x._ref.storage is not storage and x[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_grow_copies_the_old_bytes(embedded):
    x = gt.arange(3.0)
    larger = gt.empty(5)._ref.geometry
    assert fetch(grow(Tensor, x._ref, larger))[:3].tolist() == [0, 1, 2]
    assert allocate(Tensor, larger).geometry is larger


def test_reshape_in_place_changes_the_handle(embedded):
    x = gt.ones(2, 3)
    op = OpSchema(aten.t_.default, False)
    assert reshape_in_place(Tensor, op, (x,), {}) is x and x.shape == (3, 2)


def test_an_op_on_the_host_reads_and_writes_back(embedded):
    x, plain = gt.ones(2), torch.zeros(2)
    assert run_on_host(Tensor, aten.add.out, (x, x), {"out": plain}) is plain and plain.tolist() == [2, 2]
    assert run_on_host(Tensor, aten.add_.Tensor, (x, plain), {}) is x and x.tolist() == [3, 3]


def test_set_takes_the_storage_of_another_tensor(embedded):
    x, y = gt.ones(2), gt.zeros(3)
    run(aten.set_.source_Tensor, x, y)
    assert x._ref is y._ref and run(aten.is_set_to.default, x, y)
    with pytest.raises(RuntimeError, match="set_\\(\\) with a storage"):
        run(aten.set_.source_Storage, x, torch.UntypedStorage(4))


def test_queries_of_metadata_are_answered_without_workers(emitted):
    x, y = gt.ones(2), gt.ones(2, 1)
    before = emitted()
    assert not run(aten.is_same_size.default, x, y) and not run(aten.is_pinned.default, x)
    assert run(aten._has_same_storage_numel.default, x, y) and emitted() == before


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("places", [3, [1, 4]], ids=str)
def test_a_tensor_is_split_at_places_on_a_worker(embedded, places, mode):
    plain = torch.arange(6.0)
    with mode():
        parts = torch.tensor_split(gt.to(plain), gt.to(torch.tensor(places)))
        expected = torch.tensor_split(plain, torch.tensor(places))
        assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_an_op_that_writes_to_gt_and_plain_tensors_runs_on_gt(embedded):
    """A gradient scaler unscales gradients and sets a flag."""
    for value, flag in ((2.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        plain = [torch.tensor([1.0, value]), torch.ones(3)]
        ours = [gt.to(gradient) for gradient in plain]
        found, expected = torch.zeros(1), torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(plain, expected, torch.tensor(0.5))
        torch._amp_foreach_non_finite_check_and_unscale_(ours, found, torch.tensor(0.5))
        assert found.item() == expected.item() == flag
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)


@pytest.fixture(
    params=[{}, {"workers": 3, "mode": "virtual"}, {"workers": 2}], ids=["embedded", "virtual", "processes"]
)
def everywhere(request):
    gt.init(**request.param)
    yield
    gt.shutdown()


def test_plain_results_of_an_op_on_gt_have_the_sizes_that_it_chooses(embedded):
    """`_linalg_det` writes to the user's `out=` and to plain tensors that torch makes empty."""
    matrix, empty = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), gt.empty(0)
    assert torch.linalg.det(gt.to(matrix), out=empty) is empty
    assert empty.item() == 6
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(gt.to(-matrix), out=gt.empty(0))
    factors, info = gt.empty(0), torch.empty(0, dtype=torch.int32)
    torch.linalg.cholesky_ex(gt.to(-matrix), out=(factors, info))
    assert (tuple(factors.shape), info.tolist()) == ((2, 2), 1)


@pytest.mark.filterwarnings("ignore")  # torch warns that torch.jit is old
def test_a_trace_of_convolutions_is_torchs(everywhere):
    """The trace begins the session's work: definitions, moves and reads happen inside of it."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.ConvTranspose2d(4, 2, 2)]
    model, x = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(98, 2)).eval(), torch.randn(3, 2, 8, 8)
    theirs, expected = torch.jit.trace(model, x), model(x).detach()
    batch, moved = gt.shard(x, gt.mesh(len(gt.workers()))), gt.to(model)
    ours = torch.jit.trace(moved, batch)

    def kinds(trace):
        return [node.kind() for node in trace.inlined_graph.nodes() if node.kind().startswith("aten")]

    assert kinds(ours) == kinds(theirs)
    for found in (ours(batch), moved(batch)):
        torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_op_of_which_a_trace_consists_is_a_convolution(embedded):
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True)
    torch.testing.assert_close(
        torch._convolution(gt.to(x), gt.to(w), None, *settings).cpu(), torch._convolution(x, w, None, *settings)
    )
