"""Tensors in memory formats other than row-major: strides, values and gradients are torch's.

Every test runs with `GT_CHECK_GEOMETRY` (conftest.py): a worker compares strides after each op and move.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import forward_ad

import gt
from gt.client import active_session

LAST = torch.channels_last


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda count: f"{count} workers")
def workers(request: pytest.FixtureRequest, no_signals: None) -> Iterator[int]:
    """A session of several virtual workers, with a scope `batch` that cuts the first dim over all of them."""
    count = request.param
    gt.init(**({"workers": count, "mode": "virtual"} if count > 1 else {}))
    if count > 1:
        shard = gt.ShardConfig(axis=0, workers=list(range(count)))
        gt.register_config("batch", gt.SignalConfig(shard=shard))
    yield count
    gt.shutdown()


def images(*shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(shape).contiguous(memory_format=LAST)


def assert_same(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)
    assert ours.stride() == expected.stride()


def assert_gradients(model: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Loss and gradients of a model on a sharded batch, next to torch's."""
    theirs = copy.deepcopy(model)
    forward(theirs, x).square().mean().backward()
    ours, batch = gt.to(model), gt.to(x)
    with gt.signal.context("batch"):
        loss = forward(ours, batch).square().mean()
    loss.backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None, name
        assert_same(found.grad, expected.grad)


@pytest.mark.parametrize("size", [0, 3, 12])
def test_positions_of_a_fixed_number_of_elements_are_contiguous(workers: int, size: int) -> None:
    x = torch.arange(20).reshape(4, 5) % 3
    assert_same(torch.nonzero_static(gt.to(x), size=size), torch.nonzero_static(x, size=size))


@pytest.mark.parametrize(
    "mask", [(False, True, True), (False, True, False), (False, False, True), (True, False, False)]
)
def test_gradients_of_group_norm_by_some_of_its_inputs(workers: int, mask: tuple[bool, bool, bool]) -> None:
    """Torch's own kernel crashes where the input is in channels_last and needs no gradient."""
    plain = [images(4, 6, 5, 5), torch.randn(6), torch.randn(6)]
    ours = [gt.to(x).requires_grad_(needs) for x, needs in zip(plain, mask, strict=True)]
    theirs = [x.contiguous().requires_grad_(needs) for x, needs in zip(plain, mask, strict=True)]
    with gt.signal.context("batch"):
        F.group_norm(ours[0] * 1, 3, ours[1], ours[2]).square().mean().backward()
    F.group_norm(theirs[0], 3, theirs[1], theirs[2]).square().mean().backward()
    for found, expected in zip(ours, theirs, strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad.cpu(), expected.grad)


ROLLS = [(0, 0), (1, 0), (2, 0), ((1, 0), (0, 1)), ((1, 1), (0, 1)), (1, ()), (10, -1)]


@pytest.mark.parametrize(("shifts", "dims"), ROLLS)
def test_a_roll_that_moves_nothing_along_a_dim_is_contiguous(workers: int, shifts: Any, dims: Any) -> None:
    x = images(2, 3, 4, 5)
    assert_same(torch.roll(gt.to(x), shifts, dims), torch.roll(x, shifts, dims))


def test_the_multivariate_gamma_function_of_a_transposed_tensor_is_contiguous(workers: int) -> None:
    x = torch.rand(5, 4) + 3
    result = torch.mvlgamma(gt.to(x).t(), 2)
    assert result.stride() == torch.mvlgamma(x.t(), 2).stride() == (5, 1)
    torch.testing.assert_close(result.cpu(), torch.mvlgamma(x.t(), 2))


def test_an_out_that_is_a_channels_last_view_is_written_in_its_own_format(workers: int) -> None:
    def normalized(place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        flat = torch.arange(48.0).square()
        x, out = (place(each).as_strided((2, 2, 3, 4), (24, 1, 8, 2)) for each in (flat, torch.zeros(48)))
        ones, zeros = place(torch.ones(2)), place(torch.zeros(2))
        outs = (out, place(torch.zeros(2)), place(torch.zeros(2)))
        torch.native_batch_norm(x, ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5, out=outs)
        return out

    torch.testing.assert_close(normalized(gt.to).cpu(), normalized(torch.clone))


def test_angles_of_complex_numbers_are_contiguous(workers: int) -> None:
    x = images(2, 3, 4, 5)
    z = torch.complex(x, x.flip(0)).contiguous(memory_format=LAST)
    assert_same(torch.angle(gt.to(z)), torch.angle(z))
    assert_same(torch.angle(gt.to(x)), torch.angle(x))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("last", [False, True], ids=["row-major", "channels_last"])
def test_gradients_of_convolutions_and_group_norm(workers, last):
    model, x = blocks(), images(4, 3, 6, 6)
    model = model.to(memory_format=LAST) if last else model
    assert_gradients(model, lambda net, batch: net(batch), x if last else x.contiguous())


class Attention(nn.Module):
    """The permuted activations of a diffusion model: (B, C, H, W) to (B, HW, C) and back, joined and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.project, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.first(x)
        tokens = self.project(image.flatten(2).transpose(1, 2))
        heads = tokens.unsqueeze(1)
        seen = F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        back = [t.transpose(1, 2).reshape(image.shape) for t in (tokens, seen)]
        return self.norm(torch.cat([image + back[0], back[1]], 1))


@pytest.mark.parametrize("last", [False, True], ids=["row-major", "channels_last"])
def test_gradients_of_permuted_activations(workers, last):
    x = images(4, 3, 6, 6)
    assert_gradients(Attention(), lambda net, batch: net(batch), x if last else x.contiguous())


def test_group_norm_with_one_row_for_each_worker(workers):
    assert_gradients(blocks().to(memory_format=LAST), lambda net, batch: net(batch), images(workers, 3, 6, 6))


def test_group_norm_of_a_flattened_convolution(workers):
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x).flatten(2))

    assert_gradients(Flat(), lambda net, batch: net(batch), images(4, 3, 6, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_group_norm_of_narrow_floats_with_wide_weights(workers, dtype):
    """As autocast calls it."""
    x, weight = images(4, 6, 4, 4).to(dtype), torch.rand(6)

    def gradients(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        return list(torch.autograd.grad(F.group_norm(leaves[0], 3, leaves[1]).square().sum(), leaves))

    mesh = gt.mesh((workers,), ("d",))
    ours = gradients(gt.distribute(gt.to(x), mesh, "d, -, -, -"), gt.to(weight))
    for found, expected in zip(ours, gradients(x, weight), strict=True):
        assert_same(found, expected, 2e-2)


def test_attention_of_a_channels_last_convolution(embedded):
    x, weight = images(2, 8, 4, 4), torch.randn(8, 8, 1, 1)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = F.conv2d(x, weight).flatten(2).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads)

    assert_same(run(gt.to(x), gt.to(weight)), run(x, weight))


MATRIX_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "det of a transposed matrix": lambda x: torch.linalg.det(x.mT * 1.5),
    "slogdet": lambda x: torch.linalg.slogdet(x.mT * 1.5)[1],
    "logdet": lambda x: torch.logdet((x @ x.mT + torch.eye(4)).mT * 1.5),
    "det of svd": lambda x: torch.linalg.det(torch.linalg.svd(x).Vh),
    "inverse": lambda x: torch.linalg.inv(x.mT).sum(),
    "eig": lambda x: torch.linalg.eig(x).eigenvectors.abs().sum(),
}


@pytest.mark.parametrize("name", MATRIX_FUNCTIONS)
def test_gradients_of_linear_algebra(workers, name):
    function = MATRIX_FUNCTIONS[name]
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    mesh = gt.mesh((workers,), ("d",))
    theirs, ours = x.clone().requires_grad_(), gt.distribute(gt.to(x), mesh, [gt.Shard(0)]).requires_grad_()
    expected, found = function(theirs), function(ours)
    (first,) = torch.autograd.grad(expected, theirs)
    (gradient,) = torch.autograd.grad(found, ours)
    assert_same(found, expected)
    assert_same(gradient, first, 1e-3)


def test_second_derivative_of_det(workers):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))

    def second(x: torch.Tensor) -> torch.Tensor:
        leaf = x.requires_grad_()
        (first,) = torch.autograd.grad(torch.linalg.det(leaf), leaf, create_graph=True)
        (gradient,) = torch.autograd.grad(first.square().sum(), leaf)
        return gradient

    torch.testing.assert_close(second(gt.to(x)).cpu(), second(x.clone()), rtol=1e-3, atol=1e-3)


def test_weight_norm(workers):
    v, g = images(8, 3, 3, 3), torch.rand(8, 1, 1, 1)
    assert_same(torch._weight_norm(gt.to(v), gt.to(g), 0), torch._weight_norm(v, g, 0))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_of_channels_last_parameters(workers, optimizer, fused):
    model, x = blocks().to(memory_format=LAST), images(4, 3, 6, 6)
    theirs, ours = copy.deepcopy(model), gt.to(model)
    with gt.signal.context("batch"):
        train(ours, lambda net, batch: net(batch), gt.to(x), optimizer, fused)
    train(theirs, lambda net, batch: net(batch), x, optimizer, fused)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(found, expected, 1e-3)


def train(
    model: nn.Module,
    forward: Callable[[Any, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    optimizer: Any = torch.optim.SGD,
    fused: bool = False,
) -> list[float]:
    chosen = optimizer(model.parameters(), lr=0.05, fused=fused)
    losses = []
    for _ in range(2):
        chosen.zero_grad()
        loss = forward(model, x).square().mean()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return losses


def test_a_write_through_a_permuted_reshape_reaches_the_tensor(workers):
    def write(x: torch.Tensor) -> torch.Tensor:
        x.permute(0, 2, 3, 1).reshape(2, 30, 4)[:, ::3] = 7
        return x

    assert_same(write(gt.to(images(2, 4, 5, 6))), write(images(2, 4, 5, 6)))


def test_as_strided_counts_in_the_strides_of_torch(workers):
    x = images(2, 4, 5, 6)
    assert_same(F.relu(gt.to(x)).as_strided((6, 4), (4, 1), 8), F.relu(x).as_strided((6, 4), (4, 1), 8))


def test_plain_operands_keep_their_strides(workers):
    x, mask = torch.randn(3, 4), torch.rand(1, 4).expand(3, 4)
    stepped = torch.randn(6, 8)[::2, ::2]
    for operand in (mask, stepped, x.mT.contiguous().mT):
        assert_same(gt.to(x.mT.contiguous().mT) * operand, x.mT.contiguous().mT * operand)


@pytest.mark.parametrize("target", ["d, -, -, -", "-, d, -, -", "-, -, -, d"])
def test_a_moved_tensor_keeps_its_memory_format(target):
    gt.init(workers=2, mode="virtual")
    try:
        x = images(3, 4, 5, 6)
        mesh = gt.mesh((2,), ("d",))
        moved = gt.distribute(gt.to(x), mesh, target)
        whole = moved.redistribute(mesh, "-, -, -, -")
        assert_same(whole, x)
        gt.synchronize()
        for executor in active_session.current().channel.executors:
            shard = executor.tensors[moved._ref.id]
            assert shard.is_contiguous(memory_format=LAST)
            assert executor.tensors[whole._ref.id].stride() == x.stride()
    finally:
        gt.shutdown()


def test_results_with_other_strides_than_inferred_are_restrided_and_counted(monkeypatch):
    """As a device whose kernels lay out their results differently would."""
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")
    gt.init()
    try:
        (executor,) = active_session.current().channel.executors
        resolve = executor.engine.resolve
        monkeypatch.setattr(executor.engine, "resolve", lambda op: lambda *args: resolve(op)(*args).contiguous())
        x = images(2, 3, 4, 5)
        found = [gt.to(x).exp() for _ in range(2)]
        gt.synchronize()
        assert [executor.tensors[tensor._ref.id].stride() for tensor in found] == [x.stride()] * 2
        assert executor.engine.restrided == 2
    finally:
        gt.shutdown()


def test_the_checking_mode_raises_where_a_kernel_differs(embedded, monkeypatch):
    (executor,) = active_session.current().channel.executors
    resolve = executor.engine.resolve
    monkeypatch.setattr(executor.engine, "resolve", lambda op: lambda *args: resolve(op)(*args).contiguous())
    with pytest.raises(gt.OpError, match=r"gave float32\[2, 3, 4, 5\] with strides .*; it should be"):
        gt.to(images(2, 3, 4, 5)).exp().cpu()


def unet() -> tuple[nn.Module, Callable[[Any, torch.Tensor], torch.Tensor], torch.Tensor]:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, lambda net, x: net(x, torch.arange(len(x))).sample, images(4, 3, 8, 8)


def autoencoder() -> tuple[nn.Module, Callable[[Any, torch.Tensor], torch.Tensor], torch.Tensor]:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=2,
        norm_num_groups=4,
        sample_size=8,
    )
    return model, lambda net, x: net(x).sample, images(4, 3, 8, 8)


def convnext() -> tuple[nn.Module, Callable[[Any, torch.Tensor], torch.Tensor], torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=4)
    return transformers.ConvNextForImageClassification(config), lambda net, x: net(x).logits, images(4, 3, 32, 32)


def resnet() -> tuple[nn.Module, Callable[[Any, torch.Tensor], torch.Tensor], torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config), lambda net, x: net(x).logits, images(4, 3, 32, 32)


@pytest.mark.parametrize("make", [unet, autoencoder, convnext, resnet], ids=lambda make: make.__name__)
@pytest.mark.parametrize("count", [1, 2])
def test_third_party_models_train_in_channels_last(make, count, no_signals):
    torch.manual_seed(0)
    model, forward, x = make()
    model = model.to(memory_format=LAST)
    theirs = copy.deepcopy(model)
    expected = train(theirs, forward, x)
    gt.init(**({"workers": count, "mode": "virtual"} if count > 1 else {}))
    try:
        shard = gt.ShardConfig(axis=0, workers=list(range(count)))
        gt.register_config("batch", gt.SignalConfig(shard=shard))
        ours = gt.to(model)
        with gt.signal.context("batch") if count > 1 else contextlib.nullcontext():
            losses = train(ours, forward, gt.to(x))
        assert losses == pytest.approx(expected, rel=1e-4)
        for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_same(found, wanted, 1e-3)
    finally:
        gt.shutdown()


def one_channel(*shape: int) -> torch.Tensor:
    """Images of one channel whose strides are those of channels-last."""
    _, _, height, width = shape
    return torch.randn(shape).as_strided(shape, (height * width, 1, width, 1))


@pytest.mark.parametrize("is_warm", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(
    "start",
    [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: x.masked_fill(x > 1, 0),
        lambda x: x.roll(1, 0),
        lambda x: x.flip(0),
        lambda x: x * 2,
        torch.zeros_like,
    ],
)
def test_strides_of_one_channel_are_torchs(
    workers: int, start: Callable[[torch.Tensor], torch.Tensor], is_warm: bool
) -> None:
    """The next convolution or concatenation takes its memory format from them."""
    if is_warm:
        start(gt.to(images(2, 3, 4, 4)))
    plain, weight = one_channel(2, 1, 4, 4), torch.randn(4, 1, 1, 1)
    expected, found = start(plain), start(gt.to(plain))
    assert_same(found, expected)
    assert_same(F.conv2d(found, gt.to(weight)), F.conv2d(expected, weight))
    assert_same(torch.cat([found] * 3, 1), torch.cat([expected] * 3, 1))


def test_a_one_hot_of_a_permuted_tensor_is_row_major(workers: int) -> None:
    labels = (torch.arange(6) % 2).view(2, 3)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(F.one_hot(gt.to(labels).t(), 2), F.one_hot(labels.t(), 2))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_maximum_over_windows_of_a_permuted_signal_has_torchs_strides(
    workers: int, needs_gradient: bool, mode: type[contextlib.AbstractContextManager[None]]
) -> None:
    """Torch has another kernel for tensors that need no gradient."""
    for plain in (torch.randn(4, 3, 6), torch.randn(1, 3, 3)):
        ours, theirs = [x.requires_grad_(needs_gradient) for x in (gt.to(plain), plain.clone())]
        with mode():
            found, expected = F.max_pool1d(ours.mT, 3), F.max_pool1d(theirs.mT, 3)
        assert_same(found, expected)
        if expected.requires_grad:
            found.square().sum().backward()
            expected.square().sum().backward()
            assert_same(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own derivatives import torch.jit
def test_the_tangent_of_a_maximum_over_windows_of_a_permuted_signal_has_torchs_strides(workers: int) -> None:
    signal, tangent = torch.randn(4, 3, 6).mT, torch.randn(4, 6, 3)
    with forward_ad.dual_level():
        found, expected = [
            forward_ad.unpack_dual(F.max_pool1d(forward_ad.make_dual(x, t), 3))
            for x, t in ((gt.to(signal), gt.to(tangent)), (signal, tangent))
        ]
    assert_same(found.primal, expected.primal)
    assert_same(found.tangent, expected.tangent)


COMPOSITES = {
    "nearest": lambda x: F.interpolate(x[0].mT, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "dropout": lambda x: F.dropout(x[..., ::2], training=False),
    "matmul": lambda x: x.mT @ x,
}


@pytest.mark.parametrize("composite", COMPOSITES)
def test_composites_in_inference_mode_have_torchs_strides(workers: int, composite: str) -> None:
    plain, function = images(4, 3, 4, 6), COMPOSITES[composite]
    with torch.inference_mode():
        assert_same(function(gt.to(plain)), function(plain))


@pytest.mark.parametrize("training", [False, True])
def test_a_leaky_relu_of_random_slopes_is_row_major(workers: int, training: bool) -> None:
    plain = images(2, 3, 4, 5)
    found = F.rrelu(gt.to(plain), training=training)
    assert found.stride() == F.rrelu(plain, training=training).stride()
    assert torch.equal(found.cpu() > 0, plain > 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_of_a_convolution_of_no_images_have_torchs_strides(workers: int, channels: int) -> None:
    gradients = []
    for place in (torch.Tensor.clone, gt.to):
        batch, weight = place(images(0, channels, 4, 4)), place(images(2, channels, 3, 3))
        F.conv2d(batch.requires_grad_(), weight.requires_grad_()).sum().backward()
        gradients.append((batch.grad, weight.grad))
    for expected, found in zip(*gradients, strict=True):
        assert_same(found, expected)


def test_the_gradient_of_hardswish_of_one_pixel_has_torchs_strides(workers: int) -> None:
    """Dims of one element have other strides in each operand."""
    pixel = torch.randn(3, 8, 1, 1)
    gradient = torch.ops.aten.hardswish_backward
    for first, second in (((8, 1, 1, 1), (8, 1, 8, 8)), ((8, 1, 8, 8), (8, 1, 1, 1)), ((8, 1, 8, 8), (8, 1, 8, 8))):
        theirs = [pixel.as_strided(pixel.shape, stride) for stride in (first, second)]
        ours = [gt.to(pixel).as_strided(pixel.shape, stride) for stride in (first, second)]
        assert_same(gradient(*ours), gradient(*theirs))
