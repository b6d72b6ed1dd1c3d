"""Compares the results of a program on GT with torch's."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence

import torch

from gt.client import creation
from tests.conformance.compare import describe_exception
from tests.conformance.sides import ShardedSide, distribute_at_random
from tests.fuzz.programs import Program, Run, Side, run

CHECKS_STRIDES = True
SECONDS = 60  # for one program
_KINDS = ("sum", "sum", "sum", "max", "min", "prod")
_NOISE = 3e-7
_SPREAD = 32  # how much farther from torch GT may be than torch is from itself in float64, or with noise


class ProgramTimeout(BaseException):
    """Not an Exception, so that nothing on the way takes it for a failed op."""


def on_gt(whole: bool = False) -> Side:
    """GT, with leaves laid out at random by their seeds, or `whole` ones."""

    def place(tensor: torch.Tensor, seed: int) -> torch.Tensor:
        ours = gt_side().place_whole(tensor)
        return ours if whole else distribute_at_random(ours, seed, _KINDS)

    def lay_out(tensor: torch.Tensor, seed: int) -> torch.Tensor:
        copy = tensor.clone()  # a new layout is a copy too, in the strides that torch's copy has
        return copy if whole else distribute_at_random(copy, seed, _KINDS)

    return Side(place, lay_out)


class FuzzSide(ShardedSide):
    def place_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return creation.to(tensor)


_side: list[FuzzSide] = []


def gt_side() -> FuzzSide:
    """The session of this process, opened at first use."""
    if not _side:
        _side.append(FuzzSide("sharded"))
        _side[0].reopen()
    return _side[0]


def close() -> None:
    while _side:
        _side.pop().close()


def difference(program: Program, side: Side | None = None) -> str:
    """The first difference between torch and GT, or an empty string."""
    plain = _tried(program, Side())
    if plain is None:
        return ""  # torch refuses its backward pass
    others = [_tried(program, Side(exact=True)), _tried(program, Side(noise=_NOISE))]
    try:
        with _time_limit():
            ours = _read(run(program, side or on_gt(program.whole)))
            gt_side().settle()
    except ProgramTimeout:
        gt_side().reopen()
        return f"longer than {SECONDS} s"
    except Exception as error:
        gt_side().reopen()
        return describe_exception(error)
    return _difference(program, plain, [other for other in others if other is not None], ours)


def _tried(program: Program, side: Side) -> Run | None:
    """What a side makes of a program; None where torch refuses it there, as for tensors of two dtypes."""
    try:
        return run(program, side)
    except RuntimeError:
        return None


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise ProgramTimeout

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _read(made: Run) -> Run:
    """With every tensor read into this process."""
    gradients = [None if gradient is None else gradient.detach().cpu() for gradient in made.gradients]
    return Run([register.detach().cpu() for register in made.registers], gradients, made.strides)


def _difference(program: Program, plain: Run, others: Sequence[Run], ours: Run) -> str:
    """Registers in order. Of what depends on a NaN that is allowed to differ from an infinity, or on the sign of a
    zero or a NaN, nothing is compared."""
    different = _strides_difference(plain, ours)
    if CHECKS_STRIDES and different:
        return different
    excused: set[int] = set()
    sources = [()] * len(program.leaves) + [step.inputs for step in program.steps]
    for place, inputs in enumerate(sources):
        if excused.intersection(inputs):
            excused.add(place)
            continue
        value = plain.registers[place].detach()
        is_odd = any(not plain.registers[source].isfinite().all() for source in inputs)
        found = tensor_difference(value, [other.registers[place] for other in others], ours.registers[place], is_odd)
        if found:
            return f"%{place}: {found}"
        if _is_excused(value, ours.registers[place]):
            excused.add(place)
    if excused or any(not register.isfinite().all() for register in plain.registers):
        return ""
    for place, (expected, gradient) in enumerate(zip(plain.gradients, ours.gradients, strict=True)):
        found = _gradient_difference(expected, [other.gradients[place] for other in others], gradient)
        if found:
            return f"the gradient of %{place}: {found}"
    return ""


def _strides_difference(plain: Run, ours: Run) -> str:
    values = [*plain.registers, *[gradient for gradient in plain.gradients if gradient is not None]]
    for place, (value, left, right) in enumerate(zip(values, plain.strides, ours.strides, strict=True)):
        is_seen = [value.numel() > 0 and size > 1 for size in value.shape]
        if any(seen and a != b for seen, a, b in zip(is_seen, left, right, strict=True)):
            what = f"%{place}" if place < len(plain.registers) else "a gradient"
            return f"{what} of shape {list(value.shape)}: torch has the strides {left}, GT {right}"
    return ""


def _is_excused(expected: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether values that count as the same may make others differ (docs/limits.md)."""
    unsigned = ((expected == 0) & (ours == 0)) | (expected.isnan() & ours.isnan())
    signs = torch.signbit(expected) != torch.signbit(ours)
    return not torch.equal(expected.isnan(), ours.isnan()) or bool((unsigned & signs).any())


def _gradient_difference(
    expected: torch.Tensor | None, others: Sequence[torch.Tensor | None], ours: torch.Tensor | None
) -> str:
    if expected is None or ours is None:
        return "" if expected is ours else f"torch has {'none' if expected is None else 'one'}, GT has not the same"
    return tensor_difference(expected, [other for other in others if other is not None], ours, is_odd=True)


def tensor_difference(expected: torch.Tensor, others: Sequence[torch.Tensor], ours: torch.Tensor, is_odd: bool) -> str:
    """Values, within roundings; dtype and shape. With `is_odd` inputs, which are not
    finite, a NaN may stand where torch has an infinity (docs/limits.md)."""
    if (expected.dtype, expected.shape) != (ours.dtype, ours.shape):
        return f"torch gives {expected.dtype} {list(expected.shape)}, GT {ours.dtype} {list(ours.shape)}"
    left, right = expected.detach().double(), ours.detach().double()
    same = [other.detach().double() for other in others]
    compared = (
        torch.stack([left.isfinite() == other.isfinite() for other in same]).all(0)
        if same
        else torch.ones_like(left, dtype=torch.bool)
    )
    wrong = compared & (left.isfinite() != right.isfinite())
    if not is_odd:
        wrong |= compared & ((left.isnan() != right.isnan()) | (left.isinf() & right.isinf() & (left != right)))
    finite = compared & left.isfinite() & right.isfinite()
    wrong |= finite & ((left - right).abs() > _tolerance(left, same, finite))
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    values = f"torch gives {expected[at].item()}, GT {ours[at].item()}"
    return f"at {list(at)} {values} ({int(wrong.sum())} of {wrong.numel()})"


def _tolerance(left: torch.Tensor, others: Sequence[torch.Tensor], finite: torch.Tensor) -> float:
    """As far as torch is from itself in another precision or with some noise, and more: sums have another order."""
    if not finite.any():
        return 0.0
    spread = max([float((left - other)[finite].abs().max()) for other in others], default=0.0)
    return 1e-5 + 1e-5 * float(left[finite].abs().max()) + _SPREAD * spread
