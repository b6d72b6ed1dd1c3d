"""Pipeline parallelism with micro-batches in a plain loop: the stages overlap as GPipe says they can."""

import time
from statistics import median

import psutil
import pytest
import torch

import gt
from gt.client import session as sessions
from gt.monitor.schedule import schedule

BATCHES = 8


def bound(stages):
    """The fraction of time that each of several equal stages is idle at least."""
    return (stages - 1) / (BATCHES + stages - 1)


class Pipeline:
    """One stage per worker, with equal work: the input has a gradient, so that the first stage is like the others."""

    def __init__(self, stages, rows, width, layers=4):
        self.names = [f"stage_{number}" for number in range(stages)]
        self.stages = []
        for number, name in enumerate(self.names):
            gt.register_config(name, gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[number])))
            with gt.signal.context(name):
                linear = [gt.nn.Linear(width, width, bias=False) for _ in range(layers)]
                self.stages.append(gt.nn.Sequential(*[part for one in linear for part in (one, gt.nn.ReLU())]))
        with gt.signal.context(self.names[0]):
            self.inputs = [gt.randn(rows, width).requires_grad_() for _ in range(BATCHES)]

    def loss(self, x):
        for name, stage in zip(self.names, self.stages, strict=True):
            with gt.signal.context(name):
                x = stage(x)
        with gt.signal.context(self.names[-1]):
            return x.pow(2).mean()

    def step(self):
        losses = [self.loss(x) for x in self.inputs]
        for loss in losses:
            loss.backward()
        return losses

    def gradients(self):
        tensors = [*self.inputs, *[weight for stage in self.stages for weight in stage.parameters()]]
        return [tensor.grad.cpu() for tensor in tensors]

    def plain(self):
        """The same step in torch."""
        inputs = [x.detach().cpu().requires_grad_() for x in self.inputs]
        weights = [weight.detach().cpu().requires_grad_() for stage in self.stages for weight in stage.parameters()]
        for x in inputs:
            for weight in weights:
                x = (x @ weight.t()).relu()
            x.pow(2).mean().backward()
        return [tensor.grad for tensor in (*inputs, *weights)]


def timed_step(pipeline):
    with gt.debug.timeline() as t:
        pipeline.step()
    return t


def cpu_seconds():
    """The CPU time of each worker process so far."""
    times = [psutil.Process(info.pid).cpu_times() for info in sessions.current().welcome.workers]
    return [each.user + each.system for each in times]


class Try:
    """A timed step of two stages: the longest idle fraction; whether it was `fair`, which means that the workers had
    the cores they needed and the stages took equal time, so that the bound holds; and the ratio of its duration to the
    shortest possible one for commands of these lengths."""

    def __init__(self, pipeline):
        before = cpu_seconds()
        t = timed_step(pipeline)
        computed = [(after - start) * 1e9 for start, after in zip(before, cpu_seconds(), strict=True)]
        best = schedule(t.events)
        equal = max(best.idle(worker) for worker in t.workers) / best.makespan <= 1.1 * bound(2)
        self.idle = max(t.idle(worker) for worker in t.workers) / t.span
        self.fair = equal and all(computed[worker] > 0.95 * t.busy(worker) for worker in t.workers)
        self.excess = t.span / best.makespan

    def __repr__(self):
        return f"idle {self.idle:.3f} {'fair' if self.fair else 'unfair'}, {self.excess:.2f} of the best"


def test_two_stages_on_two_processes_overlap():
    """The bound is for equal stages, and other programs use the machine too, so one of several tries has to meet it. If
    hardly any try was fair, stages must still have overlapped as far as their lengths allow."""
    gt.init(workers=2)
    try:
        pipeline = Pipeline(2, rows=1024, width=1024)
        pipeline.step()
        gt.synchronize()
        deadline = time.monotonic() + 20
        tries = [Try(pipeline)]
        while min(one.idle for one in tries) > 1.25 * bound(2) and time.monotonic() < deadline:
            tries.append(Try(pipeline))
    finally:
        gt.shutdown()
    assert min(one.excess for one in tries) < 1.2, tries  # one stage after the other: 1.8
    if min(one.idle for one in tries) > 1.25 * bound(2) and sum(one.fair for one in tries) < 2:
        pytest.skip(f"other programs use the cores: {tries}")
    assert min(one.idle for one in tries) <= 1.25 * bound(2), tries


@pytest.fixture
def four_stages(four_workers):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads of one op wait for one another
    yield Pipeline(4, rows=128, width=192)
    torch.set_num_threads(threads)


def test_four_stages_would_overlap(four_stages):
    """Virtual workers take turns, so the overlap is computed. Equal ops are assumed to take equal time, since measured
    times depend on the load of the machine."""
    four_stages.step()
    t = timed_step(four_stages)
    assert t.workers == [0, 1, 2, 3]
    kinds = {}
    for event in t.events:
        kinds.setdefault(event.op, []).append(event.busy)
    plan = schedule(t.events, cost=lambda event: median(kinds[event.op]))
    idle = [plan.idle(worker) / plan.makespan for worker in t.workers]
    assert max(idle) <= 1.25 * bound(4), idle
    assert plan.makespan < 0.5 * sum(map(plan.busy, t.workers))


def test_activations_and_gradients_move_from_stage_to_stage(four_stages):
    four_stages.step()
    t = timed_step(four_stages)
    sent = [
        (event.worker, peer, nbytes)
        for event in t.events
        for transfer in event.transfers
        for peer, nbytes in transfer.sends
    ]
    there = [(stage, stage + 1, 128 * 192 * 4) for stage in range(3)]
    back = [(stage + 1, stage, 128 * 192 * 4) for stage in range(3)]
    assert sorted(sent) == sorted((there + back) * BATCHES)


def test_a_pipeline_computes_what_torch_does(four_stages):
    four_stages.step()
    torch.testing.assert_close(four_stages.gradients(), four_stages.plain())
