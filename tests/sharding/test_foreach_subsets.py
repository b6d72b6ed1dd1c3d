"""Calls on lists of tensors, restricted to some positions of the lists."""

from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, Scalar, Signature
from gt.sharding.foreach_subsets import first_list_inputs, is_foreach, subset_of

META = [TensorMeta((size,), (1,), 0, "float32") for size in (2, 3, 4)]


def lists(*ranges):
    return [ListArg(tuple([Input(index) for index in each])) for each in ranges]


def addcdiv(in_place):
    """`_foreach_addcdiv` of three tensors with a scalar for each."""
    scalars = ListArg((Scalar(0), Scalar(1), Scalar(2)))
    op = "aten._foreach_addcdiv_.ScalarList" if in_place else "aten._foreach_addcdiv.ScalarList"
    args = (*lists(range(3), range(3, 6), range(6, 9)), scalars)
    made = () if in_place else tuple(META)
    return Signature(op, args, {}, ((),) * 9, (0, 1, 2) if in_place else (), made, tuple(range(len(made))))


def test_a_subset_takes_its_positions_of_every_list():
    subset = subset_of(addcdiv(in_place=False), (0, 2))
    assert (subset.inputs, subset.outputs, subset.scalars) == ((0, 2, 3, 5, 6, 8), (0, 2), (0, 2))
    assert subset.signature.args == (*lists((0, 1), (2, 3), (4, 5)), ListArg((Scalar(0), Scalar(1))))
    assert subset.signature.outputs == (META[0], META[2]) and subset.signature.positions == (0, 1)


def test_a_subset_of_a_write_has_new_versions_of_its_own():
    subset = subset_of(addcdiv(in_place=True), (1,))
    assert (subset.inputs, subset.outputs) == ((1, 4, 7), (1,))
    assert subset.signature.writes == (0,) and subset.signature.outputs == ()


def test_an_operand_that_is_no_list_is_in_every_subset():
    call = Signature("aten._foreach_mul.Tensor", (*lists((0, 1)), Input(2)), {}, ((),) * 3, (), tuple(META[:2]), (0, 1))
    assert [subset_of(call, (position,)).inputs for position in (0, 1)] == [(0, 2), (1, 2)]


def test_the_inputs_of_the_first_list_are_found():
    assert is_foreach(addcdiv(in_place=True)) and first_list_inputs(addcdiv(in_place=True)) == (0, 1, 2)
    assert not is_foreach(Signature("aten.stack.default", tuple(lists((0, 1))), {}, ((), ()), (), (), ()))


def test_irregular_calls_are_not_divided():
    uneven = Signature("aten._foreach_add.List", tuple(lists((0, 1), (2,))), {}, ((),) * 3, (), tuple(META[:2]), (0, 1))
    unknown = Signature("aten._foreach_neg.default", tuple(lists((0, 7))), {}, ((),) * 2, (), tuple(META[:2]), (0, 1))
    assert first_list_inputs(uneven) == first_list_inputs(unknown) == ()
