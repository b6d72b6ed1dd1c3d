"""gt.compile: when the calls of one kind of arguments are repeated, and when GT gives up recording them."""

import types

import pytest

import gt
from gt.client import active_session
from gt.client.compilation.call_arguments import CallArguments
from gt.client.compilation.specialization import MAX_ATTEMPTS, MAX_REPLAYABLE, RECORDED_CALLS, Specialization


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


def arguments(*args):
    return CallArguments(active_session.current(), args, {})


def record(specialization, function, *args):
    """Records one call. Returns its result, and why later calls are not skipped."""
    output, reason = specialization.record(function, arguments(*args), [("the function", function)])
    return output.item(), reason


def test_calls_that_agree_become_a_replayable_one():
    specialization = Specialization(64)
    for number in range(RECORDED_CALLS):
        assert not specialization.replayable
        assert record(specialization, lambda x: x * 2, gt.full((), float(number))) == (2.0 * number, "")
    (replayable,) = specialization.replayable
    call = arguments(gt.full((), 5.0))
    assert replayable.applies_to(call)
    assert replayable.run(call).item() == 10.0


def test_each_state_of_the_function_has_a_replayable_call():
    config, specialization = types.SimpleNamespace(is_negative=False), Specialization(64)

    def function(x):
        return -x if config.is_negative else x * 2

    for number in range(2 * RECORDED_CALLS):  # calls that agree need not follow each other
        config.is_negative = bool(number % 2)
        assert record(specialization, function, gt.ones(())) == ((-1.0 if number % 2 else 2.0), "")
    assert len(specialization.replayable) == 2
    for is_negative in (False, True):
        config.is_negative = is_negative
        assert [each.applies_to(arguments(gt.ones(()))) for each in specialization.replayable] == [
            not is_negative,
            is_negative,
        ]


def test_too_many_states_of_a_function_are_refused():
    config, specialization = types.SimpleNamespace(count=0), Specialization(64)

    def function(x):
        for _ in range(config.count):
            x = x + 1
        return x

    reasons = []
    for count in range(1, MAX_REPLAYABLE + 1):
        config.count = count
        reasons += [record(specialization, function, gt.zeros(()))[1] for _ in range(RECORDED_CALLS)]
    assert not any(reasons[:-1])
    assert reasons[-1] == specialization.refused
    assert f"it was recorded {MAX_REPLAYABLE} times for the same arguments" in specialization.refused
    assert len(specialization.replayable) == MAX_REPLAYABLE


def test_calls_that_never_agree_are_refused_after_some_attempts():
    specialization = Specialization(64)

    def power(count):
        def function(x):
            for _ in range(count):
                x = x * 2
            return x

        return function

    for count in range(1, MAX_ATTEMPTS + 1):
        result, reason = record(specialization, power(count), gt.ones(()))
        assert result == 2.0**count
        assert reason.startswith("its calls differ") == (count == MAX_ATTEMPTS)
    assert specialization.refused and not specialization.replayable


def test_a_scalar_that_changes_is_refused_with_its_line():
    specialization = Specialization(64)
    for number in range(RECORDED_CALLS):
        result, reason = record(specialization, lambda x, rate=float(number): x + rate, gt.zeros(()))
        assert result == number
    assert "test_specialization.py" in reason and "gets a number that changes from call to call" in reason
    assert reason == specialization.refused and not specialization.replayable
