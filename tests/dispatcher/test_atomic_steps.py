"""The beginning of an optimizer's step: gradients come into the layouts of their parameters before anything is
written."""

import pytest

from gt.core.messages import BeginStep
from gt.sharding.spec import DeviceMesh
from tests.dispatcher_harness import C, D, harness_with
from tests.records import meta, own

MESH = DeviceMesh([2], ["x"])


@pytest.mark.parametrize(
    ("shape", "layout", "gradient_shape", "gradient_layout", "expected"),
    [
        ((4,), "-", (4,), "- + x", "-"),
        ((4,), "-", (1, 4), "-, - + x", "-, -"),  # the gradient of a bias: a sum that keeps its dim
        ((4,), "x", (1, 4), "-, - + x", "-, x"),
        ((1, 4), "-, x", (4,), "- + x", "x"),
        ((4, 2), "-, -", (8,), "- + x", "-"),
        ((4, 2), "x, -", (2, 4), "-, - + x", "-, - + x"),  # the parameter's layout does not fit
    ],
)
def test_a_gradient_comes_into_the_layout_of_its_parameter(shape, layout, gradient_shape, gradient_layout, expected):
    harness = harness_with(2)
    harness.create(own(20), meta=meta(*shape))
    harness.create(own(21), meta=meta(*gradient_shape))
    harness.redistribute(own(20), C, layout, MESH)
    harness.redistribute(own(21), D, gradient_layout, MESH)
    harness.tell(BeginStep(own(30), (D,), (C,), 0))
    copies = [str(spec) for spec in harness.state.copies.get(D, {})]
    assert expected in (str(harness.state.tensors[D].spec), *copies)
