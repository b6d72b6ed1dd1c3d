"""Random bits by counter: a part is that part of the whole, and the bits are random."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gt.worker.engines.counter_rng import Region, key_words, mix
from gt.worker.engines.numpy_random import RandomSource
from gt.worker.engines.random_ops import COUNTER_BASED
from tests.worker.engines.random_cases import (
    CASES,
    COUNT,
    ENGINE,
    KEYS,
    PERMUTATIONS,
    REFERENCE,
    bits,
    chi_squared,
    cut,
    draw,
    farthest,
    in_pieces,
    made,
    regions,
    zeros,
)


@given(regions(), KEYS, st.sampled_from([2, 4, 10, 1000]))
@settings(max_examples=25, deadline=None)
def test_a_part_is_that_part_of_the_whole(region, key, share):
    for op in CASES:
        expected = made(op, key, region.shape, lambda tensor: tensor)[cut(region)]
        with in_pieces(share):
            found = made(op, key, region.shape, lambda tensor: tensor[cut(region)], region)
        assert torch.equal(found, expected), op


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("op", ["aten.uniform_.default", "aten.normal_.default"])
def test_a_part_of_complex_numbers(op, dtype):
    region = Region((5, 7), ((1, 4), (2, 7)))
    expected = draw(op, 3, zeros(region.shape, dtype), 1.0, 2.0)[cut(region)]
    with in_pieces(2):
        assert torch.equal(draw(op, 3, zeros(region.size, dtype), 1.0, 2.0, region=region), expected)
    assert (expected.real != expected.imag).all()


def test_a_part_of_a_permutation():
    for engine in (ENGINE, REFERENCE):
        order = draw("aten.randperm.default", 5, 20, engine=engine)
        part = draw("aten.randperm.default", 5, 20, engine=engine, region=Region((20,), ((4, 9),)))
        assert sorted(order.tolist()) == list(range(20))
        assert part.tolist() == order[4:9].tolist()
    for op in PERMUTATIONS:
        out = {"out": torch.empty(20, dtype=torch.int64)} if op.endswith("out") else {}
        assert draw(op, 5, 20, **out).tolist() == order.tolist()


def test_every_counter_based_op_has_a_case():
    assert CASES.keys() | PERMUTATIONS == COUNTER_BASED.keys()


@given(regions(), KEYS)
@settings(max_examples=50, deadline=None)
def test_the_bits_are_a_function_of_key_and_index(region, key):
    start, step = key_words(key)
    places = np.arange(math.prod(region.shape)).reshape(region.shape)[cut(region)]
    expected = np.array([mix(start + int(place) * step) for place in places.reshape(-1)], np.uint64).view(np.int64)
    found = bits(key, *region.size, region=region)
    assert np.array_equal(found.numpy().reshape(-1), expected)
    assert np.array_equal(RandomSource(key, region).words(region.size, 64).reshape(-1), expected)


def test_the_numbers_of_a_key_stay_the_same():
    assert key_words(1) == (0x910A2DEC89025CC1, 0xBEEB8DA1658EEC67)  # what SplitMix64 gives first after the seed 1
    assert draw("aten.randint.default", 1, 1000, [6]).tolist() == [328, 284, 639, 613, 487, 141]
    expected = torch.tensor([-0.3508347869, -1.4305324554, -0.9927638769])
    torch.testing.assert_close(draw("aten.randn.default", 1, [3]), expected)


def test_numbers_do_not_depend_on_threads():
    usual = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(
                bits(4, 300_001)[-1000:], bits(4, 1000, region=Region((300_001,), ((299_001, 300_001),)))
            )
    finally:
        torch.set_num_threads(usual)


def test_an_index_may_exceed_32_bits():
    shape, box = (2**20, 2**20, 3), ((2**20 - 1, 2**20), (2**20 - 2, 2**20), (0, 3))
    start, step = key_words(8)
    first = math.prod(shape) - 6
    words = bits(8, 1, 2, 3, region=Region(shape, box)).view(-1).tolist()
    assert [word % 2**64 for word in words] == [mix(start + (first + place) * step) for place in range(6)]


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, 1]])
def test_a_view_counts_its_own_elements(view):
    base = torch.zeros(6, 4)
    draw("aten.normal_.default", 9, view(base))
    assert torch.equal(view(base), draw("aten.randn.default", 9, list(view(base).shape)))
    assert base.count_nonzero() == view(base).numel()


# The bits themselves


def each_bit(words):
    return (words[:, None] >> torch.arange(64)) & 1  # (n, 64)


@pytest.mark.parametrize("key", [0, 2**63 - 1])
def test_every_bit_and_byte_is_fair(key):
    words = bits(key, COUNT)
    share = each_bit(words).double().mean(0)
    assert (share - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(COUNT)
    for shift in range(0, 64, 8):
        counts = ((words >> shift) & 255).bincount(minlength=256)
        assert abs(chi_squared(counts, torch.full((256,), COUNT / 256))) < 4.5


def correlation(left, right):
    return torch.corrcoef(torch.stack([left, right]))[0, 1].item() * math.sqrt(len(left))


def test_neighbours_are_not_correlated():
    numbers = draw("aten.rand.default", 21, [COUNT], dtype=torch.float64)
    for apart in (1, 2, 3, 64, 1024):
        assert abs(correlation(numbers[:-apart], numbers[apart:])) < 4


def test_neighbouring_keys_are_not_correlated():
    for key in (0, 1, 5, 2**40, 2**63 - 2):
        left, right = (draw("aten.rand.default", k, [COUNT], dtype=torch.float64) for k in (key, key + 1))
        assert abs(correlation(left, right)) < 4
        assert abs(correlation(left[1:], right[:-1])) < 4
        assert abs(correlation(left[:-1], right[1:])) < 4


def test_the_first_numbers_of_many_keys_are_random():
    numbers = torch.stack([draw("aten.rand.default", key, [4], dtype=torch.float64) for key in range(3000)])
    for column in numbers.unbind(1):
        assert farthest(column, lambda x: x) < 1.95
        assert abs(correlation(column[:-1], column[1:])) < 4


def test_a_bit_of_the_key_changes_half_of_the_bits():
    for place in range(0, 63, 7):
        changed = each_bit(bits(1234, 4000) ^ bits(1234 ^ (1 << place), 4000)).double()
        assert abs(changed.mean().item() - 0.5) < 0.005
        assert (changed.mean(0) - 0.5).abs().max() < 0.05


def test_no_number_of_a_key_comes_twice():
    assert bits(3, COUNT).unique().numel() == COUNT
