"""Modules, optimizers, schedulers and saving: torch's own, with GT parameters."""

import copy
import io

import pytest
import torch
from einops import rearrange, reduce
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

import gt
from gt.nn import SGD, Linear, Module

MODULES = {
    "Linear": (lambda: torch.nn.Linear(6, 3), (4, 6)),
    "Conv2d": (lambda: torch.nn.Conv2d(2, 4, 3, padding=1), (2, 2, 5, 5)),
    "ConvTranspose1d": (lambda: torch.nn.ConvTranspose1d(2, 3, 3), (2, 2, 7)),
    "BatchNorm2d": (lambda: torch.nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "LayerNorm": (lambda: torch.nn.LayerNorm(6), (4, 6)),
    "GroupNorm": (lambda: torch.nn.GroupNorm(2, 4), (2, 4, 3)),
    "MultiheadAttention": (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)),
    "TransformerEncoderLayer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "LSTM": (lambda: torch.nn.LSTM(4, 5, 2, batch_first=True), (3, 6, 4)),
    "GRU": (lambda: torch.nn.GRU(4, 5, bidirectional=True), (6, 3, 4)),
    "MaxPool": (lambda: torch.nn.MaxPool2d(2), (1, 2, 4, 4)),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


def call(module, x):
    return first(module(x, x, x) if isinstance(module, torch.nn.MultiheadAttention) else module(x))


@pytest.mark.parametrize(("make", "shape"), MODULES.values(), ids=MODULES.keys())
def test_a_module_trains_and_evaluates_as_in_torch(anywhere, make, shape):
    module = make()
    ours = gt.to(copy.deepcopy(module))
    x = torch.randn(shape)
    expected, found = call(module, x), call(ours, gt.to(x))
    torch.testing.assert_close(found.detach().cpu(), expected.detach())
    if any(p.requires_grad for p in module.parameters()):
        expected.pow(2).sum().backward()
        found.pow(2).sum().backward()
    for (name, p), q in zip(module.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, msg=name)
    for (name, b), c in zip(module.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(c.cpu(), b, msg=name)
    module.eval(), ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(call(ours, gt.to(x)).cpu(), call(module, x))


RECURRENT = {
    "LSTM": lambda: torch.nn.LSTM(3, 4),
    "LSTM of two layers": lambda: torch.nn.LSTM(3, 4, 2, bidirectional=True),
    "LSTM with projections": lambda: torch.nn.LSTM(3, 4, proj_size=2),
    "GRU": lambda: torch.nn.GRU(3, 4, bidirectional=True),
    "RNN": lambda: torch.nn.RNN(3, 4, 2),
    "RNN batch first": lambda: torch.nn.RNN(3, 4, batch_first=True),
}


@pytest.mark.parametrize("lengths", [[5, 3, 2], [3, 5, 2]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT.keys())
def test_packed_sequences(anywhere, make, lengths):
    module = make()
    batch_first = module.batch_first
    x = torch.randn((3, 5, 3) if batch_first else (5, 3, 3))
    results = []
    for part, leaf in ((module, x.clone().requires_grad_()), (gt.to(copy.deepcopy(module)), gt.to(x).requires_grad_())):
        packed = pack_padded_sequence(leaf, lengths, batch_first, enforce_sorted=lengths[0] == 5)
        padded, found = pad_packed_sequence(part(packed)[0], batch_first, padding_value=-1.0)
        assert found.tolist() == lengths
        padded.pow(2).sum().backward()
        results.append([padded.detach(), leaf.grad, *[p.grad for p in part.parameters()]])
    for expected, found in zip(*results, strict=True):
        assert isinstance(found, gt.Tensor)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.cpu(), expected)


def test_packing_lists_and_lengths_on_gt(anywhere):
    plain = [torch.randn(n, 2) for n in (4, 3, 1)]
    ours = [gt.to(sequence) for sequence in plain]
    expected, found = pack_sequence(plain), pack_sequence(ours)
    again = pack_padded_sequence(pad_sequence(ours), gt.tensor([4, 3, 1]))
    for packed in (found, again):
        assert torch.equal(packed.data.cpu(), expected.data)
        assert torch.equal(packed.batch_sizes, expected.batch_sizes)
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        pack_padded_sequence(pad_sequence(ours), [1, 3, 4])


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_recurrent_cells(anywhere, cell):
    module, x = cell(3, 4), torch.randn(2, 3)
    expected, found = first(module(x)), first(gt.to(copy.deepcopy(module))(gt.to(x)))
    torch.testing.assert_close(found.detach().cpu(), expected.detach())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning", "ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformer_encoder_with_padding(anywhere, grad, nested):
    """Torch's nested path gives zeros in padded positions; GT gives the values of torch's ordinary path."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    ours = gt.to(copy.deepcopy(module))
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, False, False], [False, False, True, True]])
    with torch.set_grad_enabled(grad):
        expected, found = module(x, src_key_padding_mask=padding), ours(gt.to(x), src_key_padding_mask=gt.to(padding))
    torch.testing.assert_close(found.detach().cpu()[~padding], expected.detach()[~padding])


@pytest.mark.parametrize("weights", [True, False])
def test_attention_with_masks_in_eval(anywhere, weights):
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ours = gt.to(copy.deepcopy(module))
    x, causal = torch.randn(2, 4, 8), torch.ones(4, 4, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False, False, False, False], [False, False, True, True]])
    y = gt.to(x)
    with torch.no_grad():
        for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": causal}):
            expected = module(x, x, x, need_weights=weights, **masks)
            found = ours(y, y, y, need_weights=weights, **{name: gt.to(mask) for name, mask in masks.items()})
            torch.testing.assert_close(found[0].cpu(), expected[0])
            assert not weights or torch.allclose(found[1].cpu(), expected[1])


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.5},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_in_torch(anywhere, name, foreach):
    values = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2)]
    plain = [v.clone().requires_grad_() for v in values]
    ours = [gt.to(v.clone()).requires_grad_() for v in values]
    make = getattr(torch.optim, name)
    for parameters in (plain, ours):
        optimizer = make(parameters, foreach=foreach, **OPTIMIZERS[name])
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            sum(((p - step) ** 2).sum() for p in parameters).backward()
            optimizer.step()
    for p, q in zip(plain, ours, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


def test_sparse_adam_lbfgs_and_muon(anywhere):
    for make in (lambda p: torch.optim.LBFGS(p, max_iter=3), lambda p: torch.optim.Muon(p, lr=0.1)):
        results = []
        for p in (torch.full((2, 2), 3.0), gt.full((2, 2), 3.0)):
            p.requires_grad_()
            optimizer = make([p])

            def closure(p=p, optimizer=optimizer):
                optimizer.zero_grad()
                loss = ((p - 1) ** 2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            results.append(p.detach().cpu())
        torch.testing.assert_close(results[1], results[0])


def test_fused_adam(anywhere):
    values = [torch.randn(3, 4), torch.randn(5)]
    results = []
    for parameters in (
        [v.clone().requires_grad_() for v in values],
        [gt.to(v.clone()).requires_grad_() for v in values],
    ):
        optimizer = torch.optim.Adam(parameters, lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            sum((p**2).sum() for p in parameters).backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in parameters])
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(q, p)


def test_a_learning_rate_schedule(embedded):
    p = gt.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(2):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert p.tolist() == pytest.approx([1 - 1 - (1 + 2**-0.5) / 2] * 2)


def test_gt_nn_has_parameters_on_gt(anywhere):
    layer = gt.nn.Linear(784, 10)
    assert isinstance(layer.weight, gt.Tensor)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert isinstance(layer, torch.nn.Linear)
    assert layer(gt.randn(2, 784)).shape == (2, 10)


def test_a_module_of_the_users_own(anywhere):
    class Net(Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(3, 1)

        def forward(self, x):
            return self.layer(x)

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    net(gt.ones(2, 3)).sum().backward()
    before = net.layer.bias.tolist()
    optimizer.step()
    assert net.layer.bias.item() == pytest.approx(before[0] - 0.2)


def test_batch_norm_keeps_its_statistics(anywhere):
    plain, ours = torch.nn.BatchNorm1d(3), gt.nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    for _ in range(3):
        plain(x), ours(gt.to(x))
    torch.testing.assert_close(ours.running_mean.cpu(), plain.running_mean)
    torch.testing.assert_close(ours.running_var.cpu(), plain.running_var)
    assert ours.num_batches_tracked.item() == 3


def test_a_frozen_module_with_hooks(anywhere):
    layer = gt.nn.Linear(2, 2)
    layer.requires_grad_(False)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert not layer(gt.ones(1, 2)).requires_grad
    assert seen == [(1, 2)]


def test_state_dict_moves_between_plain_and_gt(anywhere):
    plain, ours = torch.nn.Linear(3, 2), gt.nn.Linear(3, 2)
    ours.load_state_dict(plain.state_dict())
    assert torch.equal(ours.weight.detach().cpu(), plain.weight.detach())
    with torch.no_grad():
        ours.weight.mul_(2)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours.weight.detach().cpu(), plain.weight.detach())


def test_save_and_load(anywhere):
    layer = gt.nn.Linear(3, 2)
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "x": gt.arange(3)}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert isinstance(loaded["x"], gt.Tensor)
    assert torch.equal(loaded["model"]["weight"].cpu(), layer.weight.detach().cpu())


def test_save_and_load_an_optimizer_with_a_module(anywhere):
    layer = gt.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(gt.ones(1, 3)).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(layer.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other.state[layer.weight]["exp_avg"].cpu(), optimizer.state[layer.weight]["exp_avg"].cpu())


def test_deepcopy(anywhere):
    layer = gt.nn.Linear(3, 2)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.abs().sum().item() > 0
    assert isinstance(twin.weight, torch.nn.Parameter)


def test_changing_the_dtype_of_a_module(anywhere):
    layer = gt.nn.Linear(3, 2).to(torch.float64)
    assert layer.weight.dtype == torch.float64
    assert layer(gt.ones(1, 3, dtype=torch.float64)).dtype == torch.float64
    assert layer.bfloat16().weight.dtype == torch.bfloat16


def test_einops(anywhere):
    x = torch.randn(2, 3, 4)
    for run in (lambda v: rearrange(v, "a b c -> b (c a)"), lambda v: reduce(v, "a b c -> a", "mean")):
        torch.testing.assert_close(run(gt.to(x)).cpu(), run(x))


def test_functional_and_einsum(anywhere):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    run = lambda a, b: torch.nn.functional.scaled_dot_product_attention(a, b, b, is_causal=False)
    torch.testing.assert_close(run(gt.to(q), gt.to(k)).cpu(), run(q, k))
    torch.testing.assert_close(
        torch.einsum("bhqe,bhke->bqk", gt.to(q), gt.to(k)).cpu(), torch.einsum("bhqe,bhke->bqk", q, k)
    )


def test_parameters_are_instances_of_gt_nn_parameter(embedded):
    parameter = gt.nn.Parameter(torch.ones(2))
    assert isinstance(parameter, gt.Tensor) and isinstance(parameter, torch.nn.Parameter)
    assert all(isinstance(found, gt.nn.Parameter) for found in (parameter, *gt.nn.Linear(2, 2).parameters()))
    assert not isinstance(parameter.detach(), gt.nn.Parameter)


def test_a_plain_parameter_takes_the_value_of_a_gt_tensor(anywhere):
    plain, x = torch.nn.Parameter(torch.zeros(2)), gt.ones(2, 3)
    plain.data = x
    assert not isinstance(plain, gt.Tensor) and plain.tolist() == x.tolist()
    x.add_(1)
    assert plain.tolist() == [[1.0] * 3] * 2  # a copy: a plain tensor shares no memory with one on GT


def test_a_parameter_on_gt_takes_the_data_of_a_plain_tensor(anywhere):
    layer = gt.nn.Linear(3, 2)
    weight = layer.weight
    layer.weight.data = torch.ones(4, 3)
    layer.bias.data = gt.zeros(4)
    layer(gt.ones(3)).sum().backward()
    assert layer.weight is weight and isinstance(weight, gt.Tensor)
    assert weight.grad.shape == (4, 3) and weight.tolist() == torch.ones(4, 3).tolist()


def test_vectors_and_parameters_mix(anywhere):
    for to, vector in [(gt.to, torch.arange(8.0)), (lambda what: what, gt.arange(8.0))]:
        layer = to(torch.nn.Linear(3, 2))
        torch.nn.utils.vector_to_parameters(vector, layer.parameters())
        assert layer(gt.ones(3)).tolist() == [9.0, 19.0]


def test_a_copied_parameter_has_no_gradient(anywhere):
    """As in torch, where only other tensors are copied with theirs."""
    layer, leaf = gt.nn.Linear(3, 2), gt.ones(3, requires_grad=True)
    layer(leaf).sum().backward()
    assert copy.deepcopy(layer).weight.grad is None
    assert copy.deepcopy(leaf).grad.tolist() == leaf.grad.tolist()
