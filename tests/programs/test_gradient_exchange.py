"""Training on several workers: torch's numbers, and one exchange of gradients in a step, whatever the optimizer."""

import collections
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import gt

VOCABULARY, WIDTH, LENGTH, BATCH = 24, 8, 6, 12
STEPS = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.attention(self.norm(x)).split(WIDTH, dim=-1)
        query, key, value = [part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in parts]
        x = x + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.outer(functional.gelu(self.inner(x)))


class GPT(nn.Module):
    """With tied weights, a frozen parameter, and one that no step uses."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        return self.head(self.blocks(x) * self.frozen)


def mlp():
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


def replicated(model, mesh):
    for parameter in model.parameters():
        parameter.data = gt.replicate(parameter.data, mesh)


def cut(model, mesh):
    for parameter in model.parameters():
        parameter.data = gt.shard(parameter.data, mesh)


def megatron(model, mesh):
    replicated(model, mesh)
    for block in model.blocks:
        block.inner.weight.data = gt.shard(block.inner.weight.data, mesh, dim=0)
        block.inner.bias.data = gt.shard(block.inner.bias.data, mesh)
        block.outer.weight.data = gt.shard(block.outer.weight.data, mesh, dim=1)


OPTIMIZERS = {
    f"{make.__name__} {'fused' if options.get('fused') else 'foreach' if options['foreach'] else 'plain'}": (
        make,
        options,
    )
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True})
}


def make_optimizer(name, parameters):
    make, options = OPTIMIZERS[name]
    return make(parameters, lr=0.05, **options)


def train(model, ids, labels, optimizer, *, micro=1, clip=0.0, set_to_none=True):
    """The losses, and the communication of each step."""
    losses, moved = [], []
    for _ in range(STEPS):
        with gt.debug.comm() as comm:
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(micro):
                loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / 50
                loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        losses.append(loss.detach())
        moved.append(comm)
    return [loss.item() for loss in losses], moved


def data(layout="dp, -", mesh=None):
    torch.manual_seed(1)
    ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))
    return (ids, labels) if mesh is None else [gt.distribute(part, mesh, layout) for part in (ids, labels)]


def check(make, name, lay_out=replicated, workers=2, layout="dp, -", **options):
    """Train a model with torch and on workers; returns what each step moved."""
    gt.init(workers=workers, mode="virtual")
    try:
        torch.manual_seed(0)
        plain = make()
        ours = gt.to(copy.deepcopy(plain))
        mesh = gt.mesh(workers, ("dp",))
        lay_out(ours, mesh)
        expected, _ = train(plain, *data(), make_optimizer(name, plain.parameters()), **options)
        found, moved = train(ours, *data(layout, mesh), make_optimizer(name, ours.parameters()), **options)
        assert found == pytest.approx(expected, rel=1e-3)
        for theirs, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-4)
            assert (parameter.grad is None) == (theirs.grad is None)
        return moved
    finally:
        gt.shutdown()


def gradient_bytes(make, workers):
    """What an all-reduce of all gradients moves."""
    sizes = [parameter.numel() for name, parameter in make().named_parameters() if name not in ("frozen", "unused")]
    return 2 * (workers - 1) * 4 * sum(sizes)


NUMBERS = 64  # bytes: smaller exchanges are of single numbers, such as the divisor of a loss


def kinds(comm):
    return dict(collections.Counter(event.kind for event in comm.events if event.bytes > NUMBERS))


def bytes_of_tensors(comm):
    """The events are exact: they add up to what the workers counted."""
    assert comm.bytes == sum(event.bytes for event in comm.events)
    return sum(event.bytes for event in comm.events if event.bytes > NUMBERS)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    ("make", "name"), [*[(mlp, name) for name in OPTIMIZERS], *[(GPT, f"AdamW {kind}") for kind in ("plain", "fused")]]
)
def test_data_parallel_steps_are_torchs_with_one_exchange(make, name, workers):
    moved = check(make, name, workers=workers)
    assert [kinds(comm) for comm in moved] == [{"all-reduce": 1}] * STEPS
    assert bytes_of_tensors(moved[-1]) == gradient_bytes(make, workers)


@pytest.mark.parametrize("options", [{"micro": 3}, {"clip": 0.1}, {"set_to_none": False}, {"micro": 2, "clip": 0.1}])
@pytest.mark.parametrize("make", [mlp, GPT])
def test_accumulated_and_clipped_gradients_are_exchanged_once(make, options):
    moved = check(make, "AdamW plain", workers=3, **options)
    assert [kinds(comm) for comm in moved] == [{"all-reduce": 1}] * STEPS
    assert bytes_of_tensors(moved[-1]) == gradient_bytes(make, 3)


LAYOUTS = {
    "data parallel": (replicated, "dp, -"),
    "fully sharded": (cut, "dp, -"),
    "tensor parallel": (megatron, "-, -"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", ["SGD", "AdamW"])
def test_fused_and_foreach_optimizers_move_what_the_plain_one_moves(make, layout):
    lay_out, batch = LAYOUTS[layout]
    plain, foreach, fused = [
        bytes_of_tensors(check(GPT, f"{make} {kind}", lay_out, layout=batch)[-1])
        for kind in ("plain", "foreach", "fused")
    ]
    assert foreach == fused == plain


def test_a_fused_optimizer_does_not_gather_for_a_gradient_in_another_layout():
    """A gradient that is cut, of a parameter that is whole: only the gradient is gathered."""
    moved = {}
    for kind in ("plain", "fused"):
        gt.init(workers=2, mode="virtual")
        mesh = gt.mesh(2)
        weights = [gt.replicate(torch.ones(8, 4), mesh).requires_grad_() for _ in range(2)]
        optimizer = make_optimizer(f"SGD {kind}", weights)
        for weight in weights:
            weight.grad = gt.shard(torch.ones(8, 4), mesh)
        with gt.debug.comm() as comm:
            optimizer.step()
        assert [str(weight.spec) for weight in weights] == ["-, -"] * 2
        torch.testing.assert_close(weights[0].detach().cpu(), torch.full((8, 4), 0.95))
        moved[kind] = comm.bytes
        gt.shutdown()
    assert moved["fused"] == moved["plain"] == 2 * 8 * 4 * 4


def test_gradients_in_scopes_are_exchanged_once(four_workers, no_signals):
    """The scope asks for rows; the gradients of whole weights stay partial until the step."""
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0)))
    plain = mlp()
    ours = gt.to(copy.deepcopy(plain))

    def in_scope(ids):
        with gt.signal.context("rows"):
            return ours(ids)

    expected, _ = train(plain, *data(), make_optimizer("AdamW plain", plain.parameters()))
    ids, labels = map(gt.to, data())
    found, moved = train(in_scope, ids, labels, make_optimizer("AdamW plain", ours.parameters()))
    assert found == pytest.approx(expected, rel=1e-3)
    assert kinds(moved[-1])["all-reduce"] == 1
    assert "all-gather" not in kinds(moved[-1])
    assert max(event.tensors for event in moved[-1].events) == len(list(ours.parameters()))


def weights_of(mesh, count=3):
    return [gt.replicate(torch.ones(4, 4), mesh).requires_grad_() for _ in range(count)]


@pytest.fixture
def pair():
    gt.init(workers=2, mode="virtual")
    yield gt.mesh(2, ("dp",))
    gt.shutdown()


def rows(mesh):
    return gt.shard(torch.arange(32.0).reshape(8, 4), mesh)


def backward(weights, x):
    sum((x @ weight).sum() * (number + 1) for number, weight in enumerate(weights)).backward()


def test_gradients_stay_partial_and_a_read_of_one_reduces_all(pair):
    weights, x = weights_of(pair), rows(pair)
    with gt.debug.comm() as comm:
        backward(weights, x)
    assert (comm.bytes, [str(weight.grad.spec) for weight in weights]) == (0, ["-, - + dp"] * 3)
    with gt.debug.comm() as comm:
        values = [weight.grad.cpu() for weight in weights]
    assert [(event.kind, event.tensors) for event in comm.events] == [("all-reduce", 3)]
    column = torch.arange(32.0).reshape(8, 4).sum(0)
    for number, value in enumerate(values):
        torch.testing.assert_close(value, (number + 1) * column[:, None].expand(4, 4))


def test_gradients_that_are_never_read_are_never_reduced(pair):
    weights, x = weights_of(pair), rows(pair)
    with gt.debug.comm() as comm:
        backward(weights, x)
        for weight in weights:
            weight.grad = None
        gt.synchronize()
    assert comm.events == []


def test_other_partial_tensors_are_not_reduced_with_gradients(pair):
    weights = weights_of(pair)
    backward(weights, rows(pair))
    product = gt.shard(torch.ones(4, 8), pair, dim=1) @ gt.shard(torch.ones(8, 4), pair)
    torch.optim.SGD(weights, lr=1.0).step()
    assert str(product.spec) == "-, - + dp"
    assert product.tolist() == [[8.0] * 4] * 4


def test_each_of_several_optimizers_reduces_its_own_gradients(pair):
    weights = weights_of(pair)
    first, second = torch.optim.SGD(weights[:1], lr=1.0), torch.optim.SGD(weights[1:], lr=1.0)
    backward(weights, rows(pair))
    with gt.debug.comm() as comm:
        first.step()
    assert [event.tensors for event in comm.events] == [1]
    with gt.debug.comm() as comm:
        second.step()
    assert [event.tensors for event in comm.events] == [2]


def test_a_scaler_of_gradients_reduces_them_together(pair):
    weights, plain = weights_of(pair), [torch.ones(4, 4, requires_grad=True) for _ in range(3)]
    x = torch.arange(32.0).reshape(8, 4) / 8
    for given, inputs in ((weights, gt.shard(x, pair)), (plain, x)):
        optimizer, scaler = torch.optim.SGD(given, lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        loss = sum((inputs @ weight).square().sum() for weight in given)
        with gt.debug.comm() as comm:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if given is weights:
            assert [event.tensors for event in comm.events if event.bytes > NUMBERS] == [3]
    for ours, theirs in zip(weights, plain, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


class FailingGradient(torch.autograd.Function):
    """Its gradient fails on the workers: an index is out of range."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, gt.replicate(torch.tensor([0, 1, 2, 9]), gt.mesh(2, ("dp",))))


def test_a_gradient_that_fails_fails_alone(pair):
    weights = weights_of(pair)
    x = gt.shard(torch.ones(8, 4), pair)
    ((x @ weights[0]).sum() + (x @ FailingGradient.apply(weights[1])).sum() + (x @ weights[2]).sum()).backward()
    assert [str(weight.grad.spec) for weight in weights] == ["-, - + dp"] * 3
    for number in (0, 2):
        assert weights[number].grad.tolist() == [[8.0] * 4] * 4
    with pytest.raises(gt.OpError, match="index out of range"):
        weights[1].grad.tolist()


def test_a_step_with_a_failed_gradient_changes_nothing(pair):
    weights = weights_of(pair)
    x = gt.shard(torch.ones(8, 4), pair)
    ((x @ weights[0]).sum() + (x @ FailingGradient.apply(weights[1])).sum()).backward()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    optimizer.step()
    with pytest.raises(gt.OpError, match="index out of range"):
        weights[0].tolist()
    gt.recover(optimizer)
    assert [weight.tolist() for weight in weights] == [[[1.0] * 4] * 4] * 3


def test_a_backward_that_is_broken_off_leaves_good_gradients(pair):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("in the middle")

    weights = weights_of(pair, 2)
    x = gt.shard(torch.ones(8, 4), pair)
    hidden = Broken.apply(x @ weights[0])
    with pytest.raises(ValueError, match="in the middle"):
        (hidden @ weights[1]).sum().backward()
    assert weights[0].grad is None
    torch.testing.assert_close(weights[1].grad.cpu(), torch.full((4, 4), 32.0))
    torch.optim.SGD(weights, lr=1.0).step()
    assert weights[1].tolist() == [[-31.0] * 4] * 4


SEQUENCES = list(itertools.product(["backward", "scale", "zero", "norm", "step"], repeat=3))


@pytest.mark.parametrize("first", ["backward", "scale", "zero", "norm", "step"])
def test_any_sequence_of_uses_gives_torchs_gradients(pair, first):
    """Whatever the layouts of gradients on the way, the values are those of torch."""
    x = torch.arange(32.0).reshape(8, 4) / 8

    def run(weights, inputs, uses):
        optimizer, seen = torch.optim.SGD(weights, lr=0.01), []
        for use in ("backward", *uses, "backward", "norm"):
            if use == "backward":
                sum((inputs @ weight).square().sum() for weight in weights).backward()
            elif use == "scale":
                for weight in weights:
                    weight.grad.mul_(0.5)
            elif use == "zero":
                optimizer.zero_grad(set_to_none=False)
            elif use == "norm":
                seen.append(nn.utils.clip_grad_norm_(weights, 100.0))
            else:
                optimizer.step()
        return [float(norm) for norm in seen] + [weight.detach().sum().item() for weight in weights]

    for uses in [sequence for sequence in SEQUENCES if sequence[0] == first]:
        ours = run(weights_of(pair, 2), gt.shard(x, pair), uses)
        theirs = run([torch.ones(4, 4, requires_grad=True) for _ in range(2)], x, uses)
        assert ours == pytest.approx(theirs, rel=1e-4), uses


def test_the_number_of_targets_is_reduced_once(four_workers):
    """Forward divides by it, and backward too."""
    logits = gt.distribute(torch.randn(8, 5), gt.mesh(4, ("x",)), "x, -").requires_grad_()
    targets = gt.distribute(torch.arange(8) % 5, logits.spec.mesh, "x")
    with gt.debug.comm() as moved:
        loss = functional.cross_entropy(logits, targets)
        loss.backward()
    assert [event.op for event in moved.events] == ["aten.nll_loss_forward.default"] * 2
    plain = logits.detach().cpu().requires_grad_()
    functional.cross_entropy(plain, targets.cpu()).backward()
    torch.testing.assert_close(logits.grad.cpu(), plain.grad)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@pytest.mark.parametrize("activation", [functional.relu, torch.clone])
def test_a_backward_from_a_sum_moves_one_activation_a_layer(four_workers, activation, shape):
    """The gradient that it starts from is whole on all workers; the layers are data and tensor parallel."""
    mesh = gt.mesh(shape, ("dp", "tp"))
    layouts = ["tp, -", "-, tp"] * 2
    shapes = [(16, 8), (8, 16)] * 2
    weights = [gt.distribute(torch.randn(s), mesh, l).requires_grad_() for s, l in zip(shapes, layouts, strict=True)]
    hidden = gt.distribute(torch.randn(12, 8), mesh, "dp, -")
    for inner, outer in (weights[:2], weights[2:]):
        hidden = activation(hidden @ inner.t()) @ outer.t()
    total = hidden.sum()
    with gt.debug.comm() as moved:
        total.backward()
    assert moved.bytes == 2 * (shape[1] - 1) * 12 * 8 * 4  # the all-reduce between the two layers
