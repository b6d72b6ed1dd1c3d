"""The scalars of an optimizer's step, from a stand-in."""

import pytest
import torch

import gt
from gt.client.compilation.optimizer_scalars import NoStandIn, StandIn, Stepping


def optimizer_of(kind, **options):
    parameters = [gt.zeros(3, requires_grad=True), gt.zeros(2, 2, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return kind(parameters, **options), parameters


def test_the_scalars_of_sgd_follow_its_rate(embedded):
    optimizer, parameters = optimizer_of(torch.optim.SGD, lr=0.5)
    stand_in = StandIn(optimizer, parameters, Stepping.EACH)
    assert stand_in.advance() == [[("aten._foreach_add_.List", (-0.5,), False)]]
    optimizer.param_groups[0]["lr"] = 0.25
    assert stand_in.advance() == [[("aten._foreach_add_.List", (-0.25,), False)]]


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
