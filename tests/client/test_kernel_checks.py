"""Wrong calls that torch's shape functions accept and its kernels refuse: torch's own error is raised on the line of
the call, and written tensors keep their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gt
from gt.client import active_session
from gt.client.cached_calls import QueryCall

FLOATS, INTS, DOUBLES = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.int64), torch.ones(3, 3, dtype=torch.float64)
IMAGES, DOUBLE_WEIGHTS = torch.ones(1, 3, 4, 4), torch.ones(2, 3, 1, 1, dtype=torch.float64)

WRONG: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "mm of floats and integers": lambda to: to(FLOATS) @ to(INTS),
    "mm of floats and doubles": lambda to: to(FLOATS) @ to(DOUBLES),
    "mv of floats and doubles": lambda to: to(FLOATS) @ to(DOUBLES[0]),
    "bmm of floats and doubles": lambda to: torch.bmm(to(FLOATS[None]), to(DOUBLES[None])),
    "linear": lambda to: F.linear(to(FLOATS), to(DOUBLES)),
    "a bias of doubles": lambda to: F.linear(to(FLOATS), to(FLOATS), to(DOUBLES[0])),
    "a convolution with doubles": lambda to: F.conv2d(to(IMAGES), to(DOUBLE_WEIGHTS)),
    "an output padding of the stride": lambda to: F.conv_transpose2d(
        to(torch.ones(1, 2, 3, 3)), to(torch.ones(2, 2, 2, 2)), output_padding=1
    ),
    "an empty image": lambda to: F.conv_transpose2d(
        to(torch.ones(1, 2, 1, 1)), to(torch.ones(2, 2, 1, 1)), padding=1
    ),
    "the median of nothing": lambda to: to(torch.ones(3, 0)).median(1),
    "a mask of bytes": lambda to: to(FLOATS).masked_scatter(to(FLOATS.byte()), to(FLOATS)),
    "boundaries of two dims": lambda to: torch.bucketize(to(FLOATS), to(FLOATS)),
    "more samples than categories": lambda to: torch.multinomial(to(FLOATS), 4),
    "samples of integers": lambda to: torch.multinomial(to(INTS), 1),
    "a view beyond the tensor": lambda to: torch.as_strided_scatter(to(FLOATS), to(FLOATS[:1]), (1, 3), (1, 9)),
    "a spectrum of nothing": lambda to: torch.fft.fft(to(torch.ones(2, 0))),
    "a spectrum of an empty batch": lambda to: torch.fft.rfft2(to(torch.ones(0, 2, 2))),
    "a softmax of integers": lambda to: to(INTS).softmax(0),
    "a logarithmic softmax of integers": lambda to: to(INTS).log_softmax(0),
    "the variance of integers": lambda to: to(INTS).var(),
    "the deviation of integers": lambda to: to(INTS).std(0),
    "the median of booleans": lambda to: to(INTS.bool()).median(),
    "the trace of booleans": lambda to: to(INTS.bool()).trace(),
    "random booleans of integers": lambda to: to(INTS).bernoulli(),
    "random integers of a range": lambda to: to(INTS).uniform_(),
    "a histogram of integers": lambda to: to(INTS).histc(),
    "an enlarged image of integers": lambda to: F.interpolate(to(INTS.view(1, 1, 9)), 18),
    "pooled booleans": lambda to: F.max_pool2d(to(INTS.bool()[None]), 2),
    "averaged integers": lambda to: F.adaptive_avg_pool1d(to(INTS[None]), 2),
    "an activation of integers": lambda to: F.hardswish(to(INTS)),
    "a loss of integers": lambda to: F.huber_loss(to(INTS), to(INTS)),
    "sums of exponentials of integers": lambda to: to(INTS).logcumsumexp(0),
    "sums of booleans in place": lambda to: to(INTS.bool()).cumsum_(0),
    "blocks of integers": lambda to: F.unfold(to(INTS.view(1, 1, 9, 1)), (1, 1)),
    "points of an image of integers": lambda to: F.grid_sample(
        to(INTS.view(1, 1, 9, 1)), to(FLOATS[0, :2].view(1, 1, 1, 2)), align_corners=False
    ),
    "a loss of floats and integers": lambda to: F.binary_cross_entropy(to(FLOATS), to(INTS)),
    "an index of floats": lambda to: to(FLOATS).index_select(0, to(FLOATS[0])),
    "an index of floats to fill": lambda to: to(FLOATS).index_fill(0, to(FLOATS[0]), 1.0),
    "a mask of integers": lambda to: to(FLOATS).masked_fill_(to(INTS), 1.0),
    "integers put among floats": lambda to: to(FLOATS).put_(to(INTS), to(INTS)),
    "integers put at an index": lambda to: torch.index_put(to(FLOATS), (to(INTS[0]),), to(INTS)),
    "a norm with weights of doubles": lambda to: F.layer_norm(to(FLOATS), (3,), to(DOUBLES[0])),
    "a norm with statistics of doubles": lambda to: F.batch_norm(to(FLOATS), to(DOUBLES[0]), to(DOUBLES[0])),
    "a dim that does not exist": lambda to: to(FLOATS).sort(3),
}  # fmt: skip


@contextlib.contextmanager
def session(**options: Any) -> Iterator[None]:
    gt.init(**options)
    try:
        yield
    finally:
        gt.shutdown()


def error_of(case: Callable[[], object]) -> str:
    try:
        case()
    except (RuntimeError, IndexError) as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_torchs_error_at_once(name: str) -> None:
    with session():
        expected = error_of(lambda: WRONG[name](torch.Tensor.clone))
        assert expected
        assert error_of(lambda: WRONG[name](gt.to)) == expected


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:1].expand(4, 3).add_(1),
        lambda x: x[:1].expand(4, 3).copy_(x[0]),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: x.scatter_(0, torch.zeros(3, 3, dtype=torch.int64), x),
        lambda x: x.t().add_(x),
    ],
)
def test_a_write_that_overlaps_is_refused_at_once(write: Callable[[torch.Tensor], object]) -> None:
    with session():
        plain = torch.arange(9.0).view(3, 3)
        ours = gt.to(plain)
        expected = error_of(lambda: write(plain.clone()))
        assert error_of(lambda: write(ours)) == expected
        if expected:
            assert torch.equal(ours.cpu(), plain)
            gt.synchronize()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.gather(0, i),
        lambda x, i: x[i],
        lambda x, i: x.index_add(0, i[0], x),
        lambda x, i: x.scatter_add(0, i, x),
        lambda x, i: F.nll_loss(x, i[0]),
        lambda x, i: F.cross_entropy(x, i[0]),
        lambda x, i: x.masked_scatter(i > 0, x),
        lambda x, i: F.layer_norm(x, (3,), x[0], x[0]),
        lambda x, i: F.batch_norm(x, x[0].clone(), x[0].clone(), training=True),
        lambda x, i: x.index_select(0, i[0]),
        lambda x, i: torch.index_put(x, (i[0],), x),
        lambda x, i: x.sort(1, descending=True),
        lambda x, i: torch.sort(x, stable=True, dim=0),
        lambda x, i: torch.where(i > 0, x, x),
        lambda x, i: x.mul_(x),
        lambda x, i: x[0].copy_(x[1]),
        lambda x, i: torch.multinomial(x.abs() + 1, 2),
    ],
)
def test_right_calls_of_several_dtypes_do_not_wait(call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with session():
        call(gt.to(FLOATS), gt.to(INTS))
        calls = active_session.current().cached_calls.values()
        assert not [made for made in calls if isinstance(made, QueryCall)]


def test_an_empty_transposed_convolution_is_torchs_on_shards() -> None:
    images, weights = torch.randn(2, 2, 1, 5), torch.randn(2, 4, 2, 1)
    expected = F.conv_transpose2d(images, weights, padding=1)
    with session(workers=2, mode="virtual"):
        gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 1])))
        with gt.signal.context("rows"):
            found = F.conv_transpose2d(gt.to(images), gt.to(weights), padding=1)
        assert found.cpu().shape == expected.shape
