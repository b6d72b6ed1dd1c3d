"""Numbers of autograd's nodes, by which a gradient finds the signal scope of its op, and the end of backward."""

import pytest
import torch

from gt.client.torch_patches.autograd_nodes import (
    FIRST_ACCUMULATING,
    NO_BACKWARD,
    accumulated_parameter,
    call_after_backward,
    current_backward,
    current_node,
    gradient_hook_tables,
    next_sequence_number,
    refuse_backward,
    sequence_number,
    set_gradient_hook_tables,
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


def test_the_end_of_a_backward_is_noticed():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: call_after_backward(lambda: seen.append((current_backward(), x.grad))))
    assert current_backward() == NO_BACKWARD
    y.sum().backward()
    assert len(seen) == 1 and seen[0][1] is not None, "copies of parameters would be kept after backward"


def test_each_backward_has_a_number():
    seen = []
    for _ in range(2):
        y = torch.ones(2, requires_grad=True) * 2
        y.register_hook(lambda gradient: seen.append(current_backward()))
        y.sum().backward()
    assert seen[0] != seen[1] and NO_BACKWARD not in seen, "the end of a second backward would not be noticed"


def test_a_hook_before_a_node_is_called_before_its_gradient():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.grad_fn.register_prehook(lambda gradients: seen.append("before"))
    x.register_hook(lambda gradient: seen.append("gradient"))
    y.sum().backward()
    assert seen == ["before", "gradient"], "copies of parameters would be dropped before they are used"


def test_the_node_that_accumulates_a_gradient_knows_its_parameter():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    told = "gradients would be reduced one by one"
    assert accumulated_parameter(y.grad_fn.next_functions[0][0]) is x, told
    assert accumulated_parameter(y.grad_fn) is None, told


def test_hooks_run_for_a_tensor_that_takes_their_tables():
    seen = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    handle = x.register_hook(lambda gradient: seen.append(gradient))
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor))
    set_gradient_hook_tables(y, gradient_hook_tables(x))
    (y * 2).sum().backward()
    assert len(seen) == 2, "hooks on parameters would be lost in gt.to(module)"
    handle.remove()
    (y * 2).sum().backward()
    assert len(seen) == 3


def test_backward_is_refused_by_the_graphs_that_exist():
    x = torch.ones(2, requires_grad=True)
    old = (x * 2).sum()
    refuse_backward(x, "moved")
    with pytest.raises(RuntimeError, match="^moved$"):
        old.backward()
    unused = torch.ones(2, requires_grad=True)
    refuse_backward(unused, "moved")
    (unused * 2).sum().backward()
    assert unused.grad is not None, "graphs that are recorded later would be refused"
