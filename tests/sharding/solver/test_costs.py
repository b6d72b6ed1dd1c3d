"""The cost model: work of ops by their factors, times of moves, and the calibration record."""

import pytest

from gt.core.errors import SettingsError
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input
from gt.sharding.calibration import Calibration, format_calibration, read_calibration
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from gt.sharding.solver.name_patterns import as_patterns
from gt.sharding.solver.op_strategies import MachineKey, call_strategies, layouts_of, move_cost
from gt.sharding.spec import DeviceMesh, whole
from gt.sharding.spec_text import parse_spec
from gt.sharding.strategies import FactorSharding
from gt.sharding.work import LaidOutTensor, work_of

MESH = DeviceMesh([2, 4], ["dp", "tp"], range(8))
MACHINE = Calibration(op_seconds=0.0, message_seconds=0.0)


def meta(*shape, dtype="float32"):
    return TensorMeta(shape, contiguous_strides(shape), 0, dtype)


def call(op, inputs, outputs, *args):
    return OpCall(op, args or tuple(Input(n) for n in range(len(inputs))), {}, tuple(inputs), tuple(outputs))


MM = call("aten.mm.default", [meta(8, 16), meta(16, 32)], [meta(8, 32)])
SOFTMAX = call("aten._softmax.default", [meta(8, 16)], [meta(8, 16)], Input(0), 1, False)
EMBEDDING = call("aten.embedding.default", [meta(1000, 16), meta(8, dtype="int64")], [meta(8, 16)])


def flops(call, **cuts):
    rule = rule_of(call)
    tensors = [LaidOutTensor(each.shape, 4, whole(MESH, len(each.shape))) for each in (*call.inputs, *call.outputs)]
    return work_of(rule, {name: FactorSharding(axes) for name, axes in cuts.items()}, tensors).flops


def test_a_product_multiplies_and_adds_for_each_triple():
    assert flops(MM) == 2 * 8 * 16 * 32
    assert flops(MM, i=("dp",)) == 2 * 4 * 16 * 32
    assert flops(MM, k=("dp", "tp")) == 2 * 8 * 2 * 32


def test_the_work_of_other_ops_is_that_of_their_elements():
    assert flops(SOFTMAX) == 8 * 16
    assert flops(EMBEDDING) == 1000 * 16  # of its largest tensor, not vocabulary times tokens


def test_strategies_of_a_product_are_the_six_local_rules_of_each_axis():
    line = DeviceMesh([4], ["x"], range(4))
    found = {
        (*map(str, strategy.operands), str(strategy.results[0])): time
        for strategy, time in call_strategies(MM, line, MACHINE, is_view=False)
    }
    assert set(found) == {
        ("x, -", "-, -", "x, -"),
        ("-, -", "-, x", "-, x"),
        ("-, x", "x, -", "-, - + x"),
        ("-, - + x", "-, -", "-, - + x"),
        ("-, -", "-, - + x", "-, - + x"),
        ("-, -", "-, -", "-, -"),
    }
    assert found["x, -", "-, -", "x, -"] < found["-, -", "-, -", "-, -"]


def test_layouts_leave_no_worker_without_elements():
    assert [str(spec) for spec in layouts_of(meta(3), DeviceMesh([4], ["x"], range(4)))] == ["-"]
    assert len(layouts_of(meta(8, 8), MESH)) == 9


@pytest.mark.parametrize(
    ("source", "target", "nbytes"),
    [("dp, -", "-, -", 8 * 128), ("-, -", "dp, tp", 0), ("dp, -", "-, dp", 8 * 64), ("dp, -", "dp, -", 0)],
)
def test_a_move_costs_the_bytes_that_workers_receive(source, target, nbytes):
    specs = [parse_spec(text, MESH) for text in (source, target)]
    assert move_cost(meta(8, 8), *specs, MachineKey(MACHINE)).nbytes == nbytes


def test_messages_cost_time_even_if_they_are_small():
    slow = MachineKey(Calibration(message_seconds=1.0))
    specs = [parse_spec(text, DeviceMesh([4], ["x"], range(4))) for text in ("- + x", "-")]
    assert 6 <= move_cost(meta(8), *specs, slow).seconds < 6.1  # three messages to reduce, and three to gather


def test_an_axis_may_have_links_of_its_own():
    machine = Calibration(axes={"dp": (1.0, 1e6)})
    assert machine.link(("dp",)).alpha == machine.link(("dp", "tp")).alpha == 1.0
    assert machine.link(("tp",)).beta == pytest.approx(1 / machine.link_bandwidth)


def test_a_calibration_is_stored_as_a_readable_record(tmp_path):
    file = tmp_path / "calibration.json"
    assert read_calibration(file) is None
    measured = Calibration(flops=1e12, axes={"dp": (1e-5, 1e9)}, source="measured")
    file.write_bytes(format_calibration(measured))
    assert read_calibration(file) == measured
    assert '"flops": 1000000000000.0' in file.read_text()
    file.write_text('{"flops": "many"}')
    with pytest.raises(SettingsError, match="is no calibration"):
        read_calibration(file)


def test_a_speed_of_nothing_is_refused():
    with pytest.raises(SettingsError, match="flops of a calibration"):
        Calibration(flops=0)
    with pytest.raises(SettingsError, match="overlap of a calibration is a share from 0 to 1, not 2"):
        Calibration(overlap=2)


def test_layers_with_one_layout_share_a_pattern():
    names = ["h.0.a.weight", "h.1.a.weight", "h.0.b.weight", "h.1.b.weight", "head.weight"]
    layouts = {"h.0.a.weight": "x", "h.1.a.weight": "x", "h.0.b.weight": "y", "head.weight": "z"}
    assert as_patterns(layouts, names) == {"h.*.a.weight": "x", "h.0.b.weight": "y", "head.weight": "z"}


def test_a_pattern_that_would_match_another_name_is_written_out():
    names = ["h.0.weight", "h.1.weight", "h.x.weight"]
    assert as_patterns({"h.0.weight": "x", "h.1.weight": "x"}, names) == {"h.0.weight": "x", "h.1.weight": "x"}
