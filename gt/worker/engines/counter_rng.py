"""Random bits as a function of a key and of an element's index in the whole tensor.

Element i has the bits mix(start + i * step), where start and step belong to the key: SplitMix64 (Steele, Lea and Flood
2014, with Stafford's mix13), evaluated at any index. So a worker that holds a part of a tensor makes only that part of
the whole. Plain tensor code: every device gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_ALTERNATING = 0xAAAAAAAAAAAAAAAA

ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The rounds of mixing 64 bits: (shift to fold by, factor to multiply with)."""

# Elements computed at a time. On a CPU they should fit into the caches, and torch gives a thread at least 2**15;
# elsewhere only the memory is bounded.
_SHARE_OF_A_THREAD = 1 << 16
_SHARE_OF_A_DEVICE = 1 << 22


class Region(NamedTuple):
    """A part of a whole tensor: the whole shape, and (start, stop) per dim."""

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    def walk(self) -> tuple[int, list[tuple[int, int]]]:
        """The flat index of the first element, and (count, stride) of each dim, major to minor. Dims whose elements
        follow each other are joined: a part that consists of whole rows has a single dim."""
        first, stride, dims = 0, 1, [(1, 1)]
        for size, (start, stop) in zip(reversed(self.shape), reversed(self.box), strict=True):
            first += start * stride
            count, (inner, inner_stride) = stop - start, dims[-1]
            if inner == 1:
                dims[-1] = (count, stride)
            elif inner * inner_stride == stride or count == 1:
                dims[-1] = (inner * count, inner_stride)
            else:
                dims.append((count, stride))
            stride *= size
        return first, dims[::-1]


def whole_region(shape: tuple[int, ...]) -> Region:
    return Region(shape, tuple((0, size) for size in shape))


class Distribution(NamedTuple):
    """A distribution: `write(words, real, out)` computes `out` from signed integers of `width` random bits. All three
    are flat, and `real` is float64 scratch memory."""

    width: int
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def fill_random(key: int, region: Region | None, target: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Write the random numbers of a region to a tensor of its size, in row-major order whatever its strides."""
    region = region or whole_region(tuple(target.shape))
    assert region.size == target.shape, f"{region} is not of the size {tuple(target.shape)}"
    if target.is_complex():
        pairs = Region((*region.shape, 2), (*region.box, (0, 2)))
        fill_random(key, pairs, torch.view_as_real(target), distribution)
        return target
    out = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    flat = out.view(-1)
    for piece, words, spare in _pieces(key, region, target.device):
        _mix_(words, spare, distribution.width)
        distribution.write(words, spare.view(torch.float64), flat[piece])
    return target if out is target else target.copy_(out)


def key_words(key: int) -> tuple[int, int]:
    """(start, step) of a key. With the same step for all keys, two keys could give the same numbers some distance
    apart. A step whose bits seldom change is avoided, as in SplittableRandom."""
    start, step = mix(key + _GOLDEN), mix(key + 2 * _GOLDEN) | 1
    return start, step if (step ^ (step >> 1)).bit_count() >= 24 else step ^ _ALTERNATING


def mix(word: int) -> int:
    word &= (1 << 64) - 1
    for shift, factor in ROUNDS:
        word = (word ^ (word >> shift)) * factor & ((1 << 64) - 1)
    return word


def _mix_(words: torch.Tensor, spare: torch.Tensor, width: int) -> None:
    """The first `width` bits of `mix`, as signed integers. int64 has no logical right shift, hence the masks."""
    for shift, mask, factor in _SCALARS[:-1]:
        words.bitwise_xor_(torch.bitwise_right_shift(words, shift, out=spare).bitwise_and_(mask)).mul_(factor)
    shift, mask, _ = _SCALARS[-1]
    if width > ROUNDS[-1][0]:  # this round does not change the bits above its shift
        words.bitwise_xor_(torch.bitwise_right_shift(words, shift, out=spare).bitwise_and_(mask))
    if width < 64:
        words.bitwise_right_shift_(64 - width)


def _pieces(key: int, region: Region, device: torch.device) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """The counters `start + index * step` of a region's elements in pieces: (slice of the flat region, counters,
    scratch memory)."""
    start, step = key_words(key)
    first, (*outer, (width, stride)) = region.walk()
    start += first * step
    limit = _SHARE_OF_A_THREAD * torch.get_num_threads() if device.type == "cpu" else _SHARE_OF_A_DEVICE
    columns = _multiples(min(width, limit), stride * step, device)
    if width <= limit and not outer:
        yield slice(None), columns.add_(_signed(start)), torch.empty_like(columns)
        return
    rows = torch.full((1,), _signed(start), device=device)
    for count, outer_stride in outer:
        rows = torch.add(rows[:, None], _multiples(count, outer_stride * step, device)).view(-1)
    height = max(limit // max(width, 1), 1)
    memory = torch.empty((2, min(height, len(rows)) * len(columns)), dtype=torch.int64, device=device)
    for row, column in itertools.product(range(0, len(rows), height), range(0, width, limit)):
        down, across = rows[row : row + height, None], columns[: width - column]
        counters, spare = memory[:, : len(down) * len(across)]
        torch.add(down + _signed(column * stride * step), across, out=counters.view(len(down), -1))
        begin = row * width + column
        yield slice(begin, begin + len(counters)), counters, spare


def _multiples(count: int, factor: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device).mul_(_signed(factor))


def _signed(word: int) -> int:
    """64 bits as a signed integer."""
    return ((word + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


# Tensors, because torch takes 0.7 us to convert each number.
_SCALARS = [
    tuple(torch.tensor(_signed(number)) for number in (shift, (1 << (64 - shift)) - 1, factor))
    for shift, factor in ROUNDS
]
