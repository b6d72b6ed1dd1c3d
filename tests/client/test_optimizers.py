"""Torch's optimizers on GT: five steps as in torch, and none that waits for a worker."""

import copy
import inspect

import pytest
import torch

import gt
from gt.client import active_session, session_reads
from gt.client.session import Session

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
X = torch.randn(8, 4)
OPTIONS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}]
OPTIONS += [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9, "nesterov": True}]
OPTIONS += [{"weight_decay": 0.1}, {"weight_decay": 0.1, "fused": True}, {"centered": True}]
OPTIONS += [{"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.01), "fused": True}, {"amsgrad": True, "fused": True}]
# LBFGS and Adafactor read numbers in every step, by themselves; SparseAdam and Muon take other gradients.
NAMES = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def options_of(name):
    parameters = inspect.signature(getattr(torch.optim, name).__init__).parameters
    return [options for options in OPTIONS if parameters.keys() >= options.keys()]


def train(name, options, to, waits):
    """Parameters after five steps, and in `waits` how often the last step waited."""
    model, x = to(copy.deepcopy(MODEL)), to(X)
    optimizer = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        before = len(waits)
        optimizer.step()
        last = len(waits) - before
    return [parameter.detach().cpu() for parameter in model.parameters()], last


@pytest.fixture
def waits(monkeypatch):
    """Notes each time that the client waits for a worker."""
    noted = []
    for owner, name in ((Session, "read_query"), (session_reads, "_read"), (session_reads, "_read_directly")):
        function = getattr(owner, name)

        def noting(*args, function=function):
            noted.append(function)
            return function(*args)

        monkeypatch.setattr(owner, name, noting)
    return noted


def check(name, waits, to=gt.to):
    for options in options_of(name):
        expected, _ = train(name, options, lambda what: what, waits)
        found, waited = train(name, options, to, waits)
        assert waited == 0, options
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, o=options: f"{o}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_torchs_and_do_not_wait(anywhere, waits, name):
    check(name, waits)


@pytest.fixture
def two_workers():
    gt.init(workers=2, mode="virtual")
    yield
    gt.shutdown()


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_steps_of_cut_parameters_are_torchs(two_workers, waits, name):
    mesh = gt.mesh(2)

    def cut(what):
        moved = gt.to(what)
        if isinstance(moved, torch.nn.Module):
            for parameter in moved.parameters():
                parameter.data = gt.shard(parameter.data, mesh)
        return moved

    check(name, waits, cut)


GRADIENTS = [[torch.randn(shape) for shape in ((4, 6), (6,), (), (3, 2, 2), (5,))] for _ in range(5)]
LAYOUTS = {
    "one worker": lambda x: gt.to(x),
    "copied": lambda x: gt.distribute(x, gt.mesh(2), [gt.Replicate()]),
    "cut": lambda x: gt.distribute(x, gt.mesh(2), [gt.Shard(0) if x.dim() else gt.Replicate()]),
    "cut or copied": lambda x: gt.distribute(x, gt.mesh(2), [gt.Shard(0) if x.dim() > 1 else gt.Replicate()]),
    "apart": lambda x: gt.distribute(x, gt.mesh(1, workers=[x.dim() % 2]), [gt.Replicate()]),
}


def stepped(name, options, to, to_gradient=None):
    """The parameters after five steps with given gradients, in two groups, with a schedule, and with the state saved
    and loaded in between. One parameter has no gradient."""
    parameters = [to(gradient * 0.5 + 1).requires_grad_() for gradient in GRADIENTS[0]]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]
    optimizer = getattr(torch.optim, name)(groups, **copy.deepcopy(options))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step, gradients in enumerate(GRADIENTS):
        for parameter, gradient in zip(parameters[:4], gradients, strict=False):
            parameter.grad = (to_gradient or to)(gradient)
        optimizer.step()
        schedule.step()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [x.detach().cpu() for x in [*parameters, *state] if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_bits_of_torchs_default(two_workers, name, layout):
    own = [{"weight_decay": 0.1, "maximize": True}, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}]
    names = inspect.signature(getattr(torch.optim, name).__init__).parameters
    for options in [*options_of(name), *[each for each in own if names.keys() >= each.keys()]]:
        if options.get("fused"):
            continue
        expected = stepped(name, {**options, "foreach": options.get("foreach", False)}, lambda x: x)
        found = stepped(name, options, LAYOUTS[layout])
        assert all(map(torch.equal, found, expected)), options


def test_gradients_in_other_layouts_than_their_parameters(two_workers):
    expected = stepped("AdamW", {}, lambda x: x)
    for parameters, gradients in (("cut", "copied"), ("copied", "cut"), ("cut", "apart"), ("apart", "one worker")):
        found = stepped("AdamW", {}, LAYOUTS[parameters], LAYOUTS[gradients])
        assert all(map(torch.equal, found, expected)), (parameters, gradients)


def test_layouts_stay_those_of_the_parameters(two_workers):
    for layout in LAYOUTS.values():
        p = [layout(gradient).requires_grad_() for gradient in GRADIENTS[0]]
        before = [str(x.spec) + str(x.spec.mesh) for x in p]
        optimizer = torch.optim.AdamW(p)
        for _ in range(2):
            for parameter, gradient in zip(p, GRADIENTS[1], strict=True):
                parameter.grad = layout(gradient)
            optimizer.step()
        assert [str(x.spec) + str(x.spec.mesh) for x in p] == before


def instructions_of(run):
    session = active_session.current()
    session.outbox.flush()
    session.outbox.tape.clear()
    run()
    session.outbox.flush()
    return [each for each in session.outbox.tape if type(each).__name__ == "RunOp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_default_step_is_a_few_instructions_for_all_parameters(two_workers, layout):
    parameters = [LAYOUTS[layout](torch.ones(4, 2)).requires_grad_() for _ in range(20)]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = LAYOUTS[layout](torch.ones(4, 2))
        issued = instructions_of(optimizer.step)
    assert len(issued) < 20


def test_users_choose_the_implementation(embedded):
    for options, count in (({}, 8), ({"foreach": False}, 24), ({"foreach": True}, 8), ({"fused": True}, 1)):
        parameters = [gt.ones(3, requires_grad=True) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, **options)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = gt.ones(3)
            issued = instructions_of(optimizer.step)
        assert len(issued) == count, options


def test_half_precision_has_the_bits_of_torchs_default(anywhere):
    def run(to):
        p = to(torch.linspace(-1, 1, 12).to(torch.bfloat16)).requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.01, momentum=0.9)
        for gradients in GRADIENTS:
            p.grad = to(gradients[3].flatten().to(torch.bfloat16))
            optimizer.step()
        return p.detach().cpu()

    assert torch.equal(run(gt.to), run(lambda x: x))


def test_parameters_here_and_on_gt_in_one_optimizer(anywhere):
    for options in ({}, {"foreach": True}):
        ours, plain = gt.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        optimizer = torch.optim.AdamW([ours, plain], lr=0.1, **options)
        for _ in range(3):
            ours.grad, plain.grad = gt.ones(3), torch.ones(3)
            optimizer.step()
        assert torch.equal(ours.detach().cpu(), plain.detach())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_of_gradients_is_torchs(two_workers, layout):
    def run(to):
        parameters = [to(gradient).requires_grad_() for gradient in GRADIENTS[0]]
        for parameter, gradient in zip(parameters, GRADIENTS[1], strict=True):
            parameter.grad = to(gradient)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        torch.nn.utils.clip_grad_value_(parameters, 0.1)
        return [norm.cpu(), *[parameter.grad.cpu() for parameter in parameters]]

    torch.testing.assert_close(run(LAYOUTS[layout]), run(lambda x: x))


def test_a_schedule_does_not_make_steps_dearer(two_workers):
    """A rate that changes is a number of the instruction, and not a new op."""
    parameters = [LAYOUTS["cut"](torch.ones(4, 2)).requires_grad_() for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    defined = []
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = LAYOUTS["cut"](torch.ones(4, 2))
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
        defined.append(len(active_session.current().signatures))
    assert defined[1] == defined[-1]


def test_lists_whose_tensors_are_apart_run_again_after_calls_were_forgotten(two_workers, monkeypatch):
    monkeypatch.setattr("gt.client.session.MAX_CACHED_CALLS", 2)
    lists = [LAYOUTS["apart"](torch.ones(shape)) for shape in ((2,), (2, 2))]
    for _ in range(3):
        torch._foreach_mul_(lists, 2.0)
        torch._foreach_sqrt(torch._foreach_neg(lists))
    assert [x.sum().item() for x in lists] == [16.0, 32.0]


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS"])
def test_optimizers_that_read_numbers_equal_torchs(anywhere, name):
    def run(to):
        model, x = to(copy.deepcopy(MODEL)), to(X)
        optimizer = getattr(torch.optim, name)(model.parameters())

        def loss():
            optimizer.zero_grad()
            value = model(x).square().sum()
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(loss)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(run(gt.to), run(lambda what: what), rtol=1e-3, atol=1e-3)


def test_a_fused_step_of_lists_that_differ_raises_on_its_line(embedded):
    w, g = gt.ones(2), gt.ones(3)
    with pytest.raises(ValueError, match="_fused_sgd_.default: grads has shapes"):
        torch._fused_sgd_([w], [g], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
                          maximize=False, is_first_step=True)  # fmt: skip
