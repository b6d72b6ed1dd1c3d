"""The smallest program: a product and its gradient, on as many workers as `GT_WORKERS` says (else one, in here)."""

import torch

import gt

x = gt.randn(4, 3)
w = gt.ones(3, 2, requires_grad=True)
loss = (x @ w).square().mean()
loss.backward()

print(w.grad)
torch.testing.assert_close(w.grad.cpu(), x.cpu().T @ (x.cpu() @ torch.ones(3, 2)) / 4)
