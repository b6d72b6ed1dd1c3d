"""The product in one page: each test is something a newcomer would try."""

import numpy as np
import torch

import gt


def test_a_matmul(anywhere):
    a, b = gt.randn(100, 50), gt.randn(50, 30)
    product = a @ b
    assert product.shape == (100, 30)
    torch.testing.assert_close(product.cpu(), a.cpu() @ b.cpu())


def test_a_tensor_is_a_torch_tensor(anywhere):
    x = gt.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert isinstance(x, torch.Tensor)
    assert torch.sin(x).sum().item() == torch.sin(x.cpu()).sum().item()


def test_gradients(anywhere):
    w = gt.randn(3, 3, requires_grad=True)
    (w * w).sum().backward()
    torch.testing.assert_close(w.grad.cpu(), 2 * w.detach().cpu())


def test_a_training_loop(anywhere):
    model = gt.nn.Sequential(gt.nn.Linear(4, 16), gt.nn.ReLU(), gt.nn.Linear(16, 1))
    optimizer = gt.optim.Adam(model.parameters(), lr=0.01)
    x = gt.randn(64, 4)
    y = x.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_plain_data_mixes_in(anywhere):
    x = gt.ones(3)
    mixed = x + torch.ones(3) + np.ones(3, dtype=np.float32) + 1 + np.float32(1)
    assert mixed.tolist() == [5.0, 5.0, 5.0]


def test_views_alias(anywhere):
    x = gt.zeros(4, 4)
    x[1:3].t()[0] += 5
    x.view(16)[3] = 7
    expected = torch.zeros(4, 4)
    expected[1:3].t()[0] += 5
    expected.view(16)[3] = 7
    assert torch.equal(x.cpu(), expected)


def test_a_third_party_model_is_built_on_the_workers(anywhere):
    with gt.device():
        layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert all(isinstance(parameter, gt.Tensor) for parameter in layer.parameters())
    assert layer(gt.randn(2, 5, 8)).shape == (2, 5, 8)
