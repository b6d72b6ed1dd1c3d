"""What belongs to a parameter lies as it does: loaded, moved, made and converted."""

import copy
import io
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

import gt
from gt.client.parameter_layouts import layout_beside

PLANS = {
    "fully sharded": 'mesh: {dp: 4}, inputs: [dp], "*weight": [dp], "*bias": [dp]',
    "data parallel": "mesh: {dp: 4}, inputs: [dp]",
    "tensor parallel": 'mesh: {tp: 4}, "up.weight": [tp], "up.bias": [tp], "down.weight": [null, tp]',
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


@pytest.fixture
def load(four_workers, no_signals, tmp_path):
    def load(plan):
        path = tmp_path / "plan.yaml"
        path.write_text(f"model: {{{PLANS[plan]}}}")
        gt.load_config(path)

    return load


@pytest.fixture(params=PLANS)
def plan(request, load):
    load(request.param)
    return request.param


def made(optimizer=torch.optim.AdamW, steps=1):
    torch.manual_seed(0)
    model = gt.to(Model())
    made = optimizer(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, made)
    return model, made


def step(model, optimizer):
    """The bytes that a step moves."""
    x = torch.linspace(-1, 1, 128).view(8, 16)
    with gt.debug.comm() as comm:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return sum(event.bytes for event in comm.events)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def plain(value):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)


def layouts(model):
    return {name: value.spec for name, value in model.state_dict().items()}


def check_states(optimizer):
    """Every state lies as its parameter, in the dims that it has of it."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert isinstance(value, gt.Tensor) and value.spec is layout_beside(parameter, value.shape)


@pytest.mark.parametrize("convert", [lambda state: state, plain], ids=["from GT", "plain"])
def test_a_loaded_state_lies_as_its_parameters(plan, convert):
    model, optimizer = made(steps=2)
    moved = step(model, optimizer)
    state = saved(convert(optimizer.state_dict()))
    other, fresh = made(steps=0)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(torch.load(state))
    check_states(fresh)
    for _ in range(2):
        assert step(other, fresh) == step(model, optimizer) == moved
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name].cpu(), value.cpu())


def test_states_follow_parameters_to_another_plan(load):
    expected = {}
    for plan in PLANS:
        load(plan)
        model, optimizer = made(steps=2)
        expected[plan] = step(model, optimizer)
    for plan in [*PLANS, *reversed(PLANS)]:
        load(plan)
        gt.to(model)
        check_states(optimizer)
        assert all(parameter.grad.spec is parameter.spec for parameter in model.parameters())
        assert step(model, optimizer) == expected[plan]


def test_the_state_of_plain_parameters_follows_them(plan):
    model, optimizer = made(steps=3)
    torch.manual_seed(0)
    other = Model()
    early = torch.optim.AdamW(other.parameters(), lr=0.01)
    step(other, early)
    gt.to(other)
    check_states(early)
    step(other, early)
    check_states(early)
    assert step(other, early) == step(model, optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "LBFGS", "RMSprop", "Rprop", "SGD"])
def test_states_of_any_optimizer_lie_as_the_parameters(plan, name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    _, optimizer = made(lambda *args, **lr: getattr(torch.optim, name)(*args, **lr, **options), steps=0)
    model, optimizer = made(lambda *args, **lr: getattr(torch.optim, name)(*args, **lr, **options), steps=0)
    if name == "LBFGS":
        optimizer.step(lambda: model(torch.ones(8, 16)).square().mean())
        return
    step(model, optimizer)
    check_states(optimizer)


def test_a_users_optimizer_may_keep_a_plain_state(plan):
    class Custom(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["sums"] = [torch.zeros(parameter.shape)]
                state["sums"][0] += parameter.grad
                parameter -= 0.1 * state["sums"][0]

    model, optimizer = made(Custom, steps=2)
    assert all(state["sums"][0].spec is parameter.spec for parameter, state in optimizer.state.items())


@pytest.mark.parametrize("convert", [lambda state: state, plain], ids=["from GT", "plain"])
def test_assigned_tensors_lie_as_those_that_they_replace(plan, convert):
    model, _ = made()
    before = layouts(model)
    model.load_state_dict(torch.load(saved(convert(model.state_dict()))), assign=True)
    assert layouts(model) == before


def test_assigned_tensors_of_another_plan_lie_as_those_that_they_replace(load):
    load("fully sharded")
    state = saved(made()[0].state_dict())
    load("tensor parallel")
    model, _ = made()
    before = layouts(model)
    model.load_state_dict(torch.load(state), assign=True)
    assert layouts(model) == before


def test_tied_weights_may_be_tied_again(load):
    load("fully sharded")
    model = gt.to(Model())
    weight = model.up.weight
    before = weight.spec
    model.down.weight = nn.Parameter(gt.ones(32, 16))
    model.down.weight = weight
    assert model.down.weight is weight and weight.spec is before


def test_a_tensor_that_the_program_lays_out_itself_keeps_its_layout(four_workers, no_signals):
    model = gt.to(Model())
    spec = gt.ones(32, 16, mesh=gt.mesh(4), placements="axis0, -").spec
    model.up.weight = nn.Parameter(gt.distribute(torch.ones(32, 16), spec.mesh, "axis0, -"))
    assert model.up.weight.spec is spec


def test_module_cpu_and_dtypes_keep_layouts(plan):
    model, optimizer = made()
    before, held = layouts(model), [*model.parameters()]
    with gt.debug.comm() as comm:
        assert model.cpu() is model
    assert comm.bytes == 0
    assert layouts(model) == before and all(isinstance(value, gt.Tensor) for value in model.buffers())
    assert layouts(model.double()) == before
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    step(model.float(), optimizer)
    check_states(optimizer)


def test_plain_data_of_a_parameter_lies_as_its_data_before(plan):
    model, _ = made()
    before = model.up.weight.spec
    model.up.weight.data = torch.ones(32, 16)
    assert model.up.weight.spec is before and model.up.weight.cpu().all()


def test_a_saved_model_keeps_its_layouts(plan):
    model, optimizer = made(steps=2)
    loaded = torch.load(saved(model), weights_only=False)
    assert layouts(loaded) == layouts(model)
    other = torch.optim.AdamW(loaded.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (loaded, loaded, gt.to(loaded)):
        assert step(each, other) == step(model, optimizer)
    torch.testing.assert_close(loaded.up.weight.cpu(), model.up.weight.cpu())


def test_hooks_of_copied_and_loaded_models_are_not_doubled(plan):
    model, _ = made()
    counts = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    for other in (copy.deepcopy(model), torch.load(saved(model), weights_only=False), model):
        gt.to(other)
        assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in other.modules()] == counts


def test_layouts_in_a_file_may_name_workers_that_are_missing(four_workers, no_signals, caplog):
    file = saved(gt.shard(torch.arange(8.0), gt.mesh(4)))
    gt.shutdown()
    for workers in (2, 1):
        gt.init(workers=workers, mode="virtual")
        file.seek(0)
        with caplog.at_level(logging.WARNING, logger="gt.client"):
            loaded = torch.load(file)
        assert loaded.tolist() == list(range(8)) and loaded.spec.mesh.size == 1
        gt.shutdown()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "saved in layouts over workers [2, 3], which this session does not have (it has [0, 1])" in warning


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((8, 4), "x, y"), ((8,), "x"), ((4,), "y"), ((8, 1), "x, -"), ((1, 4), "-, y"), ((2,), None), ((8, 4, 1), None)],
)
def test_factored_states_lie_as_the_dims_that_they_have(four_workers, no_signals, shape, dims):
    mesh = gt.mesh((2, 2), ("x", "y"))
    parameter = nn.Parameter(gt.distribute(torch.ones(8, 4), mesh, "x, y"))
    found = layout_beside(parameter, shape)
    assert (None if found is None else str(found)) == dims


class Doubled(torch.nn.Module):
    def forward(self, original):
        return 2 * original

    def right_inverse(self, weight):
        return weight / 2


def test_a_plain_tensor_that_is_assigned_to_a_parametrized_weight_takes_its_layout():
    gt.init(workers=2, mode="virtual")
    layer = gt.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(gt.zeros(4, 4, mesh=gt.mesh((2,), ("x",)), placements="x, -"))
    parametrize.register_parametrization(layer, "weight", Doubled())
    layer.weight = torch.ones(4, 4)
    assert str(layer.parametrizations.weight.original.spec) == "x, -"
    assert torch.equal(layer.weight.cpu(), torch.ones(4, 4))
    gt.shutdown()
