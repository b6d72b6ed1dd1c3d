"""gt.recover after a failed step: it restores all tensors to one step, or refuses."""

from __future__ import annotations

import pytest
import torch

import gt

pytestmark = pytest.mark.usefixtures("no_signals")


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own, which decays weights and writes its state last."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "decay": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                parameter.mul_(1 - group["lr"] * group["decay"])
                update = state["momentum"].mul(0.9).add_(parameter.grad, alpha=0.1)
                parameter.add_(update.sign_(), alpha=-group["lr"])
                state["momentum"].mul_(0.99).add_(parameter.grad, alpha=0.01)


OPTIMIZERS = {
    "SGD": lambda p, **form: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, **form),
    "AdamW": lambda p, **form: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **form),
    "Adam amsgrad": lambda p, **form: torch.optim.Adam(p, lr=0.1, amsgrad=True, **form),
    "Adagrad": lambda p, **form: torch.optim.Adagrad(p, lr=0.1, **form),
    "RMSprop": lambda p, **form: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **form),
    "NAdam": lambda p, **form: torch.optim.NAdam(p, lr=0.1, **form),
    "Lion": lambda p, **form: Lion(p),
}
FORMS = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
CASES = [
    (name, form)
    for name in OPTIMIZERS
    for form in FORMS
    if (form != "fused" or name in ("SGD", "AdamW", "Adam amsgrad", "Adagrad")) and (name != "Lion" or form == "loop")
]


def network():
    torch.manual_seed(0)
    return gt.nn.Sequential(gt.nn.Linear(4, 8), gt.nn.BatchNorm1d(8), gt.nn.ReLU(), gt.nn.Linear(8, 4))


def train(model, optimizer, index=0):
    """One step; an index of 7 is out of range, after the forward pass of the model."""
    optimizer.zero_grad()
    out = model(gt.arange(24.0).reshape(6, 4) / 24)
    out[gt.tensor([index, 1])].square().sum().backward()
    optimizer.step()


def values(*targets):
    """Parameters, buffers and optimizer state."""
    found = {}
    for target in targets:
        if isinstance(target, torch.nn.Module):
            found |= {name: value.cpu().clone() for name, value in target.state_dict().items()}
            continue
        for number, entries in target.state_dict()["state"].items():
            found |= {f"{number} {name}": torch.as_tensor(value).cpu().clone() for name, value in entries.items()}
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("good", [0, 2], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_recover_restores_all_tensors_to_the_step_before_the_failed_one(anywhere, name, form, good):
    model = network()
    if not good:  # what the forward pass of a first step has written cannot be told from what was there before
        model = gt.nn.Sequential(model[0], model[2], model[3])
    optimizer = OPTIMIZERS[name](model.parameters(), **FORMS[form])
    for _ in range(good):
        train(model, optimizer)
    before = values(model, optimizer)
    with pytest.raises(gt.OpError, match="out of bounds"):
        for index in (7, 0):
            train(model, optimizer, index)  # raises where the optimizer waits for its result, as some fused ones do
        values(model)
    gt.recover(model, optimizer)
    assert_same(values(model, optimizer), before)
    train(model, optimizer)
    after = values(model, optimizer)
    gt.recover(model, optimizer)
    assert_same(values(model, optimizer), after)
    with pytest.raises(gt.OpError, match="out of bounds"):
        train(model, optimizer, 7)
        values(model)
    gt.recover(model, optimizer)
    assert_same(values(model, optimizer), after)


def test_training_goes_on_as_if_the_failed_step_had_not_been(anywhere):
    results = []
    for fails in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        if fails:
            train(model, optimizer, 7)
            gt.recover(model, optimizer)
        train(model, optimizer)
        results.append(values(model, optimizer))
    assert_same(*results)


def test_a_forward_pass_that_fails_before_its_batch_norm_is_taken_back(anywhere):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    before = values(model, optimizer)
    optimizer.zero_grad()
    model(gt.ones(6, 4)[gt.tensor([9, 1, 2])]).sum().backward()
    optimizer.step()
    gt.recover(model, optimizer)
    assert_same(values(model, optimizer), before)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_cut_are_recovered(form):
    gt.init(workers=2, mode="virtual")
    try:
        mesh = gt.mesh(2, ("d",))
        model = gt.nn.Sequential(gt.nn.Linear(4, 8, bias=False), gt.nn.Linear(8, 4, bias=False))
        for parameter, layout in zip(model.parameters(), ("d, -", "-, d"), strict=True):
            parameter.data = gt.distribute(parameter.data, mesh, layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **FORMS[form])
        train(model, optimizer)
        before, specs = values(model, optimizer), [str(parameter.spec) for parameter in model.parameters()]
        try:
            train(model, optimizer, 7)
        except gt.OpError:
            assert form == "fused"
        gt.recover(model, optimizer)
        assert_same(values(model, optimizer), before)
        assert [str(parameter.spec) for parameter in model.parameters()] == specs
    finally:
        gt.shutdown()


@pytest.mark.parametrize("layout", ["x, -", "-, x", "-, -"])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_are_uploaded_straight_to_their_shards(four_workers, layout, transposed):
    value = torch.arange(48.0).reshape(8, 6).t() if transposed else torch.arange(48.0).reshape(6, 8)
    x = gt.distribute(value, gt.mesh(4, ("x",)), layout)
    x.add_(gt.ones(10)[gt.tensor([100, 3])].sum())
    with gt.debug.comm() as moved:
        gt.recover(x)
    assert (str(x.spec), x.stride(), moved.events) == (layout, value.stride(), [])
    assert torch.equal(x.cpu(), value)


@pytest.mark.parametrize("layout", ["x, -", "-, -"])
def test_values_in_memory_with_gaps_are_recovered(four_workers, layout):
    with gt.device():
        x = torch.empty_strided((6, 4), (8, 2))
    x.copy_(torch.arange(24.0).reshape(6, 4))
    x = x.redistribute(gt.mesh(4, ("x",)), layout)
    x.add_(gt.ones(10)[gt.tensor([100, 3])].sum())
    gt.recover(x)
    assert (str(x.spec), x.stride()) == (layout, (8, 2))
    assert torch.equal(x.cpu(), torch.arange(24.0).reshape(6, 4))


def test_a_large_tensor_written_between_steps_is_refused(embedded):
    model = gt.nn.Linear(4, 4)
    average = gt.zeros(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    average.add_(1)
    train(model, optimizer, 7)
    with pytest.raises(gt.RecoveryError, match=r"of a tensor no value .* Load a checkpoint") as caught:
        gt.recover(model, optimizer, average)
    assert "out of bounds" in str(caught.value.__cause__)
    with pytest.raises(gt.OpError):
        values(model)  # nothing has changed
    gt.recover(model, optimizer)
    assert average.sum().item() == 90_000


def test_a_step_that_fails_in_the_middle_is_refused(embedded):
    class Faulty(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
                parameter.sub_(gt.zeros(3)[gt.tensor([9])])

    model = gt.nn.Linear(4, 4)
    optimizer = Faulty(model.parameters(), {})
    train(model, optimizer)
    with pytest.raises(gt.RecoveryError, match=r"weight.*bias.*Load a checkpoint"):
        gt.recover(model, optimizer)


def test_tensors_without_an_optimizer_are_restored_together(anywhere):
    a, b = gt.ones(3), gt.ones(3)
    for index in (0, 9):
        bad = gt.zeros(3)[gt.full((3,), index)]
        a.add_(1)
        a.add_(bad)
        b.add_(bad)
    gt.recover(a, b)
    assert (a.tolist(), b.tolist()) == ([3.0] * 3, [1.0] * 3)
    for index in (0, 9):
        bad = gt.zeros(3)[gt.full((3,), index)]
        a.add_(bad)
        b.add_(1)
        b.add_(bad)
    with pytest.raises(gt.RecoveryError):
        gt.recover(a, b)


def test_nothing_to_recover_is_an_error(embedded):
    with pytest.raises(TypeError, match=r"gt\.recover\(model, optimizer\)"):
        gt.recover()
    with pytest.raises(gt.RecoveryError, match="nothing to bring back"):
        gt.recover(gt.nn.ReLU())
    with pytest.raises(gt.RecoveryError, match="weight, bias: not on GT"):
        gt.recover(torch.nn.Linear(2, 2))


def test_plain_tensors_of_a_module_are_refused(embedded):
    model = gt.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, 7)
    with pytest.raises(gt.RecoveryError, match=r"n_averaged: not on GT.*gt\.to\(module\)"):
        gt.recover(model, optimizer, average)
    with pytest.raises(gt.OpError):
        values(model)  # nothing has changed
    gt.recover(model, optimizer)


def test_writes_between_steps_that_are_dropped_are_named(embedded, caplog):
    model = gt.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = gt.to(torch.optim.swa_utils.AveragedModel(model))
    for index in (0, 0, 7):
        train(model, optimizer, index)
        average.update_parameters(model)
    gt.recover(model, optimizer, average)
    (record,) = [record for record in caplog.records if record.name == "gt.client"]
    assert "1 before the present one" in record.getMessage()
    assert "dropped of module.weight, module.bias, n_averaged." in record.getMessage()
    assert average.n_averaged.item() == 1


def test_no_warning_where_no_write_is_dropped(embedded, caplog):
    model = gt.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in (0, 7):
        train(model, optimizer, index)
    gt.recover(model, optimizer)
    assert [record for record in caplog.records if record.name == "gt.client"] == []


OVERWRITES = {
    "zero_": lambda tensor: tensor.zero_(),
    "fill_": lambda tensor: tensor.fill_(2),
    "fill_ with a tensor": lambda tensor: tensor.fill_(gt.tensor(3.0)),
    "copy_": lambda tensor: tensor.copy_(gt.ones(4, 4)),
    "copy_ of a plain tensor": lambda tensor: tensor.copy_(torch.ones(4)),
    "normal_": lambda tensor: tensor.normal_(),
    "uniform_": lambda tensor: tensor.uniform_(),
    "foreach_zero_": lambda tensor: torch._foreach_zero_([tensor]),
}
LAYOUTS = ["-, -", "d, -", "-, d"]


def failed(layout=""):
    """A tensor of 4 by 4 without a value."""
    rows = gt.ones(4, 4)[gt.full((4,), 9)]
    if not layout:
        return rows
    tensor = gt.distribute(gt.ones(4, 4), gt.mesh(2, ("d",)), layout)
    return tensor.add_(rows)


@pytest.mark.parametrize("name", OVERWRITES)
def test_a_tensor_that_is_overwritten_has_a_value_again(anywhere, name):
    tensor = failed()
    OVERWRITES[name](tensor)
    expected = torch.zeros(4, 4)
    if name.endswith(("l_", "m_")) and name != "fill_":
        assert tensor.isfinite().all().item()
        return
    OVERWRITES[name](expected)
    assert tensor.tolist() == expected.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OVERWRITES)
def test_shards_that_are_overwritten_have_a_value_again(name, layout):
    gt.init(workers=2, mode="virtual")
    try:
        tensor = failed(layout)
        OVERWRITES[name](tensor)
        assert tensor.isfinite().all().item()
        assert str(tensor.spec) == str(gt.distribute(gt.ones(4, 4), gt.mesh(2, ("d",)), layout).spec)
    finally:
        gt.shutdown()


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor[0].zero_(),
        lambda tensor: tensor.copy_(tensor.T),
        lambda tensor: tensor.copy_(failed()),
        lambda tensor: tensor.mul_(0),
    ],
    ids=["a part", "of itself", "by a tensor without a value", "after a read"],
)
@pytest.mark.parametrize("layout", ["", "d, -"])
def test_a_write_that_needs_a_value_gives_none(write, layout):
    gt.init(workers=2, mode="virtual")
    try:
        tensor = failed(layout)
        with pytest.raises(gt.OpError, match="out of bounds"):
            write(tensor)  # raises if it overlaps: torch refuses that, and GT asks a worker
            tensor.tolist()
    finally:
        gt.shutdown()


def test_a_tensor_that_is_overwritten_after_a_failure_goes_back_to_the_step_before(anywhere):
    model = gt.nn.Linear(4, 4)
    buffer = gt.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    buffer.add_(failed())
    buffer.zero_()
    train(model, optimizer, 7)
    gt.recover(model, optimizer, buffer)
    assert buffer.tolist() == torch.ones(4, 4).tolist()


def test_gradients_without_a_value_are_dropped(anywhere):
    model = gt.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, optimizer, 7)
    gt.recover(model, optimizer)
    assert model.weight.grad is None
    optimizer.zero_grad(set_to_none=False)
    model(gt.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all().item()


def test_weights_return_where_a_step_was_over_a_limit():
    """The moments of the optimizer were written in the step that failed, and the weights were not."""
    gt.init(limits="bytes=12MiB")
    model = gt.nn.Linear(512, 512, bias=False)  # 1 MiB
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(gt.ones(2, 512)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(gt.ones(2, 512)).sum().backward()
    before = model.weight.tolist()
    held = gt.zeros(15, 512, 256)  # 7.5 MiB
    optimizer.step()
    with pytest.raises(gt.LimitError, match="_foreach_sqrt"):
        model.weight.tolist()
    del held
    with pytest.raises(gt.RecoveryError, match=r"gt\.recover\(model\) without its optimizer"):
        gt.recover(model, optimizer)
    gt.recover(model)
    assert model.weight.tolist() == before
    gt.shutdown()
