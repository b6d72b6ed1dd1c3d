"""Tensors that agree, and tensors that do not."""

import pytest
import torch

from gt.worker.compilation.compiled_code import difference

AGREE = {
    "equal": (torch.ones(3), torch.ones(3)),
    "rounded": (torch.full((3,), 1 + 1e-6), torch.ones(3)),
    "NaN": (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
    "infinite": (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("inf")])),
    "rounded beside a large element": (torch.tensor([1e6, 1.0]), torch.tensor([1e6, 2.0])),
    "empty": (torch.ones(0), torch.ones(0)),
}
DIFFER = {
    "value": (torch.full((3,), 1.001), torch.ones(3)),
    "shape": (torch.ones(3), torch.ones(1, 3)),
    "dtype": (torch.ones(3), torch.ones(3).double()),
    "integer": (torch.tensor([1, 2]), torch.tensor([1, 3])),
    "NaN": (torch.tensor([1.0, float("nan")]), torch.ones(2)),
}


@pytest.mark.parametrize("case", AGREE)
def test_tensors_that_agree(case: str) -> None:
    assert difference(*AGREE[case]) is None


@pytest.mark.parametrize("case", DIFFER)
def test_tensors_that_differ(case: str) -> None:
    assert difference(*DIFFER[case])
