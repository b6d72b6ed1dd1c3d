"""What belongs to a model that a plan lays out lies as the plan says, and its updates move nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gt

WIDTH = 32
DATA_PARALLEL = 'all: {shard: {axis: 0}}\nmodel: {"*": all}\n'
FULLY_SHARDED = """
all: {shard: {mesh: {dp: 4}, dims: [dp]}}
model: {mesh: {dp: 4}, "*weight": [dp], "*bias": [dp], "*": all}
"""
TENSOR_PARALLEL = 'model: {mesh: {tp: 4}, "0.weight": [tp, -], "0.bias": [tp], "2.weight": [-, tp]}\n'
PLANS = {"data": DATA_PARALLEL, "fully sharded": FULLY_SHARDED, "tensor": TENSOR_PARALLEL}


@pytest.fixture(autouse=True)
def plans(four_workers, no_signals):
    pass


def load(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    gt.load_config(path)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def train(model, optimizer):
    model(gt.to(torch.randn(8, WIDTH))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(act):
    with gt.debug.comm() as c:
        act()
    return c.bytes


def layouts(module):
    return [(str(tensor.spec), tensor.spec.mesh.workers) for tensor in (*module.parameters(), *module.buffers())]


class Averaged(AveragedModel):
    def update(self, model):
        self.update_parameters(model)


class MovingAverage(nn.Module):
    """As torch_ema and timm do it."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.sub_((mine - theirs).mul_(0.1))


COPIES = {
    "swa": Averaged,
    "ema": lambda model: Averaged(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "by hand": MovingAverage,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("plan", PLANS)
def test_copies_made_before_the_first_step_lie_as_their_parameters(tmp_path, plan, make):
    load(tmp_path, PLANS[plan])
    model = gt.to(mlp())
    average = make(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train(model, optimizer)
        assert moved(lambda: average.update(model)) <= 64  # the count of averaged models is sent to all workers
    assert layouts(average.module) == layouts(model)


def test_without_a_mesh_parameters_lie_whole_where_their_modules_cut_batches(tmp_path):
    load(
        tmp_path,
        "rows: {shard: {axis: 0}}\nlast: {shard: {axis: -1}}\nstage: {shard: {replicate: true, workers: [1]}}\n"
        'quick: {compile: true}\nmodel: {"*": rows, "1": last, "2": stage, "3": quick, "4": nowhere}\nnowhere: {}\n',
    )
    model = gt.to(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]))
    assert [(str(part.weight.spec), part.weight.spec.mesh.workers) for part in model] == [
        ("-, -", (0, 1, 2, 3)), ("-, -", model[1].weight.spec.mesh.workers), ("-, -", (1,)), ("-, -", (0, 1, 2, 3)),
    ]  # fmt: skip
    assert len(model[1].weight.spec.mesh.workers) == 1  # its first use decides


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.body(x) * self.scale


def test_under_data_parallel_nothing_becomes_cut(tmp_path):
    load(tmp_path, DATA_PARALLEL)
    model = gt.to(Convolutional())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(gt.to(torch.randn(8, 2, 8, 8))).square().mean().backward()
        optimizer.step()
    states = [
        value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, gt.Tensor)
    ]
    assert len(states) == 2 * len(list(model.parameters()))
    for tensor in (*model.parameters(), *model.buffers(), *states, *[p.grad for p in model.parameters()]):
        assert tensor.spec.is_whole and tensor.spec.mesh.size == 4


def test_a_gradient_scaler_moves_no_gradient(tmp_path):
    load(tmp_path, DATA_PARALLEL)
    model, scaler = gt.to(mlp()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    for _ in range(2):
        scaler.scale(model(gt.to(torch.randn(8, WIDTH))).square().mean()).backward()
        with gt.debug.comm() as c:
            scaler.step(optimizer)
            scaler.update()
        assert sum(event.bytes for event in c.events if event.kind == "all-reduce") == 6 * nbytes
        assert sum(event.bytes for event in c.events if event.kind != "all-reduce") <= 64
        optimizer.zero_grad()


def adapter(width):
    return nn.Sequential(nn.Linear(width, 4, bias=False), nn.Linear(4, width))


@pytest.mark.parametrize("plan", PLANS)
def test_a_module_that_is_registered_later_gets_the_layout_of_the_plan(tmp_path, plan):
    """As if it had been there when the model was moved."""
    load(tmp_path, PLANS[plan] if plan != "tensor" else 'model: {mesh: {tp: 4}, "*.weight": [tp]}')
    early, late = mlp(), gt.to(mlp())
    parts = {"3": nn.Linear(WIDTH, 8), "4": adapter(8)}
    for name, part in parts.items():
        early.add_module(name, copy.deepcopy(part))
        late.add_module(name, part)
    gt.to(early)
    assert layouts(late) == layouts(early)
    x = torch.randn(8, WIDTH)
    for model in (early, late):
        with gt.debug.memory() as m:
            model(x).square().mean().backward()
        if plan == "fully sharded":
            assert {memory.live.copies for memory in m.workers.values()} == {0}
    for mine, theirs in zip(late[3:].parameters(), early[3:].parameters(), strict=True):
        assert (mine.grad.shape, str(mine.grad.spec)) == (theirs.grad.shape, str(theirs.grad.spec))


class Tuned(nn.Module):
    """A layer with an adapter, which takes its place in a model, as those of peft."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.down(x).sum(-1, keepdim=True)


def test_a_layer_that_is_wrapped_keeps_its_layout(tmp_path):
    load(tmp_path, TENSOR_PARALLEL)
    model = gt.to(mlp())
    model[0] = Tuned(model[0])
    assert [str(p.spec) for p in model[0].parameters()] == ["tp, -", "tp", "-, -"]
    assert model[0].down.weight.spec.mesh.size == 4


def test_a_tied_parameter_of_a_new_head_keeps_its_layout(tmp_path):
    load(tmp_path, 'model: {mesh: {tp: 4}, "0.weight": [tp]}')
    model = gt.to(nn.Sequential(nn.Embedding(64, 8)))
    head = nn.Linear(8, 64, bias=False)
    head.weight = model[0].weight
    model.append(head)
    assert model[1].weight is model[0].weight and str(model[1].weight.spec) == "tp, -"


def test_modules_of_models_without_a_plan_are_left_where_they_are(tmp_path):
    model = gt.to(mlp())
    load(tmp_path, TENSOR_PARALLEL)
    model.append(nn.Linear(WIDTH, 8))
    assert model[3].weight.spec.mesh.size == 1


@pytest.mark.parametrize("make", [torch.ones, gt.ones], ids=["plain", "gt"])
def test_a_resized_parameter_is_cut_as_before(tmp_path, make):
    load(tmp_path, FULLY_SHARDED)
    model = gt.to(nn.Sequential(nn.Embedding(64, 8)))
    model[0].weight.data = make(70, 8)
    assert str(model[0].weight.spec) == "dp, -" and model[0].weight.shape == (70, 8)
    assert torch.equal(model(torch.tensor([69])).cpu(), torch.ones(1, 8))


def test_a_layout_that_the_program_gives_to_data_counts(tmp_path):
    load(tmp_path, FULLY_SHARDED)
    weight = gt.to(nn.Linear(8, 8)).weight
    weight.data = weight.data.redistribute(placements="-, dp")
    assert str(weight.spec) == "-, dp"


@pytest.mark.parametrize("make", [torch.ones, gt.ones], ids=["plain", "gt"])
def test_a_parameter_that_is_registered_later_gets_the_layout_of_the_plan(tmp_path, make):
    load(tmp_path, FULLY_SHARDED)
    model = gt.to(nn.Sequential(nn.Linear(8, 8)))
    model[0].weight = nn.Parameter(make(8, 8))
    model[0].register_parameter("gate", nn.Parameter(make(8)))
    model[0].register_buffer("side_bias", torch.ones(8))
    model[0].register_buffer("cache", None)
    model[0].cache = results = gt.ones(8)
    assert [str(t.spec) for t in (model[0].weight, model[0].gate, model[0].side_bias)] == ["dp, -", "-", "dp"]
    assert model[0].cache is results and results.spec.mesh.size == 1
    with gt.debug.memory() as m:
        model(torch.ones(8, 8))
    assert {memory.live.copies for memory in m.workers.values()} == {0}
    for tensor in (model[0].gate, model[0].weight):
        assert tensor.spec.mesh.size == 4
