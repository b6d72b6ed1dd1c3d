"""The models and plans of test_models.py on two worker processes."""

from __future__ import annotations

import pytest

from tests.sharding.test_models import MODELS, compare, plans


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", ["data", "tensor", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_torch_on_two_processes(two_processes, model, plan):
    make, weights = MODELS[model]
    compare(make, plans(2, weights)[plan], (4, 8))
