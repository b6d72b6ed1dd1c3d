"""Gathered copies of cut parameters are dropped after the forward and backward of their modules; values are torch's."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gt
from gt.client.gather_hooks import GatherHook, ModulePass

WORKERS, WIDTH, LAYERS, WORDS = 4, 32, 4, 64
FSDP = """
all: {shard: {mesh: {dp: 4}, dims: [dp]}}
model:
  mesh: {dp: 4}
  "*weight": [dp]
  "*bias": [dp]
  "*": all
"""
KEEPS = FSDP.replace("{shard", "{reshard_after_forward: false, shard", 1)


@pytest.fixture(autouse=True)
def fsdp(four_workers, no_signals, tmp_path):
    load(tmp_path, FSDP)


def load(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    gt.load_config(path)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the bias of keys has no gradient but noise
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """`recomputes`: None, or whether checkpoints of its blocks are reentrant."""

    def __init__(self, recomputes=None, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)
        return self.head(x)


def nbytes(module):
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def copies_of_workers(m):
    return {memory.live.copies for memory in m.workers.values()}


def most_copies(m):
    return max(memory.most_copies for memory in m.workers.values())


def step(model, optimizer, words):
    loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


MODELS = {
    "plain": {},
    "checkpoints": {"recomputes": False},
    "reentrant checkpoints": {"recomputes": True},
    "tied": {"tied": True},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_training_equals_torchs_and_holds_at_most_two_layers(options):
    plain = GPT(**options)
    ours = gt.to(copy.deepcopy(plain))
    data = torch.randint(0, WORDS, (3, 8, 16))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, ours)]
    expected = [step(plain, optimizers[0], words) for words in data]
    with gt.debug.memory() as m:
        losses = [step(ours, optimizers[1], gt.to(words)) for words in data]
    assert losses == pytest.approx(expected, rel=1e-4)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        # an AdamW step divides small gradients by their own size, and with them their rounding
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4, msg=name)
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert 0 < most_copies(m) <= 2 * nbytes(plain.blocks[0])
    assert copies_of_workers(m) == {0}


def test_the_peak_is_the_shards_two_layers_and_the_activations():
    model = gt.to(GPT())
    words = gt.to(torch.randint(0, WORDS, (8, 16)))
    model(words)
    with gt.debug.memory() as m:
        model(words).sum().backward()
    shards = 2 * nbytes(model) // WORKERS  # parameters and their gradients
    for memory in m.workers.values():
        before = next(line for line in memory.lines if line.line == "before")
        activations = memory.peak.originals - shards
        assert before.peak.originals <= shards
        assert memory.peak.total <= shards + 2 * nbytes(model.blocks[0]) + activations
        assert memory.most_copies < nbytes(model) / 3


def test_weights_are_gathered_once_more_for_backward(tmp_path):
    words = torch.randint(0, WORDS, (8, 16))
    gathered = []
    for plan in (FSDP, KEEPS):
        load(tmp_path, plan)
        model = gt.to(GPT())
        with gt.debug.comm() as forward:
            loss = model(words).sum()
        with gt.debug.comm() as backward:
            loss.backward()
        gathered.append([sum(e.bytes for e in c.events if e.kind == "all-gather") for c in (forward, backward)])
    once = (WORKERS - 1) * nbytes(model.blocks)
    (forward, backward), (forward_kept, backward_kept) = gathered
    assert forward == forward_kept >= once
    assert backward_kept == 0
    assert 0.9 * once < backward <= forward


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_layer_that_is_computed_again_is_gathered_for_both(is_reentrant):
    """Its forward inside backward and its backward use one copy."""
    model, words = gt.to(GPT(is_reentrant)), torch.randint(0, WORDS, (8, 16))
    loss = model(words).sum()
    with gt.debug.comm() as c:
        loss.backward()
    gathered = sum(event.bytes for event in c.events if event.kind == "all-gather")
    assert gathered <= (WORKERS - 1) * nbytes(model)


def test_copies_stay_where_the_signal_says_so(tmp_path):
    load(tmp_path, KEEPS)
    model = gt.to(GPT())
    with gt.debug.memory() as m, torch.no_grad():
        model(torch.randint(0, WORDS, (8, 16)))
    assert copies_of_workers(m) == {nbytes(model)}


def test_a_scope_around_a_module_decides_for_it(tmp_path):
    load(tmp_path, FSDP + '  "1": keeps\nkeeps: {reshard_after_forward: false}\n')
    model = gt.to(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]))
    with gt.debug.memory() as m:
        loss = model[1](model[0](torch.ones(8, 8)))
    assert copies_of_workers(m) == {nbytes(model[1])}
    gt.register_config("outside", gt.SignalConfig(reshard_after_forward=False))
    with gt.debug.memory() as m, gt.signal.context("outside"):
        model[2](loss)
    assert copies_of_workers(m) == {nbytes(model[1]) + nbytes(model[2])}


def test_inference_keeps_no_copies():
    model = gt.to(GPT())
    with gt.debug.memory() as m, torch.no_grad():
        model(torch.randint(0, WORDS, (8, 16)))
    assert copies_of_workers(m) == {0}
    assert most_copies(m) <= nbytes(model.blocks[0])


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        functional.linear(x, self.inner.weight)
        raise KeyError("inside")


def test_a_module_that_raises_keeps_no_copies():
    model = gt.to(Raises())
    with gt.debug.memory() as m, pytest.raises(KeyError):
        model(torch.ones(8, 8))
    assert copies_of_workers(m) == {0} and most_copies(m) == 8 * 8 * 4


def test_a_backward_that_raises_keeps_copies_until_the_next_one():
    model = gt.to(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    x = torch.ones(8, 8)

    def fail(gradient):
        raise KeyError("inside")

    with gt.debug.memory() as m:
        hidden = model[0](x)
        hidden.register_hook(fail)
        with pytest.raises(KeyError):
            model[1](hidden).square().sum().backward()
        model(x).square().sum().backward()
    assert copies_of_workers(m) == {0}


def test_frozen_weights_are_dropped_in_backward():
    plain = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    for layer in plain[1:]:
        layer.requires_grad_(False)
    model = gt.to(copy.deepcopy(plain))
    x = torch.randn(8, 16)
    with gt.debug.memory() as m:
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.cpu(), plain[0].weight.grad, rtol=1e-4, atol=1e-5)
    assert copies_of_workers(m) == {0}
    assert most_copies(m) <= 2 * nbytes(plain[0])


class Attention(nn.Module):
    """Its attention uses the weight of a module that is never called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.attention(x, x, x, need_weights=False)[0])


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(torch.relu_(self.layer(x)))


@pytest.mark.parametrize("make", [Attention, Repeated], ids=lambda make: make.__name__)
def test_modules_of_other_shapes_have_torchs_gradients_and_keep_no_copies(make):
    plain = make()
    model = gt.to(copy.deepcopy(plain))
    x = torch.randn(8, 4, 16)
    plain(x).square().sum().backward()
    with gt.debug.memory() as m:
        model(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
    assert copies_of_workers(m) == {0}


def test_a_copied_model_drops_its_own_copies():
    model = copy.deepcopy(gt.to(nn.Sequential(nn.Linear(8, 8))))
    with gt.debug.memory() as m:
        model(torch.ones(8, 8))
    assert copies_of_workers(m) == {0} and most_copies(m) > 0


def test_the_copy_of_a_model_that_has_run_does_not_gather_for_it():
    model = gt.to(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model(torch.ones(8, 8))
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    first, second = copy_hooks_of(other)
    assert not first.following and {hook.number(ModulePass.FORWARD) for hook in (first, second)}.isdisjoint(
        hook.number(ModulePass.FORWARD) for hook in copy_hooks_of(model)
    )


def copy_hooks_of(model):
    return [hook for part in model for hook in part._forward_hooks.values() if isinstance(hook, GatherHook)]


def exchanged(act):
    """The numbers of tensors that are gathered together."""
    with gt.debug.comm() as c:
        act()
    return [event.tensors for event in c.events if event.kind == "all-gather"]


def test_the_parameters_of_a_module_are_gathered_together():
    model = gt.to(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)))
    x = gt.to(torch.ones(8, 8, requires_grad=True))
    one_by_one = exchanged(lambda: model(x).sum().backward())
    together = exchanged(lambda: model(x).sum().backward())
    assert together[:3] == [2, 2, 1]
    assert sum(together) == sum(one_by_one) == len(one_by_one)


def test_a_module_that_takes_another_way_has_torchs_values():
    """The parameters of the module that followed last time were gathered for nothing, and are dropped."""
    plain = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
    model = gt.to(copy.deepcopy(plain))
    x = torch.randn(8, 16)
    with gt.debug.memory() as m:
        for order in ([0, 1, 2, 3], [0, 2, 1], [3, 3, 0], [1], [0, 1, 2, 3]):
            expected, ours = x, gt.to(x)
            for number in order:
                expected, ours = plain[number](expected), model[number](ours)
            expected.square().sum().backward()
            ours.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
    assert copies_of_workers(m) == {0}


def test_gathers_that_overlap_give_torchs_values(tmp_path, monkeypatch):
    """Over Gloo the parameters of the next module are gathered while a module computes."""
    gt.shutdown()
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=2)
    load(tmp_path, FSDP.replace("dp: 4", "dp: 2"))
    plain = GPT()
    model = gt.to(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    data = torch.randint(0, WORDS, (3, 8, 16))
    losses = [step(plain, optimizers[0], words) for words in data]
    assert [step(model, optimizers[1], gt.to(words)) for words in data] == pytest.approx(losses, rel=1e-4)
    with gt.debug.memory() as m:
        step(model, optimizers[1], gt.to(data[0]))
    step(plain, optimizers[0], data[0])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    assert 0 < most_copies(m) <= 2 * nbytes(plain.blocks[0])


def test_a_weight_that_is_loaded_into_a_module_on_gt_is_followed():
    weight = nn.Parameter(torch.ones(8, 8))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with gt.device():
        model[0].weight = weight
    assert str(model[0].weight.spec) == "dp, -"
    with gt.debug.memory() as m, gt.signal.context("all"):
        model(gt.ones(8, 8))
    assert copies_of_workers(m) == {0} and most_copies(m) > 0


def test_the_limit_holds_where_copies_are_kept(tmp_path, monkeypatch):
    gt.shutdown()
    monkeypatch.setenv("GT_COPY_LIMIT", str(nbytes(Block())))
    gt.init(workers=4, mode="virtual")
    load(tmp_path, KEEPS)
    plain = GPT()
    model = gt.to(copy.deepcopy(plain))
    words = torch.randint(0, WORDS, (8, 16))
    plain(words).sum().backward()
    with gt.debug.memory() as m:
        model(words).sum().backward()
    assert nbytes(Block()) / 2 < most_copies(m) <= nbytes(Block())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)


class Cast(nn.Linear):
    def forward(self, x):
        return functional.linear(x.half(), self.weight.half(), self.bias.to(torch.float16)).float()


class Transposed(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t().contiguous() + self.bias


class Scaled(nn.Linear):
    def forward(self, x):
        return functional.linear(x, functional.normalize(self.weight, dim=1) * 2, self.bias)


class Normed(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(*sizes))

    def forward(self, x):
        return self.inner(x)


DERIVED = [nn.Linear, Cast, Transposed, Scaled, Normed]


@pytest.mark.parametrize("kind", DERIVED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("autocast", [False, True])
def test_copies_of_what_is_computed_of_weights_are_dropped_with_theirs(kind, autocast, tmp_path):
    load(tmp_path, FSDP.replace("*weight", "*weight*"))  # those of parametrizations too
    plain = nn.Sequential(*[kind(64, 64) for _ in range(6)])
    model = gt.to(copy.deepcopy(plain))
    x = torch.randn(8, 64)
    for run in (plain, model):
        with gt.debug.memory() as m, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for _ in range(2):  # autocast keeps the casts of the first run
                run(x).float().square().sum().backward()
    assert copies_of_workers(m) == {0}
    assert 0 < most_copies(m) <= 2.2 * nbytes(plain[0])
    tolerance = 2e-2 if autocast or kind is Cast else 1e-4
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad.cpu(), theirs.grad, rtol=tolerance, atol=tolerance * theirs.grad.abs().max().item()
        )


@pytest.mark.parametrize("plan", [FSDP, FSDP.replace('"*": all', "inputs: [dp, ...]")], ids=["scope", "inputs"])
def test_inference_under_autocast_keeps_no_casts(plan, tmp_path):
    load(tmp_path, plan)
    model = gt.to(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]))
    x = gt.to(torch.ones(8, 64))
    with gt.debug.memory() as m, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)
        model(x)
    assert copies_of_workers(m) == {0}
    assert 0 < most_copies(m) <= nbytes(model[0])


def test_casts_of_weights_are_gathered_once_more_for_backward():
    model = gt.to(GPT())
    words = torch.randint(0, WORDS, (8, 16))
    with torch.autocast("cpu", torch.bfloat16):
        with gt.debug.comm() as forward:
            loss = model(words).float().sum()
        with gt.debug.comm() as backward:
            loss.backward()
    first, again = [sum(e.bytes for e in c.events if e.kind == "all-gather") for c in (forward, backward)]
    assert 0 < again <= first <= (WORKERS - 1) * nbytes(model) * 0.6


def test_tensors_that_are_computed_of_weights_are_not_kept_for_it():
    model = gt.to(nn.Linear(8, 8))
    for _ in range(64):
        model.weight.half()
    assert len(model.weight._ref.storage.derived) < 8


def test_steps_under_autocast_hold_the_casts_of_one_layer():
    """Repeated ops are segments, which free dead tensors where they are used last."""
    model = gt.to(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = gt.to(torch.randint(0, WORDS, (8, 16)))
    for _ in range(4):
        with gt.debug.memory() as m, torch.autocast("cpu", torch.bfloat16):
            step(model, optimizer, words)
        assert most_copies(m) <= nbytes(model.blocks[0])
