"""`gt.init(mode="shapes")`: ops are planned, and nothing is computed."""

import pytest
import torch

import gt


@pytest.fixture(autouse=True)
def shapes():
    gt.shutdown()
    gt.init(workers=4, mode="shapes")
    yield
    gt.shutdown()


def test_a_model_that_fits_nowhere_is_trained():
    with gt.device():
        model = torch.nn.Linear(1 << 20, 1 << 20)  # 4 TB
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(gt.zeros(8, 1 << 20)).square().mean()
    loss.backward()
    optimizer.step()
    assert loss.shape == () and model.weight.grad.shape == model.weight.shape
    assert len(model.weight.shards()) == 4


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda x: x.sum().item(), "the value of a tensor of shape [] is read"),
        (lambda x: x.numpy(), "the value of a tensor of shape [8, 4] is read"),
        (lambda x: x.cpu(), "the value of a tensor of shape [8, 4] is read"),
        (lambda x: bool(x.sum() > 0), "the value of a tensor of shape [] is read"),
        (lambda x: x.nonzero(), "the result of aten.nonzero.default depends on values"),
        (lambda x: torch.allclose(x, x), "the result of aten.allclose.default depends on values"),
        (lambda x: torch.equal(x, x), "the result of aten.equal.default depends on values"),
        (lambda x: repr(x), "the value of a tensor of shape [8, 4] is read"),
    ],
)
def test_a_read_raises_with_its_line_and_the_reason(read, reason):
    with pytest.raises(gt.SessionError) as raised:
        read(gt.ones(8, 4))
    assert f"{__file__}:" in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x @ torch.ones(5, 5), RuntimeError),
        (lambda x: x.view(7), RuntimeError),
        (lambda x: x.sum(3), IndexError),
        (lambda x: x + torch.ones(3), RuntimeError),
    ],
)
def test_a_call_that_torch_refuses_raises_torchs_error(call, error):
    with pytest.raises(error) as raised:
        call(gt.ones(8, 4))
    assert not isinstance(raised.value, gt.GTError)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (torch.nn.LSTM(4, 8, batch_first=True), (2, 3, 4)),
        (torch.nn.LayerNorm(4).bfloat16(), (2, 4)),
        (torch.nn.GroupNorm(2, 4).half(), (2, 4, 3)),
        (torch.nn.BatchNorm1d(4).eval(), (2, 4)),
        (torch.nn.EmbeddingBag(8, 4), (2, 3)),
    ],
)
def test_ops_whose_results_differ_by_device_have_torchs_shapes(module, shape):
    dtype = next(module.parameters()).dtype
    x = torch.zeros(shape, dtype=torch.int64 if isinstance(module, torch.nn.EmbeddingBag) else dtype)
    expected = module(x)
    result = gt.to(module)(gt.to(x))
    one, other = [each[0] if isinstance(each, tuple) else each for each in (result, expected)]
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    one.float().sum().backward()


def test_layouts_and_planned_bytes_are_those_of_a_run():
    def program():
        x, w = gt.shard(torch.ones(8, 16), mesh=gt.mesh(4), dim=0), gt.shard(torch.ones(16, 4), mesh=gt.mesh(4), dim=0)
        with gt.debug.comm() as c:
            y = x @ w
        return str(y.spec), c.bytes, [(event.kind, event.bytes) for event in c.events]

    planned = program()
    gt.shutdown()
    gt.init(workers=4, mode="virtual")
    assert program() == planned


def test_gt_waits_for_nothing_and_ends():
    gt.ones(4) + 1
    gt.synchronize()
    assert gt.debug.get_worker_stats()[0].ops == 0


def _memory_of_a_model(mode):
    """The live and the most bytes of originals and copies on each worker, and those of each line."""
    gt.shutdown()
    gt.init(workers=2, mode=mode)
    mesh = gt.mesh(2, ("x",))
    model = gt.to(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)))
    x, optimizer = gt.ones(32, 64, mesh=mesh, placements="x, -"), torch.optim.AdamW(model.parameters())
    with gt.debug.memory() as m:
        for _ in range(6):  # in segments too
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return {number: (worker.live, worker.peak, sorted(worker.lines)) for number, worker in m.workers.items()}


def test_planned_memory_is_what_is_then_measured():
    planned = _memory_of_a_model("shapes")
    assert planned == _memory_of_a_model("virtual")
    assert planned[0][1].total > 0
