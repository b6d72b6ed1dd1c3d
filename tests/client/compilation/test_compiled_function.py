"""gt.compile: a call that skips its function does what the function would do. Torch is the oracle, through the same
function on plain tensors or without gt.compile."""

import copy
import gc
import math
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import gt
from gt.client import active_session
from gt.client.compilation.specialization import MAX_ATTEMPTS
from gt.client.compilation.specialization_table import MAX_SPECIALIZATIONS
from gt.core.messages import RunOp

CALLS = 11
OWN_SESSIONS = {"anywhere", "two_virtual", "processes", "no_session"}


@pytest.fixture(autouse=True)
def one_worker(request):
    """Tests that say nothing else have the embedded worker."""
    if not OWN_SESSIONS.intersection(request.fixturenames):
        gt.init()
    yield
    if not OWN_SESSIONS.intersection(request.fixturenames):
        gt.shutdown()


@pytest.fixture
def no_session():
    pass


@pytest.fixture
def two_virtual(no_signals):
    gt.init(workers=2, mode="virtual")
    yield
    gt.shutdown()


@pytest.fixture
def processes():
    gt.init(workers=2)
    yield
    gt.shutdown()


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def noisy():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))


def batch():
    return gt.randn(12, 8), gt.to(torch.randint(0, 4, (12,)))


class Training:
    """A model, an optimizer and a batch, made of one seed."""

    def __init__(self, make_model, make_optimizer, make_batch=batch):
        torch.manual_seed(0)
        self.model = gt.to(make_model())
        self.optimizer = make_optimizer(self.model.parameters())
        self.batch = make_batch()
        self.loss = lambda x, y: cross_entropy(self.model(x), y)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.loss(*self.batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def tensors(self):
        parameters = list(self.model.parameters())
        state = [value for entries in self.optimizer.state.values() for value in entries.values()]
        return [*parameters, *[each.grad for each in parameters], *self.model.buffers(), *state]


def values(tensors):
    return [None if tensor is None else torch.as_tensor(tensor).detach().cpu().clone() for tensor in tensors]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def run(training, step, calls=CALLS, between=lambda training, number: None):
    torch.manual_seed(1)
    losses = []
    for number in range(calls):
        losses.append(step())
        between(training, number)
    return [*values(losses), *values(training.tensors()), torch.get_rng_state()]


def compare(make, get_step=lambda training: training.step, skipped=4, **options):
    """The same training with and without gt.compile: the same bits everywhere."""
    eager = make()
    expected = run(eager, get_step(eager), **options)
    training = make()
    step = gt.compile(get_step(training))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(run(training, step, **options), expected)
    assert step.skipped >= skipped, step.reasons
    return training, step


def call(function, x, times):
    for _ in range(times):
        function(x)


# Training


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_sgd(anywhere, momentum):
    compare(lambda: Training(mlp, lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum)))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
def test_a_step_of_adamw(anywhere, options):
    """Its numbers depend on the count of steps: those of a skipped call are torch's own."""
    training, _ = compare(lambda: Training(mlp, lambda p: torch.optim.AdamW(p, **options)))
    assert {float(entries["step"]) for entries in training.optimizer.state.values()} == {CALLS}


def test_counts_that_were_never_uploaded():
    """No other optimizer has made these steps. Fused ones give workers their counts as tensors."""
    training = Training(mlp, lambda p: torch.optim.AdamW(p, fused=True))
    step = gt.compile(training.step)
    for number in range(8):
        for entries in training.optimizer.state.values():
            entries["step"].fill_(1000 * number)
        step()
        counts = {float(entries["step"]) for entries in training.optimizer.state.values()}
        assert counts == {max(1, 1000 * number + 1)}
    assert step.skipped


OPTIMIZERS = ["Adagrad", "Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_other_optimizers(name):
    compare(lambda: Training(mlp, getattr(torch.optim, name)))


def test_an_optimizer_whose_ops_change_is_recorded_again():
    """RAdam computes with other ops from its sixth step on."""
    _, step = compare(lambda: Training(mlp, torch.optim.RAdam), calls=14)
    assert step.recorded > 4


def test_dropout_and_batch_norm(anywhere):
    training, _ = compare(lambda: Training(noisy, torch.optim.AdamW))
    assert training.model[1].num_batches_tracked.item() == CALLS


def test_clipping(anywhere):
    def step_of(training):
        def step():
            training.optimizer.zero_grad()
            loss = training.loss(*training.batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            training.optimizer.step()
            return loss + norm.detach()

        return step

    compare(lambda: Training(mlp, torch.optim.AdamW), step_of)


def test_gradients_are_accumulated_inside(anywhere):
    def step_of(training):
        def step():
            training.optimizer.zero_grad()
            for _ in range(3):
                loss = training.loss(*training.batch)
                loss.backward()
            training.optimizer.step()
            return loss

        return step

    compare(lambda: Training(mlp, torch.optim.AdamW), step_of)


def test_gradients_are_accumulated_over_calls(anywhere):
    def step_of(training):
        def step():
            loss = training.loss(*training.batch)
            loss.backward()
            return loss

        return step

    def update(training, number):
        if number % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()

    compare(lambda: Training(mlp, torch.optim.AdamW), step_of, calls=24, between=update, skipped=8)


def test_gradients_are_reset_at_the_end():
    def step_of(training):
        def step():
            loss = training.loss(*training.batch)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss

        return step

    training, _ = compare(lambda: Training(mlp, torch.optim.AdamW), step_of)
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_gradients_are_zeroed_in_place():
    def step_of(training):
        def step():
            training.optimizer.zero_grad(set_to_none=False)
            loss = training.loss(*training.batch)
            loss.backward()
            training.optimizer.step()
            return loss

        return step

    training, step = compare(lambda: Training(mlp, torch.optim.AdamW), step_of)
    kept = training.model[0].weight.grad
    step()
    assert training.model[0].weight.grad is kept


def test_a_gradient_that_somebody_holds_keeps_its_value():
    training = Training(mlp, torch.optim.SGD)
    step = gt.compile(training.step)
    for _ in range(6):
        step()
    held = training.model[0].weight.grad
    before = held.cpu()
    step()
    assert step.skipped > 1
    assert torch.equal(held.cpu(), before)
    assert training.model[0].weight.grad is not held


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 6, 0.1),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
], ids=["each call", "after the recording", "with betas"])  # fmt: skip
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_schedules_outside_of_the_function(make, optimizer):
    def training():
        made = Training(mlp, lambda p: getattr(torch.optim, optimizer)(p, lr=0.05))
        made.schedule = make(made.optimizer)
        return made

    compare(training, calls=16, between=lambda training, number: training.schedule.step(), skipped=9)


def test_groups_with_other_settings():
    def optimizer(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.3}])

    compare(lambda: Training(mlp, optimizer))


def test_weight_decay_that_is_switched_on_adds_an_op():
    def between(training, number):
        training.optimizer.param_groups[0]["weight_decay"] = 0.1 * (number >= 8)

    compare(lambda: Training(mlp, torch.optim.SGD), calls=16, between=between)


def test_an_average_of_the_weights(anywhere):
    def make():
        training = Training(mlp, torch.optim.SGD)
        training.average = copy.deepcopy(training.model)
        return training

    def step_of(training):
        def step():
            loss = training.step()
            with torch.no_grad():
                for mean, parameter in zip(training.average.parameters(), training.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            return next(training.average.parameters()).sum() + loss.detach()

        return step

    compare(make, step_of)


def test_checkpointing_draws_the_same_keys_again():
    def make():
        training = Training(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)), torch.optim.SGD)
        training.loss = lambda x, y: cross_entropy(checkpoint(training.model, x, use_reentrant=False), y)
        return training

    compare(make)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16))


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes))


@pytest.mark.parametrize("make_model", [gpt2, llama])
def test_language_models(anywhere, make_model):
    def make():
        training = Training(make_model, torch.optim.AdamW, lambda: (gt.to(torch.randint(0, 50, (2, 16))),))
        training.loss = lambda ids: training.model(input_ids=ids, labels=ids).loss
        return training

    compare(make)


def test_training_on_processes(processes):
    compare(lambda: Training(noisy, torch.optim.AdamW))


CUT_MODEL = """
batch:
  shard: {mesh: {dp: 2}, dims: [dp]}
model:
  mesh: {dp: 2}
  "*.weight": [dp]
  "*.bias": [dp]
  "*": batch
"""


def test_hints_about_the_order_of_modules_are_no_difference(two_virtual, tmp_path):
    """The modules of a cut model name the ones that follow, as they did in the program's last steps."""
    (tmp_path / "cut.yaml").write_text(CUT_MODEL)
    gt.load_config(tmp_path / "cut.yaml")

    def deep():
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    eager, training = Training(deep, torch.optim.AdamW), Training(deep, torch.optim.AdamW)
    step = gt.compile(training.step, check_every=3)
    assert_equal(run(training, step, calls=14), run(eager, eager.step, calls=14))
    assert step.recorded == 4 and step.checked == 5, step.reasons


def test_recovery_knows_the_steps_of_skipped_calls():
    training = Training(mlp, torch.optim.AdamW)
    step = gt.compile(training.step)
    for _ in range(8):
        step()
    eager = Training(mlp, torch.optim.AdamW)
    for _ in range(8):
        eager.step()
    histories = [gt.client.optimizer_step_hooks._histories[each.optimizer] for each in (training, eager)]
    states = [[list(each.state.values()) for each in history.steps] for history in histories]
    assert [len(each) for each in states[0]] == [len(each) for each in states[1]]
    assert [each[0]["step"] for each in states[0][1:]] == [each[0]["step"] for each in states[1][1:]]
    assert all(each.begin < each.end for each in histories[0].steps)


# Instructions


def test_a_skipped_call_sends_the_instructions_of_the_function():
    @gt.compile
    def chain(x):
        for _ in range(20):
            x = (x * 1.5 + 0.5).sin()
        return x

    x = gt.randn(4)
    results = [chain(x) for _ in range(6)]
    outbox = active_session.active.outbox
    outbox.flush()
    ops = [each for each in outbox.tape if isinstance(each, RunOp)]
    last, before = ops[-60:], ops[-120:-60]
    assert [each.op_id for each in last] == [each.op_id for each in before]
    assert [each.site for each in last] == [each.site for each in before]
    assert_equal(values(results[:1]), values(results[5:]))


def test_tensors_that_die_inside_are_freed_inside(two_virtual):

    @gt.compile
    def chain(x):
        for _ in range(50):
            x = x + 1.0
        return x

    x = gt.zeros(64, 1024)
    for _ in range(5):
        chain(x)
    assert chain.skipped
    with gt.debug.memory() as memory:
        chain(x)
        gt.synchronize()
    assert memory.peak < 20 * 64 * 1024 * 4


def test_results_are_freed_when_they_are_dropped():
    step = gt.compile(lambda x: x + 1)
    x = gt.zeros(8)
    for _ in range(6):
        result = step(x)
    ident = result._ref.id
    del result
    outbox = active_session.active.outbox
    outbox.flush()
    assert ident in [ident for each in outbox.tape if type(each).__name__ == "FreeTensors" for ident in each.ids]


# Results


def test_structure_and_identity_of_results(anywhere):
    weight = gt.ones(3)

    @gt.compile
    def function(x):
        y = x * 2
        return {"new": y, "view": y[1:], "argument": x, "captured": weight, "number": 7, "rest": [None, (x[0],)]}

    for _ in range(6):
        x = gt.randn(3)
        found = function(x)
        assert found["argument"] is x
        assert found["captured"] is weight
        assert found["number"] == 7
        assert found["rest"][0] is None
        assert found["rest"][1][0].shape == ()
        found["new"].zero_()
        assert found["view"].tolist() == [0.0, 0.0]
    assert (function.checked, function.skipped) == (2, 1)


def test_results_are_new_tensors_in_each_call():
    function = gt.compile(lambda x: x + 1)
    results = [function(gt.full((2,), float(number))) for number in range(6)]
    assert [result.tolist() for result in results] == [[number + 1.0] * 2 for number in range(6)]


@pytest.mark.parametrize("calls", [1, 5])
def test_backward_outside_of_the_function_is_refused(calls):
    weight = gt.ones(3, requires_grad=True)
    function = gt.compile(lambda x: (x * weight).sum())
    for _ in range(calls):
        loss = function(gt.ones(3))
    assert loss.requires_grad
    assert not loss.is_leaf
    with pytest.raises(gt.CompileError, match="call backward inside of the function"):
        loss.backward()


def test_inference_of_a_module():
    model = gt.to(noisy()).eval()
    compiled = gt.compile(model)
    with torch.no_grad():
        for _ in range(6):
            x = gt.randn(5, 8)
            assert torch.equal(compiled(x).cpu(), model(x).cpu())
    assert (compiled.checked, compiled.skipped) == (1, 1)  # the first call asks a worker for the shapes of batch norm
    assert len(list(compiled.parameters())) == len(list(model.parameters()))


# In place


def test_tensors_that_are_written_in_place(anywhere):
    count, plain_count = gt.zeros(3), torch.zeros(3)

    def add(target, x):
        target[1:].add_(x)
        return target * 2

    function = gt.compile(add)
    for number in range(7):
        x = torch.full((2,), float(number))
        assert torch.equal(function(count, gt.to(x)).cpu(), add(plain_count, x))
        assert torch.equal(count.cpu(), plain_count)
    assert function.skipped


def test_writes_are_counted_for_autograd():
    weight = gt.ones(3, requires_grad=True)

    @gt.compile
    def update():
        with torch.no_grad():
            weight.mul_(0.5)
            weight.add_(1.0)

    for _ in range(5):
        update()
    version = weight._version
    loss = (weight * weight).sum()
    update()
    assert weight._version == version + 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_is_replaced_in_the_function(anywhere):
    """`x.data = ...` in the function, and outside of it."""
    state = gt.ones(3)

    @gt.compile
    def function(x):
        state.data = state * 2 + x
        return state.sum()

    expected = torch.ones(3)
    for number in range(8):
        if number == 6:
            state.data = gt.zeros(3)
            expected = torch.zeros(3)
        expected = expected * 2 + number
        assert function(gt.full((3,), float(number))).item() == expected.sum().item()
    assert function.skipped == 3


def test_tied_arguments():
    def function(x, y):
        x.add_(1)
        return y * 2

    compiled = gt.compile(function)
    for number in range(10):
        first, second = gt.zeros(2), gt.ones(2)
        pair = (first, first) if number % 2 else (first, second)
        assert compiled(*pair).tolist() == [2.0, 2.0]
    assert compiled.skipped


def test_an_argument_that_is_also_part_of_the_state():
    weight = gt.ones(2)
    function = gt.compile(lambda x: x * 10 + weight)
    for _ in range(5):
        assert function(weight).tolist() == [11.0, 11.0]
    assert function(gt.zeros(2)).tolist() == [1.0, 1.0]


def test_gradients_of_arguments(anywhere):
    def penalised(x):
        loss = (x * x * x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (gradient.square().sum() + loss).backward()
        return gradient.detach()

    compiled = gt.compile(penalised)
    for number in range(6):
        x, plain = gt.full((3,), float(number)), torch.full((3,), float(number))
        x.requires_grad_(), plain.requires_grad_()
        assert torch.equal(compiled(x).cpu(), penalised(plain))
        assert torch.equal(x.grad.cpu(), plain.grad)
    assert (compiled.checked, compiled.skipped) == (2, 1)


def test_an_argument_with_a_gradient_accumulates():
    compiled = gt.compile(lambda x: (x * 2).sum().backward())
    x = gt.ones(2, requires_grad=True)
    for number in range(6):
        assert compiled(x) is None
        assert x.grad.tolist() == [2.0 * (number + 1)] * 2
    x.grad = None
    compiled(x)
    assert x.grad.tolist() == [2.0, 2.0]
    assert compiled.skipped


def test_tied_weights(anywhere):
    def tied():
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second, nn.Linear(8, 4))

    compare(lambda: Training(tied, torch.optim.AdamW))


def test_frozen_parameters_and_unused_ones():
    def partly():
        model = mlp()
        model[0].weight.requires_grad_(False)
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model

    compare(lambda: Training(partly, torch.optim.AdamW))


def test_two_optimizers():
    def make():
        training = Training(mlp, lambda p: torch.optim.AdamW(list(p)[:2], lr=0.01))
        training.other = torch.optim.SGD(list(training.model.parameters())[2:], lr=0.1, momentum=0.5)
        return training

    def step_of(training):
        def step():
            loss = training.step()
            training.other.step()
            training.other.zero_grad()
            return loss

        return step

    compare(make, step_of)


# What is recorded anew


def test_new_shapes_are_recorded_anew():
    function = gt.compile(lambda x: x * x.shape[0])
    for _ in range(5):
        for size in (2, 3):
            assert function(gt.ones(size)).tolist() == [float(size)] * size
    assert (function.recorded, function.checked, function.skipped) == (6, 2, 2)


def test_the_number_of_recordings_is_bounded():
    function = gt.compile(lambda x: x + 1)
    bounded = pytest.warns(RuntimeWarning, match=f"more than {MAX_SPECIALIZATIONS} kinds of arguments")
    with bounded, pytest.warns(RuntimeWarning, match="in all of its 12 calls so far: its arguments differ"):
        results = [function(gt.zeros(size)).tolist() for size in range(1, MAX_SPECIALIZATIONS + 3)]
    assert results == [[1.0] * size for size in range(1, MAX_SPECIALIZATIONS + 3)]


@pytest.mark.parametrize("change", ["training", "grad mode", "dtype", "requires_grad", "attribute", "global", "weight"])
def test_a_changed_state_is_recorded_anew(change, monkeypatch):
    model = gt.to(nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2, bias=False)))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    function = gt.compile(lambda x: model(x) * FACTOR + torch.ones(1).to(torch.get_default_dtype()))  # noqa: F821
    plain = lambda x: function._function(x)
    x = gt.ones(1, 2)

    def check():
        compiled, expected = function(x), plain(x)
        assert torch.equal(compiled.cpu(), expected.cpu())
        assert compiled.dtype == expected.dtype
        assert compiled.requires_grad == expected.requires_grad

    for _ in range(5):
        check()
    skipped = function.skipped
    assert skipped
    if change == "training":
        model.eval()
    elif change == "requires_grad":
        model.requires_grad_(False)
    elif change == "attribute":
        model[0].p = 0.0
    elif change == "global":
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
    elif change == "weight":
        model[1].weight = nn.Parameter(gt.ones(2, 2))
    if change == "grad mode":
        with torch.no_grad():
            check()
    elif change == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            check()
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        check()
    assert function.skipped == skipped


def test_a_loaded_state_of_the_optimizer():
    training = Training(mlp, torch.optim.AdamW)
    step = gt.compile(training.step)
    eager = Training(mlp, torch.optim.AdamW)
    for each, function in ((training, step), (eager, eager.step)):
        for _ in range(5):
            function()
        state = copy.deepcopy(each.optimizer.state_dict())
        function()
        each.optimizer.load_state_dict(state)
        for _ in range(5):
            function()
    assert_equal(values(training.tensors()), values(eager.tensors()))


def test_steps_outside_of_the_function_are_counted():
    def between(training, number):
        if number in (4, 6):
            training.step()

    compare(lambda: Training(mlp, torch.optim.AdamW), calls=10, between=between)


def test_signals_that_change(two_virtual):
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 1])))

    @gt.compile
    def function(x):
        with gt.signal.context("rows"):
            return x * 2 + gt.ones(4, 4)

    x = gt.ones(4, 4)
    for _ in range(5):
        function(x)
    first = function(x).spec
    skipped = function.skipped
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=1, workers=[0, 1])))
    second = function(x)
    assert function.skipped == skipped
    assert second.spec != first
    assert torch.equal(second.cpu(), torch.full((4, 4), 3.0))
    for _ in range(5):
        assert function(x).spec == second.spec
    assert function.skipped > skipped


def test_the_scope_around_a_call(two_virtual):
    gt.register_config("columns", gt.SignalConfig(shard=gt.ShardConfig(axis=1, workers=[0, 1])))
    function = gt.compile(lambda x: x @ x + gt.zeros(4, 4))
    x = gt.ones(4, 4)
    outside = [function(x).spec for _ in range(5)]
    with gt.signal.context("columns"):
        inside = [function(x).spec for _ in range(5)]
        expected = function._function(x).spec
    assert set(map(str, outside)) != set(map(str, inside))
    assert set(map(str, inside)) == {str(expected)}
    assert (function.checked, function.skipped) == (2, 2)


def test_another_session(no_session):
    training = []
    function = gt.compile(lambda x: x + 1)
    for _ in range(2):
        gt.init()
        training.append([function(gt.zeros(2)).tolist() for _ in range(5)])
        gt.shutdown()
    assert training == [[[1.0, 1.0]] * 5] * 2
    assert (function.checked, function.skipped) == (2, 2)


def test_a_lost_worker(processes):
    function = gt.compile(lambda x: x * 2 + torch.arange(4.0))
    x = gt.ones(4)
    for _ in range(5):
        function(x)
    skipped = function.skipped
    active_session.active.workers = tuple(active_session.active.workers[:1])  # as after the news of a loss
    assert function(x).tolist() == [2.0, 3.0, 4.0, 5.0]
    assert function.skipped == skipped


# Numbers


def test_numbers_that_are_arguments():
    def function(x, rate, decay=0.5):
        return x.mul_(1 - decay).add_(x, alpha=-rate) * rate

    compiled = gt.compile(function)
    x, plain = gt.ones(3), torch.ones(3)
    for number in range(12):
        rate, decay = 0.1 / (number + 1), 0.25 if number < 7 else 0.75
        assert torch.equal(compiled(x, rate, decay=decay).cpu(), function(plain, rate, decay=decay))
        assert torch.equal(x.cpu(), plain)
    assert (compiled.recorded, compiled.checked, compiled.skipped) == (6, 3, 3)


def test_an_argument_that_changes_now_and_then():
    compiled = gt.compile(lambda x, rate: x * rate)
    x = gt.ones(2)
    rates = [0.1] * 5 + [0.2] * 5 + [0.3, 0.4, 0.5]
    assert [compiled(x, rate)[0].item() for rate in rates] == pytest.approx(rates)
    assert compiled.recorded == 6  # the second value shows that the number is the argument


def test_a_branch_on_an_argument():
    def function(x, rate):
        return x * 2 if rate > 0.5 else x * rate

    compiled = gt.compile(function)
    x, plain = gt.ones(1), torch.ones(1)
    for rate in [0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 0.4, 0.4, 0.4, 0.4]:
        assert compiled(x, rate).item() == function(plain, rate).item()


def test_whole_numbers_and_texts_are_recorded_by_value():
    def function(x, power, name):
        return x.pow(power) if name == "power" else x * power

    compiled = gt.compile(function)
    for _ in range(5):
        for power, name in ((2, "power"), (3, "power"), (3, "product")):
            assert (
                compiled(gt.full((1,), 2.0), power, name).item() == function(torch.full((1,), 2.0), power, name).item()
            )
    assert (compiled.checked, compiled.skipped) == (3, 3)


def test_a_number_that_changes_names_its_line():
    steps = 0

    @gt.compile
    def function(x):
        return x * (1.0 / steps)  # this line

    def next_call():
        nonlocal steps
        steps += 1
        return function(gt.ones(1)).item()

    with pytest.warns(
        RuntimeWarning, match=r"test_compiled_function.py:\d+: aten.mul.* changes from call to call"
    ) as seen:
        results = [next_call() for _ in range(8)]
    assert results == pytest.approx([1.0 / n for n in range(1, 9)])
    assert len(seen) == 1
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(number for number, text in lines if text.endswith("# this line"))
    assert f":{line}:" in str(seen[0].message)
    assert function.skipped == 0


def test_a_counter_that_no_op_uses_counts_the_calls_that_run_the_code():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + 1

    model = Counting()
    compiled = gt.compile(model)
    call(compiled, gt.ones(1), 9)
    assert (compiled.recorded, compiled.checked, compiled.skipped) == (3, 2, 4)
    assert model.calls == 5


def test_a_flag_that_the_function_changes_and_its_ops_depend_on_is_refused():
    model = nn.Module()
    model.flag = False

    def function(x):
        model.flag = not model.flag
        return x + 1 if model.flag else x * 3

    compiled = gt.compile(function)
    with pytest.warns(RuntimeWarning, match=r"it changes model\.flag, on which it may depend"):
        assert [compiled(gt.ones(1)).item() for _ in range(MAX_ATTEMPTS)] == [2.0, 3.0] * (MAX_ATTEMPTS // 2)
    assert compiled.skipped == 0


@pytest.mark.parametrize("inside", [True, False])
def test_a_schedule_or_a_rate_that_is_set_inside_is_refused(inside):
    training = Training(mlp, torch.optim.SGD)
    eager = Training(mlp, torch.optim.SGD)

    def step_of(each):
        schedule = torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.5)

        def step():
            loss = each.step()
            if inside:
                schedule.step()
            else:
                each.optimizer.param_groups[0]["lr"] = 0.001
            return loss

        return step

    with pytest.warns(RuntimeWarning, match="it sets 'lr'|it changes"):
        result = run(training, gt.compile(step_of(training)), calls=MAX_ATTEMPTS + 2)
    assert_equal(result, run(eager, step_of(eager), calls=MAX_ATTEMPTS + 2))


def test_random_numbers_of_torch_for_something_else_than_ops_are_refused():
    function = gt.compile(lambda x: x + (1.0 if torch.rand(()).item() > 2 else 2.0))
    with pytest.warns(RuntimeWarning, match="random"):
        call(function, gt.ones(1), MAX_ATTEMPTS)
    assert function.skipped == 0


def test_a_generator_of_the_program():
    generator = torch.Generator().manual_seed(3)
    function = gt.compile(lambda: gt.zeros(4).normal_(generator=generator) + gt.rand(4))
    torch.manual_seed(5)
    found = [function().cpu() for _ in range(6)]
    assert (function.checked, function.skipped) == (2, 1)
    generator.manual_seed(3)
    torch.manual_seed(5)
    assert_equal(found, [function._function().cpu() for _ in range(6)])


# Checks


def depends_on_sign(x, box):
    return x.sin() if box.value > 0 else x.cos()


def depends_on_count(x, box):
    for _ in range(box.value):
        x = x + 1
    return x


def depends_on_tensors(x, box):
    return x + (box.value if isinstance(box.value, torch.Tensor) else box.value[0])


def changes_its_argument(x, box):
    return (x.requires_grad_() if box.value else x).detach() * 2


DIFFERENCES = [
    (lambda x, box: x * box.value, 2.0, 3.0, r"aten.mul.Tensor gets the number 3.0 in place of 2.0\."),
    (lambda x, box: x * box.value, 2, 2.0, r"aten.mul.Tensor gets the number 2.0 in place of 2\."),
    (depends_on_sign, 1, -1, r"aten.cos.default\(\) -> float32\[3\] in place of aten.sin.default"),
    (lambda x, box: x[: box.value] + 1, 2, 3, r"float32\[3\] in place of aten.add.Tensor\(1\) -> float32\[2\]"),
    (depends_on_count, 2, 3, r"aten.add.Tensor\(1\) -> float32\[3\] in place of the end of the call"),
    (depends_on_count, 2, 1, "the end of the call in place of aten.add.Tensor"),
    (depends_on_tensors, [torch.ones(3)], [torch.zeros(3)], "aten.add.Tensor.* uses another tensor or constant"),
    (lambda x, box: (x + 1, box.value), 0, 1, "it returns 1 in place of 0"),
    (lambda x, box: [x + n for n in (1, 2)][:: box.value], 1, -1, "it returns another tensor"),
    (changes_its_argument, False, True, "it changes attributes, hooks, gradients or requires_grad of the argument"),
]


@pytest.mark.parametrize(("function", "before", "after", "found"), DIFFERENCES)
def test_a_check_tells_the_line_the_difference_and_the_calls_that_may_be_wrong(function, before, after, found):
    box = Box(before)
    compiled = gt.compile(lambda x: function(x, box), check_every=8)
    call(compiled, gt.ones(3), 8)
    box.change(after)
    call(compiled, gt.ones(3), 2)
    with pytest.raises(gt.CompileError, match=rf"^.*test_compiled_function.py:\d+: .*{found}") as error:
        call(compiled, gt.ones(3), 1)
    assert "Skipped since the last check that agreed: 4 calls, whose results may be wrong." in str(error.value)
    assert error.traceback[-1].path.name == "test_compiled_function.py"
    checked = compiled.checked
    if function is not changes_its_argument:
        call(compiled, gt.ones(3), 6)  # recorded anew
        assert compiled.checked == checked + 2


@pytest.mark.parametrize(("check_every", "expected"), [(1, (6, 0)), (2, (3, 3)), (3, (3, 3)), (64, (2, 4))])
def test_the_second_and_the_third_call_and_one_of_each_n_run_the_code(check_every, expected):
    compiled = gt.compile(lambda x: x + 1, check_every=check_every)
    call(compiled, gt.ones(1), 3 + 6)
    assert (compiled.checked, compiled.skipped) == expected


@pytest.mark.parametrize("check_every", [0, -1, 1.5, None])
def test_wrong_intervals_of_checks_are_refused(check_every):
    with pytest.raises(ValueError, match="check_every of gt.compile is a whole number of calls, at least 1, not"):
        gt.compile(lambda x: x, check_every=check_every)


def test_a_value_that_the_code_does_not_name_and_that_makes_no_difference_is_no_longer_looked_at():
    holder = Holder()
    function = gt.compile(lambda x: x * holder.tensor)
    for number in range(9):
        function(gt.ones(2))
        holder.count += 1
        holder.late = number > 5
    assert (function.recorded, function.checked, function.skipped) == (4, 2, 3)


def test_a_check_meets_an_effect_that_comes_at_regular_intervals():
    box = Box(0)
    compiled = gt.compile(lambda x: x + 1 if box.value % 8 == 7 else x * 3, check_every=4)

    def count_up():
        for number in range(200):
            box.change(number)
            compiled(gt.ones(1))

    with pytest.raises(gt.CompileError, match="aten.add.Tensor"):
        count_up()


def test_a_constant_that_is_uploaded_anew_is_no_difference():
    box = Box(torch.ones(3))
    compiled = gt.compile(lambda x: x + box.value, check_every=2)
    for _ in range(9):
        compiled(gt.ones(3))
        active_session.active.upload_cache.forget()
    assert compiled.checked == 3


# Plain tensors


def test_plain_arguments_are_moved_to_gt():
    function = gt.compile(lambda x: x * 2)
    for number in range(6):
        assert function(torch.full((2,), float(number))).tolist() == [2.0 * number] * 2
    assert (function.checked, function.skipped) == (2, 1)


def test_plain_tensors_of_the_state_are_read_in_each_call():
    first, second = torch.ones(2), torch.ones(2)
    function = gt.compile(lambda x: x * first + second)
    for number in range(12):
        assert function(gt.ones(2)).tolist() == (first + second).tolist()
        if number > 4:
            second += 1
    assert function.skipped


def test_constants_that_the_function_computes_from_plain_tensors():
    mask = torch.zeros(4)
    function = gt.compile(lambda x: x + mask[1:3])
    for _ in range(5):
        assert function(gt.ones(2)).tolist() == [1.0, 1.0]
    assert (function.checked, function.skipped) == (1, 1)
    mask[1] = 5.0
    assert function(gt.ones(2)).tolist() == [6.0, 1.0]


def test_writing_to_a_plain_tensor_is_refused():
    count = torch.zeros(1)

    def count_up(x):
        count.add_(1)
        return x + 1

    function = gt.compile(count_up)
    with pytest.warns(RuntimeWarning, match="writes to a plain tensor"):
        call(function, gt.ones(1), MAX_ATTEMPTS + 1)
    assert count.item() == MAX_ATTEMPTS + 1


# Errors


@pytest.mark.parametrize("read", [
    lambda x: x.sum().item(),
    lambda x: print(x),
    lambda x: bool((x > 0).all()),
    lambda x: x.cpu(),
    lambda x: x.spec,
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
], ids=["item", "print", "bool", "cpu", "spec", "nonzero", "mask"])  # fmt: skip
def test_reads_inside_are_errors_that_name_the_line(read):
    function = gt.compile(lambda x: (read(x), x + 1)[1])
    with pytest.raises(gt.CompileError, match=r"test_compiled_function.py:\d+: a function of gt.compile"):
        function(gt.ones(3))
    assert (gt.ones(3) + 1).tolist() == [2.0] * 3  # the session goes on
    assert gt.ones(3).sum().item() == 3


class Holder:
    """An object with a tensor and a count."""

    def __init__(self):
        self.tensor = gt.ones(2)
        self.count = 0


def returning_a_number():
    return lambda x, rate: (x * rate, rate * 2), lambda number: (gt.ones(2), float(number))


def rows_of_a_tensor():
    base = gt.ones(40, 4)
    return lambda row: row * 2, lambda number: (base[number],)


def new_objects():
    return lambda holder: holder.tensor * 2, lambda _: (Holder(),)


def other_numbers():
    return lambda x, number: x * number, lambda number: (gt.ones(2), number)


def state_that_changes():
    holder = Holder()

    def arguments(number):
        holder.count = number
        return (gt.ones(2),)

    return lambda x: x * (2 if holder.count >= 0 else 3), arguments


@pytest.mark.parametrize(("make", "reason"), [
    (returning_a_number, "it compares or returns a number of a float argument"),
    (rows_of_a_tensor, "its arguments differ from call to call: the shape, strides, offset"),
    (new_objects, "its arguments differ from call to call: an object of type Holder"),
    (state_that_changes, "holder.count changes from call to call"),
    (other_numbers, "its arguments differ from call to call: a value of type int, such as 3"),
])  # fmt: skip
def test_a_function_that_is_never_skipped_has_a_reason_after_four_calls_and_warns_once(make, reason):
    function, arguments = make()
    compiled = gt.compile(function)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(4):
            compiled(*arguments(number))
        assert (compiled.recorded, compiled.skipped) == (4, 0)
        (found,) = compiled.reasons
        assert reason in found
        assert not seen
        for number in range(4, 20):
            compiled(*arguments(number))
    assert [Path(each.filename).name for each in seen] == ["test_compiled_function.py"]
    assert compiled.skipped == 0 and reason.partition(", such")[0] in str(seen[0].message)


def test_a_function_that_is_skipped_after_some_calls_has_no_reason():
    function = gt.compile(lambda x: x * 2)
    for number in range(12):
        function(gt.ones(1 + number % 4))
    assert function.reasons == []


@pytest.mark.parametrize("wrong", [
    lambda x: x @ torch.ones_like(x)[:2],
    lambda x: torch.cat([x, x.view(3, 1)]),
    lambda x: x.view(2, 2),
    lambda x: x.long().mean(),
    lambda x: x.long().add_(1.5),
    lambda x: x[:2].add_(x[1:]),
    lambda x: x[:1].expand(3).add_(1),
    lambda x: nn.functional.linear(x, x.view(1, 3).double()),
], ids=["dot", "cat", "view", "mean", "add_", "overlap", "expanded", "linear"])  # fmt: skip
def test_wrong_calls_inside_raise_torchs_own_errors(wrong):
    with pytest.raises(Exception) as expected:
        wrong(torch.ones(3))
    x, function = gt.ones(3), gt.compile(wrong)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as error:
            function(x)
        assert str(error.value) == str(expected.value)
        assert error.traceback[-1].path.name == "test_compiled_function.py"
    assert (x + 1).tolist() == [2.0] * 3


def test_a_function_that_catches_torchs_error_runs_its_code():
    def function(x):
        try:
            return x @ torch.ones_like(x)[:2]
        except RuntimeError:
            return x * 2

    compiled = gt.compile(function)
    with pytest.warns(RuntimeWarning, match="a worker was asked"):
        assert [compiled(gt.ones(3)).tolist() for _ in range(MAX_ATTEMPTS)] == [[2.0] * 3] * MAX_ATTEMPTS


def test_uploads_inside_are_errors_that_name_the_line():
    function = gt.compile(lambda x: x + gt.tensor([1.0, 2.0]))
    with pytest.raises(gt.CompileError, match=r"test_compiled_function.py:\d+: .* uploads data"):
        function(gt.ones(2))


def test_a_tensor_that_is_kept_elsewhere_is_refused():
    kept = []

    def function(x):
        kept.append(x * 2)
        return x + 1

    compiled = gt.compile(function)
    with pytest.warns(RuntimeWarning, match=r"test_compiled_function.py:\d+ makes a tensor that is still in use"):
        call(compiled, gt.ones(1), MAX_ATTEMPTS + 1)
    assert len(kept) == MAX_ATTEMPTS + 1


class Box:
    """Objects in objects, deeper than GT looks."""

    def __init__(self, value, depth=4):
        self.inner = Box(value, depth - 1) if depth else value

    @property
    def value(self):
        return self.inner.value if isinstance(self.inner, Box) else self.inner

    def change(self, value):
        if isinstance(self.inner, Box):
            self.inner.change(value)
        else:
            self.inner = value


def test_tensors_modules_and_optimizers_that_cannot_be_reached_are_held(anywhere):
    def make():
        training = Training(noisy, torch.optim.AdamW)
        training.box = Box((training.model, training.optimizer, training.batch, gt.ones(1)))
        return training

    def step_of(training):
        box = training.box

        def step():
            model, optimizer, batch, scale = box.value
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]) * scale, batch[1])
            loss.backward()
            optimizer.step()
            return loss

        return step

    def between(training, number):
        if number == 8:
            training.model.eval()  # looked at, although the function does not reach the module

    compare(make, step_of, calls=16, between=between)


def test_a_parameter_that_cannot_be_reached_gets_gradients():
    box = Box(gt.ones(2, requires_grad=True))
    weight = box.value

    def function(x):
        (box.value * x).sum().backward()

    compiled = gt.compile(function)
    for number in range(8):
        compiled(gt.ones(2))
        assert weight.grad.tolist() == [number + 1.0] * 2
    assert compiled.skipped == 2, compiled.reasons


def test_tensors_that_cannot_be_reached_and_change_are_found_by_a_check():
    box = Box([gt.ones(1)])
    compiled = gt.compile(lambda x: x * box.value[0], check_every=4)
    call(compiled, gt.ones(1), 8)
    box.value[0] = gt.zeros(1)
    with pytest.raises(gt.CompileError, match=r"test_compiled_function.py:\d+: .*tensor"):
        call(compiled, gt.ones(1), 4)
    assert compiled(gt.ones(1)).item() == 0


def test_other_tensors_in_each_call_that_cannot_be_reached_are_refused_and_not_held():
    box = Box([gt.ones(1)])
    compiled = gt.compile(lambda x: x * box.value.pop())
    used = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(MAX_ATTEMPTS + 2):
            box.value.append(gt.full((1,), float(number)))
            used.append(weakref.ref(box.value[-1]))
            assert compiled(gt.ones(1)).item() == number
    gc.collect()
    assert "it uses a tensor that no earlier call has used" in compiled.reasons[0] and compiled.skipped == 0
    assert [each() for each in used] == [None] * len(used)


def test_objects_in_state_are_looked_at():
    box = Box(2.0)
    inner = box.inner.inner.inner.inner
    compiled = gt.compile(lambda x: x * box.value, state=[inner])
    for number in range(12):
        inner.inner = 2.0 if number < 7 else 3.0
        assert compiled(gt.ones(1)).item() == inner.inner
    assert compiled.skipped == 3


def test_an_exception_in_the_function():
    fails = [False]

    def function(x):
        y = x * 2
        if fails[0]:
            raise KeyError("mine")
        return y + 1

    compiled = gt.compile(function)
    compiled(gt.ones(1))
    fails[0] = True
    with pytest.raises(KeyError, match="mine"):
        compiled(gt.ones(1))
    fails[0] = False
    assert [compiled(gt.ones(1)).item() for _ in range(6)] == [3.0] * 6
    assert compiled.skipped


def test_a_failure_on_a_worker_names_the_line_of_the_function():
    table = gt.ones(3, 2)
    function = gt.compile(lambda index: torch.nn.functional.embedding(index, table))  # the lookup
    for _ in range(5):
        function(gt.to(torch.tensor([1])))
    assert function.skipped
    with pytest.raises(Exception, match="test_compiled_function.py"):
        function(gt.to(torch.tensor([7]))).sum().item()


# Composition


def test_nested_functions_are_part_of_the_outer_recording():
    inner = gt.compile(lambda x: x * 2)
    outer = gt.compile(lambda x: inner(x) + 1)
    assert [outer(gt.ones(1)).item() for _ in range(6)] == [3.0] * 6
    assert (outer.checked, outer.skipped, inner.recorded, inner.skipped) == (2, 1, 0, 0)


def test_a_call_inside_of_backward_runs_the_function():
    scale = gt.compile(lambda gradient: gradient * 2)
    weight = gt.ones(2, requires_grad=True)
    for _ in range(5):
        weight.grad = None
        product = weight * 3
        product.register_hook(scale)
        product.sum().backward()
        assert weight.grad.tolist() == [6.0, 6.0]
    assert scale.recorded == 0


def test_other_threads_go_on_while_a_call_is_recorded():
    started, done = threading.Event(), threading.Event()
    results = []

    def other():
        started.wait(10)
        results.extend((gt.ones(2) * number).sum().item() for number in range(5))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def function(x):
        y = x * 2
        started.set()
        done.wait(10)
        return y + 1

    compiled = gt.compile(function)
    assert [compiled(gt.ones(1)).item() for _ in range(6)] == [3.0] * 6
    thread.join()
    assert results == [2.0 * number for number in range(5)]
    assert (compiled.checked, compiled.skipped) == (2, 1)


def test_threads_that_call_the_same_function():
    function = gt.compile(lambda x: x * 2 + 1)
    found = {}

    def call(number):
        found[number] = [function(gt.full((1,), float(number))).item() for _ in range(10)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [2.0 * number + 1] * 10 for number in range(4)}


def test_a_copy_has_recordings_of_its_own():
    model = gt.compile(gt.to(nn.Linear(2, 2)))
    with torch.no_grad():
        for _ in range(5):
            model(gt.ones(1, 2))
        other = copy.deepcopy(model)
        assert other.checked == 0
        other.weight.zero_()
        for _ in range(5):
            assert torch.equal(other(gt.ones(1, 2)).cpu()[0], other.bias.cpu())
    assert other.weight is not model.weight
    assert (other.checked, other.skipped) == (1, 1)


def test_methods():
    class Model:
        def __init__(self, factor):
            self.weight = gt.full((2,), factor)

        @gt.compile
        def double(self, x):
            """Twice the product."""
            return x * self.weight * 2

    for factor in (1.0, 3.0):
        model = Model(factor)
        for _ in range(5):
            assert model.double(gt.ones(2)).tolist() == [2 * factor] * 2
    assert (Model.double.checked, Model.double.skipped) == (2, 2)
    assert Model.double.__doc__ == "Twice the product."


def test_only_functions_are_taken():
    with pytest.raises(TypeError, match="takes a function or a module, not int"):
        gt.compile(3)


def test_nothing_is_kept_alive():
    function = gt.compile(lambda x: x * 2)
    for _ in range(6):
        x = gt.ones(4)
        result = function(x)
    ids = [x._ref.id, result._ref.id]
    del x, result
    gc.collect()
    outbox = active_session.active.outbox
    outbox.flush()
    freed = {ident for each in outbox.tape if type(each).__name__ == "FreeTensors" for ident in each.ids}
    assert freed >= set(ids)
    assert math.isfinite(function(gt.ones(4)).sum().item())


def test_parameters_that_share_memory_through_data():
    def trained(model, compile_=lambda function: function):
        model[1].weight.data = model[0].weight.data
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @compile_
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        x = torch.linspace(-1, 1, 32).view(8, 4)
        return [step(x).item() for _ in range(8)], step

    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    moved = gt.to(copy.deepcopy(plain))
    expected, _ = trained(plain)
    losses, step = trained(moved, gt.compile)
    assert losses == pytest.approx(expected, abs=1e-5) and step.skipped
