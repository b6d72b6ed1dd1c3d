"""The scalars of an optimizer's step, from a stand-in."""

import pytest
import torch

import gt
from gt.client.compilation.optimizer_scalars import NoStandIn, StandIn, Stepping

FOREACH_ADD = (("on GT",), ("on GT",), float, "alpha")
CALLS, CHANGED = 9, (5, 7)  # calls, and those before which settings change: the first recordings are repeated then
rate = torch.tensor


def optimizer_of(kind, **options):
    parameters = [gt.zeros(3, requires_grad=True), gt.zeros(2, 2, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, **options), parameters


def test_the_scalars_of_sgd_follow_its_rate(embedded):
    optimizer, parameters = optimizer_of(torch.optim.SGD, lr=0.5)
    stand_in = StandIn(optimizer, parameters, Stepping.EACH)
    assert stand_in.advance() == [[("aten._foreach_add_.List", (-0.5,), False, FOREACH_ADD)]]
    optimizer.param_groups[0]["lr"] = 0.25
    assert stand_in.advance() == [[("aten._foreach_add_.List", (-0.25,), False, FOREACH_ADD)]]


def test_the_optimizer_changes_only_when_it_is_told(embedded):
    optimizer, parameters = optimizer_of(torch.optim.Adam)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    stand_in = StandIn(optimizer, parameters, Stepping.EACH)
    first, again = stand_in.advance(), stand_in.advance()
    assert first == again
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(before, parameters, strict=True))
    assert [float(entries["step"]) for entries in optimizer.state.values()] == [1.0, 1.0]
    stand_in.commit()
    assert [float(entries["step"]) for entries in optimizer.state.values()] == [2.0, 2.0]
    assert stand_in.advance() != first


def test_steps_elsewhere_are_noticed(embedded):
    optimizer, parameters = optimizer_of(torch.optim.Adam)
    optimizer.step()
    stand_in = StandIn(optimizer, parameters, Stepping.EACH)
    assert stand_in.is_current()
    optimizer.step()
    assert not stand_in.is_current()


def test_hooks_of_the_optimizer_do_not_run(embedded):
    optimizer, parameters = optimizer_of(torch.optim.SGD)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    StandIn(optimizer, parameters, Stepping.EACH).advance()
    assert called == []


def test_large_plain_state_has_no_stand_in(embedded):
    optimizer, parameters = optimizer_of(torch.optim.SGD)
    optimizer.state[parameters[0]]["history"] = torch.zeros(100)
    with pytest.raises(NoStandIn):
        StandIn(optimizer, parameters, Stepping.EACH)


def test_code_that_needs_the_real_parameters_has_no_stand_in(embedded):
    class Sized(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["params"][0].numel() == 3

    optimizer, parameters = optimizer_of(Sized)
    with pytest.raises(NoStandIn):
        StandIn(optimizer, parameters, Stepping.EACH).advance()


# Groups of parameters that change between the calls of a compiled step: the numbers are those of the step's own code.

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, a tensor": lambda p: torch.optim.AdamW(p, lr=rate(0.1), weight_decay=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=rate(0.1), fused=True),
    "Adam, tensors": lambda p: torch.optim.Adam(p, lr=0.1, betas=(rate(0.9), rate(0.99)), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p[:1], lr=0.1),
}
SETTINGS = {
    "lr": lambda number: 0.3 / number,
    "weight_decay": lambda number: 0.3 / number,
    "betas": lambda number: (0.5, 0.9 - 0.1 * number),
    "eps": lambda number: 0.1 / number,
    "momentum": lambda number: 0.9 / number,
    "dampening": lambda number: 0.1 / number,
    "maximize": lambda number: number % 4 == 1,
    "foreach": lambda number: number % 4 == 1,
    "nesterov": lambda number: number % 4 == 1,
    "alpha": lambda number: 0.9 / number,
    "rho": lambda number: 0.9 / number,
    "etas": lambda number: (0.5, 1 + 1 / number),
}


def set_number(optimizer, name, number):
    for group in optimizer.param_groups:
        if name in group:
            group[name] = SETTINGS[name](number)


def set_tensor(optimizer, name, number):
    for group in optimizer.param_groups:
        if name in ("lr", "weight_decay"):
            group[name] = rate(0.3 / number)


def fill(optimizer, name, number):
    for group in optimizer.param_groups:
        for value in group[name] if isinstance(group.get(name), tuple) else (group.get(name),):
            if isinstance(value, torch.Tensor):
                value.fill_(0.9 / number)


def fill_by_numpy(optimizer, name, number):
    for group in optimizer.param_groups:
        if isinstance(group.get(name), torch.Tensor):
            group[name].numpy()[...] = 0.3 / number


def replace_parameters(optimizer, name, number):
    first = optimizer.param_groups[0]
    if number == CHANGED[0]:
        optimizer.taken_away = first["params"].pop()
        first["params"] = [*first["params"]]
    else:
        optimizer.add_param_group({"params": [optimizer.taken_away], "lr": 0.05})


def replace_groups(optimizer, name, number):
    optimizer.param_groups[:] = [{**group, "lr": 0.3 / number} for group in optimizer.param_groups]


CHANGES = [
    *[(set_number, name) for name in SETTINGS],
    *[(change, name) for change in (set_tensor, fill) for name in ("lr", "weight_decay", "betas")],
    (fill_by_numpy, "lr"),
    (replace_parameters, "params"),
    (replace_groups, "param_groups"),
]


def train(make, change, name, compiles):
    """The parameters after each call, or the error of the code."""
    torch.manual_seed(0)
    parameters = [gt.to(torch.randn(shape)).requires_grad_() for shape in ((3, 4), (4,), (3,))]
    optimizer = make(parameters)

    def step(x):
        optimizer.zero_grad()
        loss = (parameters[0] @ x * parameters[1].sum() + parameters[2]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    function, x, found = gt.compile(step) if compiles else step, gt.to(torch.arange(4.0) / 8), []
    for number in range(1, CALLS):
        if number in CHANGED:
            change(optimizer, name, number)
        try:
            function(x)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            return [*found, str(error)]
        found += [repr(parameter.tolist()) for parameter in parameters]  # nan is equal to nan
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_that_change_between_calls(embedded, kind):
    make = OPTIMIZERS[kind]
    unchanged = train(make, lambda *_: None, "", compiles=False)
    for change, name in CHANGES:
        expected = train(make, change, name, compiles=False)
        if expected != unchanged:
            assert train(make, change, name, compiles=True) == expected, (change.__name__, name)


def test_a_rate_on_gt_is_read_at_each_call(embedded):
    def run(compiles):
        parameter = gt.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=gt.tensor(0.5), fused=True)

        def step(x):
            optimizer.zero_grad()
            (parameter * x).sum().backward()
            optimizer.step()

        function, found = gt.compile(step) if compiles else step, []
        for number in range(12):
            if number == 6:
                optimizer.param_groups[0]["lr"].fill_(0.25)
            if number == 9:
                optimizer.param_groups[0]["lr"] = gt.tensor(0.125)
            function(gt.arange(3.0))
            found.append(parameter.tolist())
        return found, function

    expected, _ = run(compiles=False)
    found, function = run(compiles=True)
    assert found == expected
    assert function.skipped >= 3, function.reasons
