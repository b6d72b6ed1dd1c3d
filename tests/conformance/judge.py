"""One sample in one variant: run on both sides and compared."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo.core import OpInfo

from tests.conformance.compare import (
    Exactness,
    Outcome,
    Raised,
    Returned,
    describe_exception,
    difference,
    find_stray,
    observe,
)
from tests.conformance.formats import Format, FormattedSide
from tests.conformance.sides import GTSide, PlainSide, Side
from tests.conformance.variants import Variant

SAMPLE_SECONDS, REPEAT_SECONDS = 60, 5
_SEEDS = range(1, 17)

# Whether an op is random is found out by running torch with other seeds; these give the same few values too often.
_FEW_VALUES = ("bernoulli", "multinomial", "randint", "randint_like", "geometric")
# Torch has another formula for the gradient of any tensor subclass (2.10), and for many forward derivatives.
_FORMULAS_OF_SUBCLASSES = ("cumprod",)
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class SampleTimeout(BaseException):
    """Not an Exception, so that what catches those to report them lets it through."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one stage: why it failed, or what both sides raise, or neither."""

    stage: str
    failure: str = ""
    both_raise: str = ""


def judge(
    variant: Variant, op: OpInfo, sample: Any, gt_side: GTSide, format_: Format | None = None
) -> list[Verdict]:  # fmt: skip
    """A failure is tried again in a new session: one that goes away there comes from what ran before."""
    was_fresh = gt_side.fresh
    verdicts = _judge_once(variant, op, sample, gt_side, format_)
    if was_fresh or not any(verdict.failure for verdict in verdicts):
        return verdicts
    gt_side.reopen()
    again = {verdict.stage: verdict for verdict in _judge_once(variant, op, sample, gt_side, format_)}
    return [
        Verdict(verdict.stage, f"not in a new session: {verdict.failure}")
        if verdict.failure and not again.get(verdict.stage, verdict).failure
        else verdict
        for verdict in verdicts
    ]


def _judge_once(
    variant: Variant, op: OpInfo, sample: Any, gt_side: GTSide, format_: Format | None
) -> list[Verdict]:  # fmt: skip
    try:
        with _time_limit():
            expected = _record(variant, op, sample, FormattedSide(PlainSide(), format_), 0)
            verdicts = _verdicts(expected, variant, op, sample, gt_side, format_)
            if not any(verdict.failure for verdict in verdicts):  # what was learned from the first call serves the next
                again = _verdicts(expected, variant, op, sample, gt_side, format_)
                verdicts = [replace(v, failure=f"the second time: {v.failure}") if v.failure else v for v in again]
    except SampleTimeout:
        verdicts = [Verdict(variant.stages[0], f"SampleTimeout: longer than {SAMPLE_SECONDS} s")]
    gt_side.drain()
    return verdicts


def _verdicts(
    expected: Sequence[Outcome], variant: Variant, op: OpInfo, sample: Any, gt_side: GTSide, format_: Format | None
) -> list[Verdict]:
    actual = _record(variant, op, sample, FormattedSide(gt_side, format_), 0)
    return [
        _compare(stage, place, expected, actual, variant, op, sample, gt_side.sums, format_)
        for place, stage in enumerate(variant.stages[: min(len(expected), len(actual))])
    ]


@contextmanager
def _time_limit() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise SampleTimeout

    handler = signal.signal(signal.SIGALRM, interrupt)
    # again every few seconds: an exception that meets a destructor or a weakref callback is swallowed there
    timer = signal.setitimer(signal.ITIMER_REAL, SAMPLE_SECONDS, REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest's own limit, where there is one
        signal.signal(signal.SIGALRM, handler)


def _record(variant: Variant, op: OpInfo, sample: Any, side: Side, seed: int) -> list[Outcome]:
    """The outcome of each stage; after one that raised there are no more."""
    torch.manual_seed(seed)
    outcomes: list[Outcome] = []
    steps = variant.steps(op, sample, side)
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", _unseeded):
        while len(outcomes) < len(variant.stages) and not (outcomes and isinstance(outcomes[-1], Raised)):
            outcomes.append(_record_step(steps, side))
    return outcomes


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For torch's wrapper around random ops, which sets the same seed each time and so hides that they are random."""
    return function(*args, **kwargs)


def _record_step(steps: Iterator[Any], side: Side) -> Outcome:
    try:
        seen = observe(next(steps))
        side.settle()
    except Exception as error:
        return Raised(describe_exception(error))
    return seen


def _compare(
    stage: str,
    place: int,
    expected: Sequence[Outcome],
    actual: Sequence[Outcome],
    variant: Variant,
    op: OpInfo,
    sample: Any,
    sums: bool,
    format_: Format | None,
) -> Verdict:
    left, right = expected[place], actual[place]
    if isinstance(right, Raised):
        return Verdict(stage, both_raise=left.reason) if isinstance(left, Raised) else Verdict(stage, right.reason)
    if isinstance(left, Raised):
        return Verdict(stage, f"torch raises, GT does not: {left.reason}")
    exactness = _exactness(op, sums, variant)
    found = difference(left, right, exactness)
    if found and exactness is not Exactness.METADATA and _is_random(left, place, variant, op, sample, format_):
        found = difference(left, right, Exactness.METADATA)
    if found and variant.intended is not None and format_ is not None:
        meant = replace(variant, steps=variant.intended)
        (left,) = _record(meant, op, sample, FormattedSide(PlainSide(), format_), 0)
        found = difference(left, right, exactness) if isinstance(left, Returned) else found
    return Verdict(stage, found or find_stray(right))


def _exactness(op: OpInfo, sums: bool, variant: Variant) -> Exactness:
    if op.name in (*_UNINITIALISED, *_FEW_VALUES):
        return Exactness.METADATA
    if sums:
        return Exactness.SUMS
    return Exactness.FORMULAS if variant.is_forward_mode or op.name in _FORMULAS_OF_SUBCLASSES else Exactness.VALUES


def _is_random(
    seen: Returned, place: int, variant: Variant, op: OpInfo, sample: Any, format_: Format | None
) -> bool:  # fmt: skip
    """Whether torch itself gives something else when the seed is another."""
    for seed in _SEEDS:
        others = _record(variant, op, sample, FormattedSide(PlainSide(), format_), seed)
        other = others[min(place, len(others) - 1)]
        if isinstance(other, Raised) or difference(seen, other, Exactness.VALUES):
            return True
    return False
