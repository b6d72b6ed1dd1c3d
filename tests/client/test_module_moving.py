"""`gt.to(module)`: parameters stay the objects that they were, for whoever holds them."""

import copy
import weakref

import pytest
import torch

import gt

X = torch.linspace(-1, 1, 32).view(8, 4)
OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Scaled(torch.nn.Parameter):
    """A parameter class of a user."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight  # tied
        self.scale = Scaled(torch.ones(4))
        self.recurrent = torch.nn.LSTM(4, 3)

    def forward(self, x):
        return self.recurrent(self.last(self.first(x).tanh()) * self.scale)[0]


def model():
    torch.manual_seed(0)
    return Model()


def loss_of(made):
    return made(X).square().mean()


def train(made, optimizer, steps):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(made)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_made_before_trains_the_moved_model(anywhere, name):
    losses = []
    for move in (lambda made: made, gt.to):
        made = model()
        optimizer = getattr(torch.optim, name)(made.parameters(), lr=0.1)
        move(made)
        losses.append(train(made, optimizer, 4))
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_trained_goes_on_with_its_state(anywhere, name):
    losses = []
    for move in (lambda made: made, gt.to):
        made = model()
        optimizer = getattr(torch.optim, name)(made.parameters(), lr=0.1)
        train(made, optimizer, 2)
        move(made)
        losses.append(train(made, optimizer, 3))
    torch.testing.assert_close(losses[1], losses[0])


def test_parameters_keep_their_identity_and_attributes(anywhere):
    made = model()
    before = dict(made.named_parameters())
    watched = {name: weakref.ref(parameter) for name, parameter in before.items()}
    before["scale"].note = "kept"
    loss_of(made).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in before.items()}
    gt.to(made)
    for name, parameter in made.named_parameters():
        assert parameter is before[name] is watched[name]()
        assert isinstance(parameter, gt.Tensor) and isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad and parameter.is_leaf
        assert torch.equal(parameter.grad.cpu(), gradients[name])
    assert made.last.weight is made.first.weight
    assert isinstance(made.scale, Scaled) and made.scale.note == "kept"


def test_lists_and_clipping_hold_the_moved_parameters(anywhere):
    norms = []
    for move in (lambda made: made, gt.to):
        made = model()
        parameters = list(made.parameters())
        move(made)
        loss_of(made).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.01).item())
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).item())
    torch.testing.assert_close(norms[2:], norms[:2])


def test_hooks_go_along_and_their_handles_remove_them(anywhere):
    made, seen = model(), []
    handles = [
        made.scale.register_hook(lambda gradient: seen.append(gradient)),
        made.scale.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter)),
    ]
    gt.to(made)
    loss_of(made).backward()
    assert len(seen) == 2 and seen[1] is made.scale and all(isinstance(each, gt.Tensor) for each in seen)
    for handle in handles:
        handle.remove()
    loss_of(made).backward()
    assert len(seen) == 2


def test_a_graph_from_before_the_move_refuses_backward(anywhere):
    made = model()
    loss = loss_of(made)
    gt.to(made)
    with pytest.raises(RuntimeError, match="was moved to GT after its forward: run the forward again"):
        loss.backward()
    loss_of(made).backward()
    assert made.scale.grad is not None


def test_moved_parameters_are_copied_saved_and_wrapped_as_others(anywhere):
    made = gt.to(model())
    twin = copy.deepcopy(made)
    assert torch.equal(twin.scale.cpu(), made.scale.cpu()) and twin.scale is not made.scale
    assert isinstance(twin.scale, Scaled) and twin.last.weight is twin.first.weight
    shallow = copy.copy(made.first.weight)
    with torch.no_grad():
        made.first.weight.zero_()
    assert not shallow.cpu().any() and twin.first.weight.cpu().any()
    wrapped = torch.nn.Parameter(made.first.weight)
    assert isinstance(wrapped, gt.Tensor) and wrapped._is_param
    assert made.double().first.weight is made.first.weight and made.first.weight.dtype is torch.float64


def test_a_lazy_parameter_that_an_optimizer_holds_is_trained(anywhere):
    layer = torch.nn.LazyLinear(2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    held = optimizer.param_groups[0]["params"][0]
    gt.to(layer)
    layer(X).sum().backward()
    before = layer.weight.detach().cpu().clone()
    optimizer.step()
    assert held is layer.weight and not torch.equal(before, layer.weight.cpu())


def test_parameters_that_a_module_on_gt_is_given_stay_the_same_objects(anywhere):
    made = gt.to(model())
    head = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    gain = torch.nn.Parameter(torch.ones(4))
    made.head, made.gain = head, gain
    assert made.gain is gain and optimizer.param_groups[0]["params"][0] is made.head.weight
    assert isinstance(gain, gt.Tensor) and isinstance(made.head.weight, gt.Tensor)


def test_a_plain_buffer_stays_plain_where_the_program_holds_it(anywhere):
    made, mask = torch.nn.Module(), torch.ones(3)
    made.register_buffer("mask", mask)
    gt.to(made)
    assert isinstance(made.mask, gt.Tensor) and not isinstance(mask, gt.Tensor)


def test_conversions_that_swap_parameters_keep_their_identity(anywhere):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for made in (gt.to(model()), gt.nn.Linear(4, 4)):
            before = [*made.parameters()]
            made.double().load_state_dict(made.state_dict())
            assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
            assert all(parameter.dtype is torch.float64 for parameter in before)
            assert all(isinstance(parameter, torch.nn.Parameter) for parameter in before)
        made(gt.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert made.weight.grad.dtype is torch.float64
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
