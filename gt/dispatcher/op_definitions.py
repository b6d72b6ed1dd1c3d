"""Op definitions of a session, with the plans that were made for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from gt.core.errors import LayoutError
from gt.core.meta import TensorMeta
from gt.core.signatures import Signature, SpecRecord
from gt.dispatcher.instruction_errors import InvalidInstruction
from gt.dispatcher.planner import Plan, TensorMove
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.foreach_subsets import ForeachSubset
from gt.sharding.placements import require_fit
from gt.sharding.spec import DeviceMesh, ShardingSpec, mesh_of, spec_of
from gt.signals.policy import Policy

InputLayout: TypeAlias = ShardingSpec | tuple[ShardingSpec, ...]
"""The layout of an input; with copies, a tuple of its layout and theirs."""

PlanKey: TypeAlias = tuple[Policy | InputLayout | tuple[int, int] | str, ...]
MoveKey: TypeAlias = tuple[TensorMove, ...]
_OP_NAME = re.compile(r"\w+(\.\w+)+")
_REDUCES_FIRST = "reduces first"
MOVE = "redistribute"  # the name of programs that only move tensors


def plan_key(
    policy: Policy | None,
    layouts: tuple[InputLayout, ...],
    aliased_inputs: Mapping[int, int] | None = None,
    reduces_first: bool = False,
) -> PlanKey:
    """The key of a cached plan: everything about a call that its plan depends on, the op aside. Hot path: the common
    call has no aliased inputs."""
    if not aliased_inputs and not reduces_first:
        return layouts if policy is None else (policy, *layouts)
    key: PlanKey = (*layouts, *(aliased_inputs or {}).items())
    if policy is not None:
        key = (policy, *key)
    return (_REDUCES_FIRST, *key) if reduces_first else key


class CachedPlan(NamedTuple):
    """A plan with the id by which a RunOp names it: `op_id` is that of its program or, without one, of the op itself.
    `results` are the records of the new tensors. `moves_inputs`: some input is taken in another layout than it has.
    `exchanges`: the workers exchange tensors. `needs_preparation`: inputs are moved, a gathering is reported, or the
    plan holds for some scalars only."""

    plan: Plan
    op_id: int
    results: tuple[TensorRecord, ...]
    moves_inputs: bool
    exchanges: bool
    needs_preparation: bool


class OpFacts(NamedTuple):
    """The facts about an op or program that outlive it: its name, the positions of the inputs that it writes to, and
    the layouts of its results."""

    name: str
    writes: tuple[int, ...]
    layouts: tuple[ShardingSpec, ...] = ()

    @property
    def is_move(self) -> bool:
        return self.name == MOVE

    @classmethod
    def of_program(cls, name: str, plan: Plan) -> OpFacts:
        writes = plan.program.consumes if plan.program is not None and name != MOVE else ()
        return cls(name, writes, tuple(spec for _, spec in plan.results))


class SubsetOp(NamedTuple):
    """A foreach op on some positions of its lists, and the id under which the session has it."""

    op_id: int
    subset: ForeachSubset


class OpRecord(NamedTuple):
    """A signature and the plans made for it. `output_count` counts new tensors and new versions. `layout` is that of
    the outputs, if the user gave one, and `nbytes` their size; `mesh` is where the user wants the op to run, or None.
    `subsets` are the same op on some positions of its lists, by these positions, for a foreach op whose tensors
    were on different meshes."""

    op_id: int
    signature: Signature
    input_count: int
    output_count: int
    layout: ShardingSpec | None
    mesh: DeviceMesh | None
    plans: dict[PlanKey, CachedPlan]
    nbytes: int
    subsets: dict[tuple[int, ...], SubsetOp]

    def aliased_inputs(self, inputs: tuple[int, ...]) -> dict[int, int]:
        """Maps each input that aliases a written one to that one's position. Raises InvalidInstruction for a tensor
        that is written at two positions: it would have two new versions."""
        if not self.signature.writes or len(set(inputs)) == len(inputs):
            return {}
        written = {inputs[position]: position for position in self.signature.writes}
        if len(written) < len(self.signature.writes):
            raise InvalidInstruction(
                f"{self.signature.op} writes {self.signature.writes} of {inputs}: one tensor at two positions"
            )
        return {
            position: target
            for position, ident in enumerate(inputs)
            if (target := written.get(ident, position)) != position
        }

    def require_fit(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[int, int]:
        """Check the number of tensors of a call; returns its aliased inputs."""
        if len(inputs) != self.input_count or len(outputs) != self.output_count:
            raise InvalidInstruction(
                f"{self.signature.op} takes {self.input_count} tensors and gives {self.output_count}"
            )
        return self.aliased_inputs(inputs)

    def require_fit_of_query(self, inputs: tuple[int, ...], written: tuple[int, ...]) -> None:
        writes = len(self.signature.writes)
        if len(inputs) != self.input_count or len(written) != writes:
            raise InvalidInstruction(f"{self.signature.op} takes {self.input_count} tensors and writes {writes}")
        self.aliased_inputs(inputs)

    @classmethod
    def of(cls, op_id: int, signature: Signature) -> OpRecord:
        input_count, writes, outputs = len(signature.paths), signature.writes, signature.outputs
        for name in (signature.op, signature.functional or signature.op):
            if not _OP_NAME.fullmatch(name):
                raise InvalidInstruction(f"{name!r} is not the name of an op, such as aten.add.Tensor", "op")
        if len(set(writes)) < len(writes) or not all(0 <= position < input_count for position in writes):
            raise InvalidInstruction(f"{signature.op} of {input_count} tensors cannot write {writes}")
        if signature.fully_written and len(signature.fully_written) != len(writes):
            raise InvalidInstruction(
                f"{signature.op} writes to {len(writes)} inputs, {len(signature.fully_written)} of them fully written"
            )
        layout = layout_from_record(signature.layout) if signature.layout is not None else None
        if layout is not None:
            for meta in outputs:
                require_layout_fit(layout, meta)
        nbytes = sum(meta.nbytes for meta in outputs)
        mesh = _named_mesh(signature, layout)
        return cls(op_id, signature, input_count, len(outputs) + len(writes), layout, mesh, {}, nbytes, {})


def layout_from_record(record: SpecRecord) -> ShardingSpec:
    """The layout that a client describes. Raises InvalidInstruction if there is no such layout."""
    try:
        return spec_of(record)
    except ValueError as error:
        raise InvalidInstruction(str(error)) from None


def _named_mesh(signature: Signature, layout: ShardingSpec | None) -> DeviceMesh | None:
    if layout is not None:
        return layout.mesh
    if signature.algorithm is None or signature.algorithm.mesh is None:
        return None
    try:
        return mesh_of(signature.algorithm.mesh)
    except ValueError as error:
        raise InvalidInstruction(str(error)) from None


def require_layout_fit(layout: ShardingSpec, meta: TensorMeta) -> None:
    """Raises InvalidInstruction if a tensor cannot have a layout."""
    try:
        require_fit(layout, meta)
    except LayoutError as error:
        raise InvalidInstruction(str(error)) from None
