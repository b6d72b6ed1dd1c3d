"""The table of dtypes that CPU kernels refuse, compared with torch's kernels."""

import pytest
import torch

import gt
from gt.client import active_session
from gt.client.cached_calls import QueryCall
from gt.client.kernel_checks import REFUSED_DTYPES, TORCH_VERSION
from tests.conformance.kernel_dtypes import refused_dtypes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.__version__.startswith(TORCH_VERSION), reason="the table is that of another torch")
def test_the_table_is_that_of_torchs_kernels():
    assert refused_dtypes() == REFUSED_DTYPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_calls_in_common_dtypes_do_not_wait(dtype):
    gt.init()
    try:
        x, image = gt.ones(4, 4, dtype=dtype), gt.ones(1, 2, 4, 4, dtype=dtype)
        x.softmax(0).log_softmax(0).std().add_(x.mm(x).var(0).sum())
        torch.nn.functional.mse_loss(torch.nn.functional.max_pool2d(image, 2), image[:, :, :2, :2])
        calls = active_session.current().cached_calls.values()
        assert not [call for call in calls if isinstance(call, QueryCall)]
    finally:
        gt.shutdown()
