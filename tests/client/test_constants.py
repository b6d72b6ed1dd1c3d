"""Plain operands that are uploaded once for each content, until the workers change."""

import torch

from gt.client.constants import Constants


def test_equal_tensors_are_uploaded_once():
    uploads = []
    constants = Constants(lambda tensor: uploads.append(tensor) or object())
    first = constants.storage_of(torch.ones(3))
    assert constants.storage_of(torch.ones(3)) is first and len(uploads) == 1
    assert constants.storage_of(torch.zeros(3)) is not first


def test_forgotten_tensors_are_uploaded_anew():
    constants = Constants(lambda tensor: object())
    first = constants.storage_of(torch.ones(3))
    constants.forget()
    assert constants.storage_of(torch.ones(3)) is not first


def test_a_tensor_whose_upload_hears_of_a_loss_is_uploaded_anew():
    constants = Constants(lambda tensor: constants.forget() or object())
    first = constants.storage_of(torch.ones(3))
    assert constants.storage_of(torch.ones(3)) is not first
