"""Plans as text: `workers: inputs -> results`, where `b>[dp]` is an input that is moved to that layout first."""

import msgspec

from gt.core.signatures import Compute, Input, Move, Signature, ViewStep, Whole
from gt.dispatcher.planner import plan_op
from gt.sharding.spec import DeviceMesh, spec_of
from gt.sharding.spec_text import parse_spec
from tests.dispatcher_harness import solo_mesh
from tests.records import meta, signature

MESH = DeviceMesh([2, 2], ["dp", "tp"], [0, 1, 2, 3])
SQUARE = meta(4, 4)
MM = signature("aten.mm.default", 2, (SQUARE,))
ADD = signature("aten.add.Tensor", 2, (SQUARE,))
ADD_ = signature("aten.add_.Tensor", 2, writes=(0,), functional="aten.add.Tensor")
RELU = signature("aten.relu.default", 1, (SQUARE,))
NO_RULE = signature("aten.no_such.default", 1, (SQUARE,))
NO_RULE_ = signature("aten.no_such_.default", 1, writes=(0,), functional="aten.no_such.default")


def plan(op, *layouts, metas=None, aliased_inputs=None, mesh=MESH, reduces_first=False):
    specs = [parse_spec(text, mesh) if isinstance(text, str) else text for text in layouts]
    return plan_op(op, metas or [SQUARE] * len(specs), specs, solo_mesh(0), aliased_inputs, reduces_first=reduces_first)


def show(found):
    """`0 1: a b>[dp] -> [dp]`"""
    sources = [chr(97 + position) + (f">[{spec}]" if spec is not None else "") for position, spec in found.sources]
    results = [f"[{spec}]" for _, spec in found.results]
    return f"{' '.join(map(str, found.workers))}: {' '.join(sources)} -> {' '.join(results)}"


def steps(found):
    """The steps of a program as text."""
    return [_step(step) for step in found.program.steps]


def _step(step):
    if isinstance(step, Move):
        return f"move [{spec_of(step.source)}] to [{spec_of(step.target)}]"
    if isinstance(step, Compute):
        how = " in place" if step.in_place is not None else " as a view" if step.is_view else ""
        return step.op.split(".")[1] + how
    return "whole " + step.signature.op.split(".")[1] if isinstance(step, Whole) else "write back"


def kinds(found):
    return [collective.kind for collective in found.collectives]


def through(op, *paths):
    """The same op on views of its inputs."""
    return msgspec.structs.replace(op, paths=paths + ((),) * (len(op.paths) - len(paths)))


def view(name, *args, shape, stride=None):
    result = meta(*shape) if stride is None else msgspec.structs.replace(meta(*shape), stride=stride)
    return ViewStep(f"aten.{name}", args, {}, None, None, (result,))


TRANSPOSED = view("transpose.int", 0, 1, shape=(4, 4), stride=(1, 4))
ADD_OUT = Signature(
    "aten.add.out", (Input(0), Input(1)), {"out": Input(2)}, ((),) * 3, (2,), (), (), functional="aten.add.Tensor"
)
OTHER = DeviceMesh([2], ["x"], [4, 5])
