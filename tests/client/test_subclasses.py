"""Tensors of a user's subclass of torch.Tensor, as operands of GT tensors and on GT."""

import copy
import io

import pytest
import torch

import gt


class Marked(torch.Tensor):
    """A subclass whose results are of its own class, as torch's default is."""


class Counted(torch.Tensor):
    """A subclass that sees every function."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.nn.Parameter):
    """A parameter with an attribute, made as geoopt makes its points of manifolds."""

    def __new__(cls, data, name="", requires_grad=True):
        new = torch.Tensor._make_subclass(cls, data, requires_grad)
        new.name_of_user = name
        return new


@pytest.mark.parametrize("kind", [Marked, Counted])
def test_a_result_is_of_the_users_class_and_on_gt(anywhere: str, kind: type) -> None:
    x, y = torch.arange(3.0).as_subclass(kind), gt.ones(3)
    for result in (x + y, y + x, torch.outer(x, y), (x + y).split(1)[0], (x + y)[0], (x + y).sin()):
        assert isinstance(result, kind)
        assert isinstance(result, gt.Tensor)
    assert (x + y).tolist() == [1.0, 2.0, 3.0]
    assert type((x + y).cpu()) is kind


def test_a_subclass_sees_the_functions_of_its_tensors_on_gt(embedded: None) -> None:
    x = gt.to(torch.ones(3).as_subclass(Counted))
    before = Counted.calls
    x.sin().cos()
    assert Counted.calls == before + 2


@pytest.mark.parametrize("kind", [Marked, Counted])
def test_gradients_pass_through_a_subclass(anywhere: str, kind: type) -> None:
    x = gt.ones(3, requires_grad=True)
    ((x * torch.arange(3.0).as_subclass(kind)) * 2).sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("kind", [Marked, Counted])
def test_a_tensor_keeps_its_class_where_it_is_moved_copied_and_saved(embedded: None, kind: type) -> None:
    x = gt.to(torch.arange(3.0).as_subclass(kind))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    for same in (x, copy.copy(x), copy.deepcopy(x), torch.load(file, weights_only=False)):
        assert isinstance(same, kind)
        assert isinstance(same, gt.Tensor)
        assert same.tolist() == [0.0, 1.0, 2.0]


def test_a_parameter_of_a_users_class_keeps_class_and_attributes(anywhere: str) -> None:
    module = torch.nn.Module()
    module.point = Named(torch.ones(2), "north")
    gt.to(module)
    for parameter in (module.point, copy.deepcopy(module).point, Named(gt.ones(2), "north")):
        assert isinstance(parameter, Named)
        assert isinstance(parameter, gt.Tensor)
        assert parameter.requires_grad
    assert module.point.name_of_user == copy.deepcopy(module).point.name_of_user == "north"
    assert [name for name, _ in module.named_parameters()] == ["point"]


def test_a_parameter_of_a_users_class_is_trained_as_in_torch(anywhere: str) -> None:
    trained = []
    for data in (torch.ones(2, 3), gt.ones(2, 3)):
        parameter = Named(data)
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (parameter @ torch.arange(3.0)).square().sum().backward()
            optimizer.step()
        trained.append(parameter.detach().cpu())
    torch.testing.assert_close(*trained)


def test_parameters_keep_the_attributes_that_a_program_gave_them(embedded: None) -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.no_weight_decay = True
    assert gt.to(layer).weight.no_weight_decay
