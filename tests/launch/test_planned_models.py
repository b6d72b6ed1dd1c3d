"""Plans of transformers: against those of people, run on virtual workers, and timed on processes. Slow tests."""

import time

import pytest
import torch

import gt
from gt.signals.config import Config
from gt.signals.registry import registry
from tests.auto_shard_models import gt_step, handwritten, plain_model, training_step

MODELS = ["mlp", "gpt2", "llama", "mixtral"]


@pytest.fixture(autouse=True)
def clean():
    gt.shutdown()
    registry.clear()
    yield
    gt.shutdown()
    registry.clear()


def planned(name, workers, mesh, layers=2, **options):
    gt.init(workers=workers, mode="shapes")
    training = gt_step(name, layers)
    return gt.auto_shard(training.step, *training.args, mesh=mesh, machine=gt.Calibration(), **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("workers", "mesh"), [(4, "2x2"), (8, "2x4")])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_beats_those_of_people_and_runs_as_predicted(name, workers, mesh, tmp_path):
    plan = planned(name, workers, mesh)
    for person, config in handwritten(name, plan.mesh).items():
        assert plan.cost <= plan.evaluate(config).seconds * (1 + 1e-9), person
    assert plan.gap < 0.05
    plan.to_yaml(tmp_path / "plan.yaml")
    gt.shutdown()
    gt.init(workers=workers, mode="virtual")
    gt.load_config(tmp_path / "plan.yaml")
    ours, theirs = gt_step(name), training_step(plain_model(name), name)
    for number in range(3):
        with gt.debug.comm() as c:
            loss = ours.step(*ours.args)
        torch.testing.assert_close(loss.cpu(), theirs.step(*theirs.args).detach(), rtol=1e-4, atol=1e-4)
        assert number == 0 or c.bytes == plan.bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layers", "seconds"), [(2, 10), (32, 30)])
def test_a_step_of_gpt2_is_planned_in_time(layers, seconds):
    """In CPU time, since other programs may run."""
    gt.init(workers=8, mode="shapes")
    training = gt_step("gpt2", layers)
    start = time.process_time()
    gt.auto_shard(training.step, *training.args, mesh="2x4", machine=gt.Calibration(), seconds=10.0)
    assert time.process_time() - start <= seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "width"), [(1024, 512), (16, 1024)])
def test_on_two_processes_plans_stand_in_the_predicted_order(rows, width, tmp_path):
    """Plans that the model predicts at least a quarter apart: for a large batch, and for few rows and large weights."""
    batch = torch.randn(rows, width)

    def make():
        torch.manual_seed(0)
        up, down = torch.nn.Linear(width, 4096), torch.nn.Linear(4096, width)
        model = gt.to(torch.nn.Sequential(up, torch.nn.ReLU(), down))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    gt.init(workers=2)
    machine = gt.calibrate(tmp_path / "calibration.json")
    gt.shutdown()
    gt.init(workers=2, mode="shapes")
    plan = gt.auto_shard(make(), batch, mesh="1x2", machine=machine)
    sizes = {"dp": 1, "tp": 2}
    configs = {
        "plan": plan.config,
        "whole": gt.ModelConfig(sizes, inputs=["..."]),  # each worker computes all
        "data parallel": gt.ModelConfig(sizes, inputs=["tp", "..."]),
    }
    predicted = {name: plan.evaluate(config).seconds for name, config in configs.items()}
    gt.shutdown()
    measured = {name: measure(config, make, batch) for name, config in configs.items()}
    for one in configs:
        for other in configs:
            if predicted[one] * 1.25 <= predicted[other]:
                assert measured[one] < measured[other], (predicted, measured)
    assert max(predicted.values()) >= 1.25 * min(predicted.values())
    print(predicted, measured)


def measure(config, make, x):
    """The shortest time of a step on two worker processes, as `gt.calibrate` measures: other programs may run."""
    registry.clear()
    gt.init(workers=2)
    registry.add(Config({}, config))
    step, times = make(), []
    for _ in range(30):
        start = time.perf_counter()
        step(x)
        gt.synchronize()
        times.append(time.perf_counter() - start)
    gt.shutdown()
    return min(times[3:])
