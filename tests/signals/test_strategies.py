"""The strategies of the documentation: torch's numbers, and the documented bytes and collectives."""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import gt
from gt import ShardConfig, SignalConfig
from tests.subprocesses import ROOT

SIGNALS = ROOT / "examples" / "signals"
ALL = [0, 1, 2, 3]
GRID = {"mesh": {"dp": 2, "tp": 2}, "workers": ALL}
ONE_NUMBER = 24  # bytes to sum one number over four workers


def configure(name, axis=None, workers=ALL, backward=None, **shard):
    gt.register_config(name, SignalConfig(ShardConfig(axis, workers, **shard), backward))


def kinds(comm, above=0):
    return [event.kind for event in comm.events if event.bytes > above]


def reductions(comm):
    return [kind for kind in kinds(comm, ONE_NUMBER) if kind in ("all-reduce", "reduce-scatter")]


def close(ours, theirs):
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


# Data parallel


def train(model, x, y, steps, make=torch.optim.SGD):
    """The losses, and the communication of each step."""
    optimizer = make(model.parameters(), lr=0.05)
    losses, moved = [], []
    for _ in range(steps):
        with gt.debug.comm() as comm:
            with gt.signal.context("forward_pass"):
                loss = functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            with gt.signal.context("parameter_updates"):
                optimizer.step()
        losses.append(loss.item())
        moved.append(comm)
    return losses, moved


@pytest.fixture
def data_parallel(four_workers):
    gt.load_config(SIGNALS / "data_parallel.yaml")
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    x, y = torch.randn(32, 16), torch.randn(32, 8)
    return plain, gt.to(copy.deepcopy(plain)), x, y


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_data_parallel_training_equals_training_on_one_device(data_parallel, make):
    plain, ours, x, y = data_parallel
    losses, _ = train(ours, gt.to(x), gt.to(y), 5, make)
    expected, _ = train(plain, x, y, 5, make)
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        close(mine, theirs)


def test_weights_are_broadcast_once_and_the_batch_is_cut_once(data_parallel):
    _, ours, x, y = data_parallel
    _, (first, *later) = train(ours, gt.to(x), gt.to(y), 3)
    assert (first.count("broadcast"), first.count("scatter")) == (4, 2)
    sizes = sorted(event.bytes for event in first.events if event.kind == "broadcast")
    assert sizes == sorted(3 * parameter.numel() * 4 for parameter in ours.parameters())
    assert [comm.count(kind) for comm in later for kind in ("broadcast", "scatter")] == [0] * 4
    assert all(parameter.spec.is_whole and parameter.spec.mesh.size == 4 for parameter in ours.parameters())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_each_gradient_is_reduced_once_in_a_step(data_parallel, make):
    _, ours, x, y = data_parallel
    _, moved = train(ours, gt.to(x), gt.to(y), 3, make)
    assert [reductions(comm) for comm in moved] == [["all-reduce"]] * 3
    assert [event.tensors for comm in moved for event in comm.events if event.op == "optimizer"] == [4, 4, 4]


def test_a_step_moves_what_an_all_reduce_of_the_gradients_moves(data_parallel):
    _, ours, x, y = data_parallel
    _, moved = train(ours, gt.to(x), gt.to(y), 2)
    assert moved[1].bytes == sum(2 * 3 * parameter.numel() * 4 for parameter in ours.parameters())


# Model parallel


def test_weights_by_features_are_512_of_1024_on_each_worker(four_workers):
    gt.load_config(SIGNALS / "model_parallel.yaml")
    with gt.signal.context("features"):
        w = gt.randn(64, 1024)
        y = gt.to(torch.randn(8, 64)) @ w
    for tensor in (w, y):
        assert {worker: part.shape[1] for worker, part in tensor.shards().items()} == {0: 512, 1: 512}


def two_layers(x, w1, w2, scope):
    with gt.signal.context("features"):
        hidden = torch.relu(x @ w1)
    if not scope:
        return hidden @ w2
    with gt.signal.context(scope):
        return hidden @ w2


@pytest.mark.parametrize(
    ("second", "scope", "forward", "backward"),
    [
        ("features", "features", {"all-gather": 8 * 1024 * 4}, {"reduce-scatter": 8 * 1024 * 4}),
        ("inner_features", None, {"all-reduce": 2 * 8 * 64 * 4}, {}),
    ],
)
def test_two_layers_by_features(four_workers, second, scope, forward, backward):
    gt.load_config(SIGNALS / "model_parallel.yaml")
    plain = [torch.randn(8, 64), torch.randn(64, 1024) / 8, torch.randn(1024, 64) / 32]
    ours = [
        gt.replicate(plain[0], gt.mesh(2, ["w"])),
        gt.signal.tensor(plain[1], "features").requires_grad_(),
        gt.signal.tensor(plain[2], second).requires_grad_(),
    ]
    with gt.debug.comm() as comm:
        result = two_layers(*ours, scope).square()
    assert {event.kind: event.bytes for event in comm.events} == forward
    with gt.debug.comm() as comm:
        result.sum().backward()
    assert {event.kind: event.bytes for event in comm.events if event.bytes > ONE_NUMBER} == backward
    own = [tensor.requires_grad_() for tensor in plain]
    two_layers(*own, None).square().sum().backward()
    for mine, theirs in zip(ours[1:], own[1:], strict=True):
        assert mine.grad.spec is mine.spec  # nothing moves for the update either
        close(mine.grad, theirs.grad)


# Pipeline


def test_stages_and_their_gradients_are_where_the_signals_say(four_workers):
    gt.load_config(SIGNALS / "pipeline.yaml")
    plain = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    stages, x = gt.to(copy.deepcopy(plain)), torch.randn(8, 6)
    with gt.signal.context("stage_1"):
        hidden = stages[0](gt.to(x)).tanh()
    with gt.debug.comm() as comm, gt.signal.context("stage_2"):
        outputs = stages[1](hidden).tanh()
    assert {pair: comm.pairs.get(pair, 0) for pair in [(0, 2), (1, 3), (0, 3), (1, 2)]} == {
        (0, 2): 4 * 6 * 4, (1, 3): 4 * 6 * 4, (0, 3): 0, (1, 2): 0,
    }  # fmt: skip
    weights = [stages[0].weight, stages[1].weight]
    gradients = torch.autograd.grad(outputs.square().sum(), [*weights, hidden])
    found = [tensor.spec.mesh.workers for tensor in (hidden, outputs, *gradients)]
    assert found == [(0, 1), (2, 3), (2, 3), (0, 1), (0, 1)]
    expected = plain[1](plain[0](x).tanh()).tanh()
    close(outputs, expected)
    for mine, weight in zip(gradients, plain, strict=False):
        close(mine, torch.autograd.grad(expected.square().sum(), weight.weight, retain_graph=True)[0])


# Hybrid


def test_layer_one_by_rows_and_layer_two_by_features(four_workers):
    gt.load_config(SIGNALS / "hybrid.yaml")
    x, w1, w2 = torch.randn(8, 6), torch.randn(6, 12), torch.randn(12, 16)
    ours = [gt.to(w1).requires_grad_(), gt.signal.tensor(w2, "layer_2").requires_grad_()]
    with gt.signal.context("layer_1"):
        hidden = torch.relu(gt.to(x) @ ours[0])
    with gt.debug.comm() as comm, gt.signal.context("layer_2"):
        y = hidden @ ours[1]
    assert [str(tensor.spec) for tensor in (hidden, *ours, y)] == ["w, -", "-, -", "-, w", "-, w"]
    assert [(event.kind, event.bytes) for event in comm.events] == [("all-gather", 3 * 8 * 12 * 4)]
    y.square().sum().backward()
    own = [w1.requires_grad_(), w2.requires_grad_()]
    (torch.relu(x @ own[0]) @ own[1]).square().sum().backward()
    for mine, theirs in zip(ours, own, strict=True):
        close(mine.grad, theirs.grad)


def test_rows_and_features_along_the_axes_of_a_mesh(four_workers):
    gt.load_config(SIGNALS / "hybrid.yaml")
    x, w1, w2 = torch.randn(8, 6), torch.randn(6, 12), torch.randn(12, 16)
    ours = [gt.to(w1).requires_grad_(), gt.signal.tensor(w2, "columns").requires_grad_()]
    with gt.signal.context("batch"):
        hidden = torch.relu(gt.to(x) @ ours[0])
        with gt.debug.comm() as comm:
            y = hidden @ ours[1]
    assert [str(tensor.spec) for tensor in (hidden, *ours, y)] == ["dp, -", "-, -", "-, tp", "dp, tp"]
    assert comm.bytes == 0
    assert {part.shape for part in y.shards().values()} == {(4, 8)}
    y.square().sum().backward()
    own = [w1.requires_grad_(), w2.requires_grad_()]
    (torch.relu(x @ own[0]) @ own[1]).square().sum().backward()
    for mine, theirs in zip(ours, own, strict=True):
        close(mine.grad, theirs.grad)


# Products and sums

SMALL = 16 * 16 * 4


@pytest.mark.parametrize(
    ("left", "right", "result", "moved"),
    [
        ("rows 64 16", "everywhere 16 16", "w, -", {}),
        ("rows 64 16", "columns 16 16", "w, -", {"all-gather": 3 * SMALL}),
        ("rows 16 16", "columns 16 64", "-, w", {"all-gather": 3 * SMALL}),
        ("columns 16 16", "rows 16 16", "-, - + w", {}),
    ],
)
def test_a_product_moves_the_fewest_bytes(four_workers, left, right, result, moved):
    gt.load_config(SIGNALS / "distributed_matmul.yaml")
    operands = []
    for text in (left, right):
        signal, *shape = text.split()
        with gt.signal.context(signal):
            operands.append(gt.randn(*map(int, shape)))
    with gt.debug.comm() as comm:
        product = operands[0] @ operands[1]
    assert str(product.spec) == result
    assert {event.kind: event.bytes for event in comm.events} == moved
    assert comm.bytes == sum(moved.values())
    close(product, operands[0].cpu() @ operands[1].cpu())


def test_a_partial_product_is_reduced_when_it_is_used_and_only_then(four_workers):
    gt.load_config(SIGNALS / "distributed_matmul.yaml")
    with gt.signal.context("columns"):
        a = gt.randn(16, 16)
    with gt.signal.context("rows"):
        b = gt.randn(16, 16)
    product = a @ b
    with gt.debug.comm() as first:
        used = product.relu()
    with gt.debug.comm() as second:
        product.exp()
    assert [(event.kind, event.bytes) for event in first.events] == [("all-reduce", 2 * 3 * SMALL)]
    assert second.bytes == 0
    close(used, (a.cpu() @ b.cpu()).relu())


@pytest.mark.parametrize("rows", [10, 3, 1, 0])
def test_sums_and_means_of_uneven_shards(four_workers, rows):
    gt.load_config(SIGNALS / "distributed_matmul.yaml")
    with gt.signal.context("rows"):
        x = gt.randn(rows, 6)
    here = x.cpu()
    for work in (torch.sum, lambda t: t.sum(0), lambda t: t.mean(1), lambda t: t.sum(1, keepdim=True)):
        close(work(x), work(here))
    if rows:
        close(x.mean(), here.mean())
        close(x.mean(0), here.mean(0))


# Dynamic configuration


def test_a_step_is_configured_by_the_size_of_its_batch(four_workers):
    plain = nn.Linear(6, 4)
    ours = gt.to(copy.deepcopy(plain))
    found = []
    for size in (64, 2, 32, 3):
        configure("step", 0, ALL if size >= 32 else [0])
        x = torch.randn(size, 6)
        with gt.signal.context("step"):
            y = ours(gt.to(x))
        close(y, plain(x))
        found.append(y.spec.mesh.workers)
    assert found == [(0, 1, 2, 3), (0,), (0, 1, 2, 3), (0,)]


# A third-party model by YAML alone


@pytest.fixture(scope="module")
def gpt2():
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.syspath_prepend(str(SIGNALS))
        return importlib.import_module("gpt2_by_yaml")


PLANS = ["data_parallel", "tensor_parallel", "pipeline", "fsdp", "mesh", None]


def train_by(gpt2, plan):
    if plan is not None:
        gt.load_config(SIGNALS / f"gpt2_{plan}.yaml")
    torch.manual_seed(0)
    model, batches = gpt2.make_model(), gpt2.make_batches(5)
    expected = gpt2.train(copy.deepcopy(model), batches)
    ours = gt.to(model)
    assert gpt2.train(ours, batches) == pytest.approx(expected, abs=1e-5)
    return ours


@pytest.mark.parametrize("plan", PLANS)
def test_gpt2_gives_the_losses_of_torch_under_every_plan(four_workers, gpt2, plan):
    train_by(gpt2, plan)


def test_gpt2_gives_the_losses_of_torch_on_two_processes(gpt2):
    gt.init(workers=2)
    try:
        train_by(gpt2, "fsdp")
    finally:
        gt.shutdown()


def layouts(model):
    return {name: f"{p.spec} on {' '.join(map(str, p.spec.mesh.workers))}" for name, p in model.named_parameters()}


def test_gpt2_plans_lay_out_what_they_name(four_workers, gpt2):
    gt.load_config(SIGNALS / "gpt2_tensor_parallel.yaml")
    found = layouts(gt.to(gpt2.make_model()))
    assert found["transformer.h.1.mlp.c_fc.weight"] == "-, tp on 0 1"
    assert found["transformer.h.1.mlp.c_fc.bias"] == "tp on 0 1"
    assert found["transformer.h.1.mlp.c_proj.weight"] == "tp, - on 0 1"
    assert found["transformer.h.1.attn.c_proj.weight"] == "-, - on 0 1"
    gt.load_config(SIGNALS / "gpt2_fsdp.yaml")
    assert {text.partition(" on")[0] for text in layouts(gt.to(gpt2.make_model())).values()} == {"dp", "dp, -"}


def test_the_layers_of_a_pipeline_are_on_their_workers(four_workers, gpt2):
    gt.load_config(SIGNALS / "gpt2_pipeline.yaml")
    model = gt.to(gpt2.make_model())
    ids = torch.randint(0, gpt2.VOCABULARY, (4, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name.split(".")[2]: text[-1] for name, text in layouts(model).items() if ".h." in name}
    assert found == {"0": "0", "1": "1"}
    with gt.debug.comm() as comm:
        model(input_ids=ids, labels=ids)
    activation = 4 * 8 * 32 * 4
    assert [event.bytes for event in comm.events if event.bytes == activation] == [activation]
    assert comm.pairs[0, 1] >= activation


# The modules that a pattern applies to


def test_a_pattern_holds_for_what_is_inside_unless_a_later_one_does(four_workers, tmp_path):
    configure("one", 0, [0, 1])
    configure("two", 0, [2, 3])
    (tmp_path / "plan.yaml").write_text('model: {"*": two, "body.0": one}')
    gt.load_config(tmp_path / "plan.yaml")
    model = gt.to(nn.ModuleDict({"body": nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])}))
    x = gt.to(torch.randn(4, 4))
    assert [layer(x).spec.mesh.workers for layer in model["body"]] == [(0, 1), (2, 3)]


def test_a_pattern_for_a_list_of_modules_holds_for_those_in_it(four_workers, tmp_path):
    configure("one", 0, [0, 1])
    (tmp_path / "plan.yaml").write_text("model: {layers: one}")
    gt.load_config(tmp_path / "plan.yaml")
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4)])
    assert gt.to(model).layers[0](gt.to(torch.randn(4, 4))).spec.mesh.workers == (0, 1)
