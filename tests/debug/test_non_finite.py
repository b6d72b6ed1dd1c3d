"""`gt.debug.find_nan`: the op, the line and the worker that made the first NaN or infinity."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gt
from gt.core.messages import NonFiniteCall
from gt.debug.non_finite import first_origin


def found_in(act, **options):
    """The op that a block finds."""
    search = gt.debug.find_nan(**options)
    with pytest.raises(gt.NonFiniteError), search:
        act()
    return search.found


def finds_nothing(act, **options):
    with gt.debug.find_nan(**options) as search:
        act()
    return search.found is None


def test_the_error_names_the_line_the_op_the_worker_and_the_inputs(embedded):
    x = gt.tensor([0.0, 3.0])
    with pytest.raises(gt.NonFiniteError) as caught, gt.debug.find_nan() as search:
        y = x + 0
        z = y.log()
        z.exp()
    assert search.found.op == "aten.log.default"
    assert (search.found.made, search.found.workers) == ("infinity", (0,))
    assert search.found.inputs == ("float32[2] finite from 0 to 3",)
    text = str(caught.value)
    assert "test_non_finite.py" in text and "z = y.log()" in text and "on worker 0" in text


def test_a_read_of_a_value_that_is_not_finite_raises(anywhere):
    x = gt.tensor([-1.0])
    with pytest.raises(gt.NonFiniteError, match=r"aten\.sqrt\.default"), gt.debug.find_nan():
        y = x.sqrt()
        x.item()
        y.sum().item()
        pytest.fail("the read did not raise")


def test_backward_is_searched(anywhere):
    x = gt.tensor([0.0, 1.0]).requires_grad_()
    found = found_in(lambda: x.sqrt().sum().backward())
    assert found.op.startswith("aten.") and found.made == "infinity"
    assert "test_non_finite.py" in found.line


def test_writes_are_searched(anywhere):
    x = gt.tensor([1.0, 0.0])
    found = found_in(lambda: x.reciprocal_())
    assert (found.op, found.made) == ("aten.reciprocal_.default", "infinity")
    assert found.inputs == ("float32[2] finite from 0 to 1",)


def test_inputs_are_described_as_they_were_before_an_exchange_that_replaces_them():
    gt.init(workers=2, mode="virtual")
    try:
        x = gt.distribute(torch.full((4, 4), 1e38), gt.mesh(2, ("x",)), "x, -")
        found = found_in(lambda: x.sum(0).relu())
        assert found.op == "redistribute (all-reduce)"
        assert found.inputs == ("float32[4] finite from 2e+38 to 2e+38",)
    finally:
        gt.shutdown()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_steps_of_optimizers_are_searched(anywhere, options):
    model = gt.to(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38, **options)
    functional.mse_loss(model(gt.ones(4, 2)), gt.full((4, 2), 100.0)).backward()
    found = found_in(optimizer.step)
    assert found.made in ("infinity", "NaN and infinity")


def test_a_step_that_runs_in_segments_is_searched(anywhere):
    x = gt.ones(4)
    limits = [1.0] * 40 + [3e38] + [1.0] * 5

    def act():
        y = x
        for factor in limits:
            for _ in range(4):
                y = (y * factor).sin()
                y = (y + 2.0) * factor

    act_again = found_in(act)
    assert (act_again.op, act_again.made) == ("aten.mul.Tensor", "infinity")


def test_calls_of_compiled_functions_are_searched(anywhere):
    @gt.compile
    def scaled(x, y):
        return (x * y).sin() + 1

    x = gt.ones(4)
    for _ in range(4):
        scaled(x, gt.tensor(2.0))
    found = found_in(lambda: scaled(x * 3e38, gt.tensor(2.0)))
    assert (found.op, found.made) == ("aten.mul.Tensor", "infinity")


def test_values_from_before_are_not_blamed_on_their_users(anywhere):
    x = gt.tensor([float("nan"), float("inf"), 1.0])
    assert finds_nothing(lambda: (x * 2 + 1).sum())
    assert finds_nothing(lambda: gt.tensor([float("nan")]) + 1)


def test_infinity_that_the_program_asks_for_is_none(anywhere):
    mask = torch.ones(3, 3).triu(1).bool()

    def attend():
        scores = gt.ones(3, 3).masked_fill(gt.to(mask), float("-inf"))
        bias = gt.full((3, 3), float("-inf")).triu(1)
        return (scores + bias).softmax(-1).sum()

    assert finds_nothing(attend)


def test_nan_out_of_infinity_is_found(anywhere):
    x = gt.full((2, 2), float("-inf"))
    found = found_in(lambda: x.softmax(-1))
    assert (found.op, found.made) == ("aten._softmax.default", "NaN")


def test_memory_without_values_is_none(embedded):
    assert finds_nothing(lambda: [torch.empty_like(gt.ones(1000)).fill_(1.0) for _ in range(10)])


def test_infinity_can_be_left_out(anywhere):
    x = gt.tensor([0.0])
    assert finds_nothing(lambda: x.log(), infinity=False)
    assert found_in(lambda: x.log() * 0.0, infinity=False).op == "aten.mul.Tensor"


def test_integers_are_finite(anywhere):
    assert finds_nothing(lambda: (gt.ones(3, dtype=torch.int64) + 1).float())


def test_searches_do_not_nest_and_end(embedded):
    with (
        gt.debug.find_nan(),
        pytest.raises(gt.SessionError, match="find_nan is on already"),
        gt.debug.find_nan(),
    ):
        pass
    assert (gt.tensor([0.0]).log()).item() == float("-inf")
    assert finds_nothing(lambda: gt.ones(3) + 1)


def test_another_error_gets_a_note(embedded):
    with pytest.raises(ZeroDivisionError) as caught, gt.debug.find_nan():
        gt.tensor([0.0]).log()
        raise ZeroDivisionError
    assert "aten.log.default" in caught.value.__notes__[0]


# --- Shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_virtual():
    gt.init(workers=2, mode="virtual")
    yield
    gt.shutdown()


def sharded(values, spec):
    return gt.distribute(values, gt.mesh(2, ("x",)), spec)


def check_shards():
    x = sharded(torch.tensor([[4.0], [1.0], [2.0], [0.0]]), "x, -")
    found = found_in(lambda: x.log())
    assert (found.op, found.workers, found.inputs) == (
        "aten.log.default", (1,), ("float32[2, 1] finite from 0 to 2",),
    )  # fmt: skip
    huge = sharded(torch.full((2, 3), 3e38), "x, -")
    found = found_in(lambda: huge.sum(0).relu())  # each part is finite, their sum is not
    assert found.made == "infinity" and found.workers == (0, 1)
    assert found.op == "redistribute (all-reduce)"
    bad = torch.ones(4, 2)
    bad[3, 1] = float("nan")
    late = sharded(bad, "x, -")
    assert finds_nothing(lambda: late.redistribute(placements="-, -") + 1)  # the NaN of the other worker's part


def test_parts_and_exchanges_are_searched(two_virtual):
    check_shards()


# --- The first of several ---------------------------------------------------------------------------------------------


def call(output, newest, *, is_origin=True, exchanges=False):
    return NonFiniteCall("aten.x.default", 1, output, newest, True, False, (), is_origin, exchanges)


def test_the_first_in_the_order_of_the_program_is_found():
    early, late = call(5, 5), call(9, 9)
    assert first_origin([(0, late), (1, early)]) == [(1, early)]
    assert first_origin([]) == []


def test_an_exchange_is_explained_by_the_inputs_of_any_worker():
    received, sent = call(5, 5, exchanges=True), call(5, 5, is_origin=False, exchanges=True)
    assert first_origin([(0, received), (1, sent)]) == []
    assert first_origin([(0, received), (1, received)]) == [(0, received), (1, received)]
