"""Plain operands that are uploaded once for each content, until the workers change."""

import torch

from gt.client.transfers import UploadCache


def test_equal_tensors_are_uploaded_once():
    uploads = []
    operands = UploadCache(lambda tensor: uploads.append(tensor) or object())
    first = operands.storage_of(torch.ones(3))
    assert operands.storage_of(torch.ones(3)) is first and len(uploads) == 1
    assert operands.storage_of(torch.zeros(3)) is not first


def test_forgotten_tensors_are_uploaded_anew():
    operands = UploadCache(lambda tensor: object())
    first = operands.storage_of(torch.ones(3))
    operands.forget()
    assert operands.storage_of(torch.ones(3)) is not first


def test_a_tensor_whose_upload_hears_of_a_loss_is_uploaded_anew():
    operands = UploadCache(lambda tensor: operands.forget() or object())
    first = operands.storage_of(torch.ones(3))
    assert operands.storage_of(torch.ones(3)) is not first
