"""Numbers of autograd's nodes, by which a gradient finds the signal scope of its op."""

import torch

from gt.client.torch_patches.autograd_nodes import (
    FIRST_ACCUMULATING,
    accumulated_parameter,
    current_node,
    next_sequence_number,
    sequence_number,
)


def test_nodes_are_numbered_as_they_are_made():
    x = torch.ones(2, requires_grad=True)
    before = next_sequence_number()
    y = x * 2
    assert before <= sequence_number(y.grad_fn) < next_sequence_number(), "gradients would run in a wrong signal scope"
    assert sequence_number(y.grad_fn.next_functions[0][0]) >= FIRST_ACCUMULATING, "accumulation would have a scope"


def test_the_current_node_is_known_in_backward_only():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(current_node()))
    assert current_node() is None, "ops outside backward would be taken for gradients"
    y.sum().backward()
    assert seen[0] is not None, "gradients would run in the signal scope of the caller of backward()"


def test_the_node_that_accumulates_a_gradient_knows_its_parameter():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    told = "gradients would be reduced one by one"
    assert accumulated_parameter(y.grad_fn.next_functions[0][0]) is x, told
    assert accumulated_parameter(y.grad_fn) is None, told
