"""GT_STRATEGY=cost: times of ops and moves decide, not bytes alone."""

import pytest

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input
from gt.sharding import strategy_choice
from gt.sharding.lowering import forget_choices, infer_output_sharding
from gt.sharding.op_calls import OpCall
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec

MESH = DeviceMesh([2, 4], ["dp", "tp"], range(8))


def meta(*shape):
    return TensorMeta(shape, contiguous_strides(shape), 0, "float32")


@pytest.fixture
def choose(monkeypatch):
    def chosen(how, left, right, sizes=(1024, 1024, 1024)):
        monkeypatch.setenv("GT_STRATEGY", how)
        strategy_choice._chooses_by_cost.cache_clear()
        forget_choices()
        m, k, n = sizes
        call = OpCall("aten.mm.default", (Input(0), Input(1)), {}, (meta(m, k), meta(k, n)), (meta(m, n),))
        specs = [parse_spec(text, MESH) for text in (left, right)]
        strategy = infer_output_sharding(call, specs, MESH).strategy
        return " @ ".join(map(str, strategy.operands)) + f" = {strategy.results[0]}"

    yield chosen
    monkeypatch.undo()
    strategy_choice._chooses_by_cost.cache_clear()
    forget_choices()


def test_what_moves_nothing_and_divides_the_work_is_taken_by_both(choose):
    for how in ("bytes", "cost"):
        assert choose(how, "dp, -", "-, tp") == "dp, - @ -, tp = dp, tp"
        assert choose(how, "-, tp", "tp, -") == "-, tp @ tp, - = -, - + tp"


def test_a_small_operand_is_moved_if_that_divides_a_large_product(choose):
    """By bytes, a partial operand is multiplied as it is, with all of the work on each worker. By cost, the axis that
    no operand uses divides the work too, since bytes move anyway."""
    sizes = (8192, 64, 8192)
    assert choose("bytes", "-, - + tp", "-, -", sizes) == "-, - + tp @ -, - = -, - + tp"
    assert choose("cost", "-, - + tp", "-, -", sizes) == "dp, tp @ tp, - = dp, - + tp"
