"""Dropped tensors are freed: handles, ids and bytes, in the client, the dispatcher and the workers."""

import gc
from collections.abc import Iterator

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from tests.dispatcher.invariants import check_invariants


def held():
    """Ids held by the dispatcher and tensors held by the workers of this process, of which there are as many."""
    gt.synchronize()
    channel = active_session.current().channel
    state = channel.dispatcher.state
    check_invariants(state)
    for executor in channel.executors:
        known = {ident for ident, held in state.tensors.items() if executor.worker in held.spec.mesh}
        copies = {
            alias for each in state.copies.values() for spec, alias in each.items() if executor.worker in spec.mesh
        }
        assert executor.tensors.keys() == known | copies
    return len(state.tensors), sum(len(executor.tensors) for executor in channel.executors)


def test_dropped_tensors_are_freed(anywhere):
    gt.synchronize()
    before = held()
    kept = [gt.ones(100) * i for i in range(20)]
    total = sum(kept)
    views = [x[10:] for x in kept]
    assert held()[0] > before[0]
    del kept, total, views
    gc.collect()
    assert held() == before


@pytest.fixture
def pair() -> Iterator[gt.DeviceMesh]:
    gt.init(workers=3, mode="virtual")
    yield gt.mesh(2, ("x",))
    gt.shutdown()


USES = {
    "a gathered copy": lambda x: torch.linalg.det(x),
    "a product": lambda x: x @ x,
    "a partial sum": lambda x: x.sum(),
    "the square of a partial sum": lambda x: x.sum() * x.sum(),
    "a partial sum times itself": lambda x: torch.mul(*[x.sum()] * 2),
    "a write": lambda x: x.add_(1),
    "a write that reads itself": lambda x: x[:2].add_(x[2:]),
    "a write through a view": lambda x: x[1:, 2].mul_(2),
    "a write to a partial sum": lambda x: (s := x.sum()).add_(s),
    "out=": lambda x: torch.add(x, 1, out=gt.zeros(4, 4)),
    "two targets": lambda x: torch.aminmax(x, out=(gt.zeros(()), gt.zeros(()))),
    "a query": lambda x: x.nonzero(),
    "a query that writes": lambda x: torch.nonzero(x, out=gt.zeros(0, 2, dtype=torch.int64)),
    "another worker": lambda x: gt.ones(4, 4) + x,
    "another layout": lambda x: x.redistribute(x.spec.mesh, gt.Shard(1)),
    "one worker of the mesh": lambda x: x.redistribute(x.spec.mesh, gt.Replicate()).redistribute(gt.mesh(1)) + 1,
    "reading": lambda x: x.tolist(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_copies_of_a_tensor_on_workers_are_freed_with_it(pair, use):
    before = held()
    x = gt.distribute(torch.eye(4), pair, gt.Shard(0))
    result = use(x)
    held()
    del x, result
    gc.collect()
    assert held() == before


def test_a_view_keeps_its_storage_and_nothing_else(embedded):
    before = held()[0]
    view = gt.ones(100)[3:5]
    assert held()[0] == before + 1
    assert view.tolist() == [1.0, 1.0]
    del view
    assert held()[0] == before


def test_nothing_waits_for_the_garbage_collector(embedded):
    gc.disable()
    try:
        for make in (lambda x: x[1:] + 1, lambda x: (x * 2).nonzero(), lambda x: torch.unique(x), lambda x: x.add_(1)):
            before = held()[0]
            make(gt.arange(5.0))
            assert held()[0] == before
    finally:
        gc.enable()


def test_in_place_writes_hold_one_id(embedded):
    x = gt.zeros(10)
    before = held()[0]
    for _ in range(100):
        x += 1
        x[3:5] *= 2
    assert held()[0] == before


def test_interned_constants_are_bounded(embedded):
    x = gt.zeros(1)
    for number in range(2000):
        x = x + torch.tensor([float(number)])
    assert held()[0] < 700


def test_failed_ops_hold_nothing(embedded):
    before = held()[0]
    for _ in range(10):
        bad = gt.arange(3)[gt.tensor([9])]
        with pytest.raises(gt.OpError):
            bad.tolist()
        target = gt.zeros(3)
        target.index_add_(0, gt.tensor([5]), gt.ones(1))
        del bad, target
        with pytest.raises(gt.OpError):
            gt.synchronize()
    gc.collect()
    assert held()[0] <= before + 3  # the interned constants


def test_cached_calls_are_bounded(embedded, monkeypatch):
    monkeypatch.setattr("gt.client.session.MAX_CACHED_CALLS", 100)
    x = gt.arange(1000.0)
    for size in range(1, 400):
        assert x[:size].sum().item() == size * (size - 1) / 2
    session = active_session.current()
    assert len(session.cached_calls) <= 100
    executor = session.channel.executors[0]
    gt.synchronize()
    assert len(executor.ops) <= 202
    assert len(session.channel.dispatcher.state.sessions[session.welcome.ident].ops) <= 202


def test_cached_moves_are_bounded(pair, monkeypatch):
    monkeypatch.setattr("gt.client.session.MAX_CACHED_CALLS", 20)
    for size in range(1, 100):
        gt.distribute(torch.ones(size), pair, gt.Shard(0)).cumsum(0).tolist()
    gt.synchronize()
    channel = active_session.current().channel
    session = channel.dispatcher.state.sessions[1]
    assert max(len(session.program_names), len(session.move_plans), *[len(e.ops) for e in channel.executors]) <= 150


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train(steps):
    model = gt.nn.Sequential(gt.nn.Linear(8, 16), gt.nn.GELU(), gt.nn.LayerNorm(16), gt.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = gt.randn(16, 8), gt.randint(0, 4, (16,))
    process = psutil.Process()
    samples = []
    for number in range(steps):
        loss = step(model, optimizer, x, y)
        if number % (steps // 10) == steps // 10 - 1:
            loss.item()
            gc.collect()
            session = active_session.current()
            samples.append((held(), len(session.cached_calls), len(session.signatures), process.memory_info().rss))
    return samples


def test_a_training_loop_does_not_grow(embedded):
    counts = [sample[:3] for sample in train(300)]
    assert len(set(counts[1:])) == 1, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_training_steps_do_not_grow(embedded):
    samples = train(10_000)
    assert len({sample[:3] for sample in samples[1:]}) == 1, samples
    assert samples[-1][3] - samples[1][3] < 8_000_000, [sample[3] for sample in samples]
