"""What calls draw from torch's generator."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gt

pytestmark = pytest.mark.usefixtures("anywhere")

SHAPE = (2, 2, 4, 8)
CALLS = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x).sum().backward(),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "native_dropout in evaluation": lambda x: torch.native_dropout(x, 0.5, train=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, train=True),
    "rrelu in evaluation": F.rrelu,
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def draws(call, x):
    state = torch.get_rng_state()
    call(x)
    return not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_draws_from_the_generator_where_torch_does(name):
    plain = torch.full(SHAPE, -1.0)  # rrelu draws for negative numbers
    ours = gt.to(plain).requires_grad_()
    assert draws(CALLS[name], ours) == draws(CALLS[name], plain.requires_grad_())


def test_attention_is_another_call_with_another_dropout():
    x = gt.ones(SHAPE)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert [draws(lambda x: attend(x, x, x, p), x) for p in (0.0, 0.5, 0.0)] == [False, True, False]
