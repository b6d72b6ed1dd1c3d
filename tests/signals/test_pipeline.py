"""Pipeline parallelism with micro-batches in plain loops: the stages overlap as GPipe says they can if all
micro-batches go forward before the first one goes back, and take turns if each goes back at once."""

import pytest
import torch

import gt
from gt.monitor.simulated_schedule import schedule

BATCHES = 8


def bound(stages):
    """The least fraction of time in which each of several equal stages is idle."""
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

    def step_by_batch(self):
        """A plain training loop: the backward of each micro-batch comes before the forward of the next one."""
        for x in self.inputs:
            self.loss(x).backward()

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


def planned(t):
    """The schedule of a timeline's commands for fixed costs of ops, since measured times depend on the load of the
    machine."""
    return schedule(t.events, cost=lambda event: 1_000_000 if event.op == "aten.mm.default" else 10_000)


def idle_fractions(plan, workers):
    return [plan.idle(worker) / plan.makespan for worker in workers]


def both_compute(t):
    """The time in which both workers of a timeline run an op."""
    ops = [[event for event in t.events if event.worker == worker and not event.transfers] for worker in (0, 1)]
    return sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in ops[0] for b in ops[1])


def test_two_stages_on_two_processes_overlap():
    """Other programs may use the cores, so how long each op took is not judged: the order of commands must allow the
    overlap, and the processes must have computed at the same time."""
    gt.init(workers=2)
    try:
        pipeline = Pipeline(2, rows=512, width=512)
        pipeline.step()
        gt.synchronize()
        t = timed_step(pipeline)
    finally:
        gt.shutdown()
    assert max(idle_fractions(planned(t), t.workers)) <= 1.25 * bound(2)
    assert both_compute(t) > 0.1 * min(map(t.busy, t.workers))  # one stage after the other: 0


@pytest.fixture
def four_stages(four_workers):
    return Pipeline(4, rows=128, width=192)


def test_four_stages_would_overlap(four_stages):
    """Virtual workers take turns, so the overlap is computed."""
    four_stages.step()
    t = timed_step(four_stages)
    assert t.workers == [0, 1, 2, 3]
    plan = planned(t)
    idle = idle_fractions(plan, t.workers)
    assert max(idle) <= 1.25 * bound(4), idle
    assert plan.makespan < 0.5 * sum(map(plan.busy, t.workers))


@pytest.mark.parametrize(("stages", "idle"), [(2, 0.55), (4, 0.75)])
def test_stages_take_turns_if_each_backward_follows_its_forward(stages, idle, four_workers):
    """As docs/strategies.md says: workers run their commands in the order in which the program issues them."""
    pipeline = Pipeline(stages, rows=16, width=32)
    pipeline.step_by_batch()
    with gt.debug.timeline() as t:
        pipeline.step_by_batch()
    fractions = idle_fractions(planned(t), range(stages))
    assert sum(fractions) / stages == pytest.approx(idle, abs=0.06), fractions


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
