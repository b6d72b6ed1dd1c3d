"""Plans of transformers: against those of people, run on virtual workers, and timed on processes. Slow tests."""

import time

import pytest
import torch

import gt
from gt.client import active_session
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
@pytest.mark.parametrize(("rows", "width"), [(1024, 512), (16, 1024), (256, 1024)])
def test_on_two_processes_plans_stand_in_the_predicted_order(rows, width, tmp_path):
    """Plans that the model predicts at least a quarter apart: for a large batch, for few rows and large weights, and
    for both alike."""
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
    configs = {"plan": plan.config, **plans_of_people({"dp": 1, "tp": 2})}
    predicted = {name: plan.evaluate(config).seconds for name, config in configs.items()}
    gt.shutdown()
    rounds = [{name: measure(config, make, batch) for name, config in configs.items()} for _ in range(2)]
    measured = {name: min(each[name] for each in rounds) for name in configs}
    print({name: (f"{predicted[name] * 1e3:.0f}", f"{measured[name] * 1e3:.0f}") for name in configs})
    apart = [(a, b) for a in configs for b in configs if predicted[a] * 1.25 <= predicted[b]]
    assert len(apart) >= 3
    for one, other in apart:
        assert measured[one] < measured[other], (one, other, predicted, measured)


def plans_of_people(sizes):
    rows = ["tp", "..."]
    columns = {"0.weight": ["tp", "-"], "0.bias": ["tp"], "2.weight": ["-", "tp"]}
    return {
        "whole": gt.ModelConfig(sizes, inputs=["..."]),  # each worker computes all
        "data parallel": gt.ModelConfig(sizes, inputs=rows),
        "tensor parallel": gt.ModelConfig(sizes, parameters=columns, inputs=["..."]),
        "fully sharded": gt.ModelConfig(sizes, parameters={"*": ["tp", "..."]}, inputs=rows, outputs={"*": rows}),
    }


def measure(config, make, x):
    """The shortest time of a step on two worker processes, as `gt.calibrate` measures: other programs may run."""
    registry.clear()
    gt.init(workers=2)
    registry.add(Config({}, config))
    step, times = make(), []
    for _ in range(20):
        start = time.perf_counter()
        step(x)
        gt.synchronize()
        times.append(time.perf_counter() - start)
    gt.shutdown()
    return min(times[3:])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "overlaps"), [("shared", False), ("gloo", True)])
def test_overlap_is_measured_where_exchanges_go_on_by_themselves(transport, overlaps, tmp_path, monkeypatch):
    monkeypatch.setenv("GT_TRANSPORT", transport)
    gt.init(workers=2)
    assert all(worker.overlaps == overlaps for worker in active_session.current().workers)
    machine = gt.calibrate(tmp_path / "calibration.json")
    print(machine)
    assert 0 <= machine.overlap <= 1 and (overlaps or machine.overlap == 0)
