"""Torch's registry of ops, from which GT reads how to send an op."""

import torch

from gt.client.torch_patches.op_registry import DispatchKey, has_kernel, kernel_of, packet_name, schema_of

ADD = torch.ops.aten.add_.Tensor


def test_a_schema_tells_what_an_op_writes():
    schema = schema_of(ADD)
    first = schema.arguments[0]
    assert (schema.name, packet_name(ADD)) == ("aten::add_", "add_"), "ops are looked up in GT's tables by these names"
    assert first.alias_info.is_write, "GT would not know that an op writes in place"
    assert first.alias_info.before_set == schema.returns[0].alias_info.before_set, "in-place ops would return copies"
    assert [str(argument.type) for argument in schema.arguments] == ["Tensor", "Tensor", "number"], (
        "op_schema.py sorts arguments by these type names"
    )
    assert schema.is_mutable and schema_of(torch.ops.aten.add.out).arguments[-1].is_out
    assert schema_of(torch.ops.aten.convolution_backward.default).arguments[-1].N == 3, (
        "masks of gradients are found by N"
    )


def test_kernels_are_found_by_dispatch_key():
    linear, foreach = torch.ops.aten.linear.default, torch.ops.aten._foreach_add.Scalar
    assert has_kernel(linear, DispatchKey.CompositeImplicitAutograd), "composite ops would be sent to workers whole"
    assert has_kernel(foreach, DispatchKey.CompositeExplicitAutograd), "lists of tensors on several workers need it"
    assert has_kernel(torch.ops.aten.add.Tensor, DispatchKey.CompositeExplicitAutogradNonFunctional), (
        "strides would come from torch's Python shape functions, which differ from its kernels"
    )
    assert has_kernel(torch.ops.aten.mm.default, "Conjugate"), "strides of results of lazily conjugated operands"
    doubled = kernel_of(foreach, DispatchKey.CompositeExplicitAutograd)([torch.ones(1)], 1)
    assert doubled[0].item() == 2
