"""User subclasses of torch.Tensor, of plain data and of GT tensors."""

import torch

import gt


class Labelled(torch.Tensor):
    pass


def test_make_subclass_takes_plain_and_gt_tensors(embedded):
    for data in (torch.ones(2), gt.ones(2)):
        made = torch.Tensor._make_subclass(Labelled, data, True)
        assert isinstance(made, Labelled) and made.requires_grad, "Parameter subclasses of libraries could not be made"
        assert isinstance(made, gt.Tensor) is isinstance(data, gt.Tensor)


def test_results_of_ops_stay_in_the_users_class(embedded):
    made = gt.ones(2).as_subclass(Labelled)
    assert isinstance(made + 1, Labelled), "torch turns __torch_function__ off in another way than GT undoes"
