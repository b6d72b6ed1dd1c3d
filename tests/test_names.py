"""`import gt as torch`: the names that scripts use."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import gt
from tests.subprocesses import finish, start_interpreter

SCRIPT = """
import {module} as torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.0))
        self.head = torch.nn.Linear(32, 3)

    def forward(self, x):
        x = self.layers(x)
        return self.head(torch.cat([x, torch.tanh(x)], dim=1))


torch.manual_seed(0)
torch.set_default_dtype(torch.float32)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert isinstance(device, torch.device)
model = Net().to(device)
with torch.no_grad():
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 2))
x = torch.sin(torch.arange(60, dtype=torch.float32, device=device).reshape(10, 6))
y = torch.where(x.sum(1) > 0, torch.ones(10, dtype=torch.long), torch.zeros(10, dtype=torch.long))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
losses = []
for epoch in range(3):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
model.eval()
with torch.inference_mode():
    predicted = torch.argmax(model(x), dim=-1)
    correct = (predicted == y).float().mean().item()
torch.save(model.state_dict(), {path!r})
model.load_state_dict(torch.load({path!r}, weights_only=True))
stacked = torch.stack([x.mean(), x.std(unbiased=False)]).tolist()
kind = type(x).__module__.split(".")[0]
"""


def run(module: str, folder: Path) -> dict[str, object]:
    script = folder / f"{module}_script.py"
    script.write_text(SCRIPT.format(module=module, path=str(folder / "state")))
    return runpy.run_path(str(script))


def test_a_training_script_runs_under_the_name_of_torch(anywhere: str, tmp_path: Path) -> None:
    ours, theirs = run("gt", tmp_path), run("torch", tmp_path)
    assert (ours["kind"], theirs["kind"]) == ("gt", "torch")
    for name in ("losses", "correct", "stacked"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4)


def test_names_of_torch_are_torchs() -> None:
    assert gt.no_grad is torch.no_grad
    assert (gt.float32, gt.cat, gt.save) == (torch.float32, torch.cat, torch.save)
    assert gt.nn is not torch.nn
    assert gt.distributed.is_initialized() is False


def test_a_name_of_neither_gt_nor_torch_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'gt' has no attribute 'catt', and neither has torch"):
        gt.catt
    assert not hasattr(gt, "__wrapped__")


def test_importing_gt_does_not_import_torch() -> None:
    code, _, err = finish(
        start_interpreter("-c", "import sys, gt; hasattr(gt, '__path__'); assert 'torch' not in sys.modules")
    )
    assert code == 0, err


def test_devices_that_scripts_name_are_the_device_of_gt_tensors(embedded: None) -> None:
    assert gt.device("cuda:1") == gt.device("cpu") == gt.ones(1).device
    assert gt.device("meta").type == "meta"
    assert isinstance(gt.device("cpu"), gt.device)
    with pytest.raises(RuntimeError, match="nonsense"):
        gt.device("nonsense")


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: gt.zeros(2, dtype=dtype),
        lambda dtype: gt.ones_like(torch.ones(2), dtype=dtype),
        lambda dtype: gt.tensor([1, 2], dtype=dtype),
        lambda dtype: gt.as_tensor([1, 2], dtype=dtype),
        lambda dtype: gt.arange(3, dtype=dtype),
    ],
)
def test_a_dtype_may_be_named(embedded: None, make: object) -> None:
    assert make("float64").dtype is make("torch.float64").dtype is torch.float64
    with pytest.raises(TypeError, match="did you mean 'float32'"):
        make("flaot32")


def test_an_array_becomes_a_leaf_that_requires_gradients(embedded: None) -> None:
    x = gt.from_numpy(np.arange(3.0), requires_grad=True)
    (x * x).sum().backward()
    assert x.is_leaf
    assert x.grad.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda lib: lib.logspace(0, 1, 3),
        lambda lib: lib.hann_window(4),
        lambda lib: lib.tril_indices(2, 3),
        lambda lib: lib.asarray([1.0, 2.0]),
        lambda lib: lib.scalar_tensor(2.0),
    ],
)
def test_other_factories_make_gt_tensors(embedded: None, make: object) -> None:
    assert isinstance(make(gt), gt.Tensor)
    torch.testing.assert_close(make(gt).cpu(), make(torch))
    assert isinstance(gt.normal(0.0, 1.0, (2,)), gt.Tensor)


@pytest.mark.parametrize("arguments", [([1.0, 2.0],), (np.ones((2, 3)),), (torch.arange(3.0),), (0, 3), ()])
def test_the_class_makes_tensors_as_torchs_does(anywhere: str, arguments: tuple[object, ...]) -> None:
    made, expected = gt.Tensor(*arguments), torch.Tensor(*arguments)
    assert isinstance(made, gt.Tensor)
    torch.testing.assert_close(made.cpu(), expected)
    assert (made + 1).shape == gt.Tensor(made).shape == expected.shape


def test_opt_einsum_stays_on_gt_and_keeps_gradients(anywhere: str) -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    x, y, z = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5, 2)
    a = gt.to(x).requires_grad_()
    result = opt_einsum.contract("ij,jk,kl->li", a, gt.to(y), gt.to(z))
    assert isinstance(result, gt.Tensor)
    torch.testing.assert_close(result.cpu(), (x @ y @ z).T)
    result.sum().backward()
    torch.testing.assert_close(a.grad.cpu(), (y @ z).sum(1).expand(3, 4))


def test_products_and_permutations_take_the_arguments_of_numpy(embedded: None) -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(4, 3)
    torch.testing.assert_close(
        gt.tensordot(gt.to(x), gt.to(y), axes=((1, 2), (1, 0))).cpu(), torch.tensordot(x, y, dims=((1, 2), (1, 0)))
    )
    assert gt.transpose(gt.to(x), (2, 0, 1)).shape == (4, 2, 3)
    assert gt.transpose(gt.to(x), 0, 1).shape == (3, 2, 4)
