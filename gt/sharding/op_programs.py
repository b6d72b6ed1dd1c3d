"""Builds the program of one op on a mesh: by its sharding rule, or on whole tensors if it has none."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.signatures import Complex, Move, Signature
from gt.sharding.considered_strategies import NotedCall
from gt.sharding.constraints import Constraint, Target, satisfy
from gt.sharding.lowering import NoRule
from gt.sharding.op_calls import OpCall
from gt.sharding.op_writes import write_shards
from gt.sharding.program_builder import ProgramBuilder, Register
from gt.sharding.rules import is_linear_with
from gt.sharding.schedules import UnfitAlgorithm
from gt.sharding.spec import DeviceMesh, ShardingSpec

_REASON_LENGTH = 1 << 16


class BuiltOp(NamedTuple):
    """A builder with the steps of an op, and the registers of its outputs and of the new versions. `gathered` is the op
    without a rule (the op itself or a view of an input) that forces inputs to be gathered, or ""."""

    builder: ProgramBuilder
    results: tuple[int, ...]
    gathered: str = ""


def mesh_with_most_bytes(inputs: Sequence[Register]) -> DeviceMesh | None:
    """The mesh with the most bytes of the inputs, so that the fewest move; of equals the larger mesh."""
    nbytes: dict[DeviceMesh, int] = {}
    for meta, spec, _ in inputs:
        nbytes[spec.mesh] = nbytes.get(spec.mesh, 0) + meta.nbytes
    return max(nbytes, key=lambda mesh: (nbytes[mesh], mesh.size, [-worker for worker in mesh.workers]), default=None)


def build_op(
    signature: Signature,
    mesh: DeviceMesh,
    inputs: Sequence[Register],
    targets: Sequence[Target],
    aliased_inputs: Mapping[int, int],
    *,
    reduces_first: bool,
    noted: list[NotedCall] | None = None,
) -> BuiltOp:
    """Emit the steps of an op on a mesh, and the moves of its outputs to their targets. `aliased_inputs` maps each
    input that aliases a written one to that one's position. With `reduces_first` partial inputs are reduced before the
    op. `noted` gets the calls that are emitted by a rule, with their strategies."""
    reduces_first = reduces_first or not _is_linear_with_constants(signature)
    builder = ProgramBuilder(
        mesh, inputs, signature.writes, reduces_first=reduces_first, algorithm=signature.algorithm, noted=noted
    )
    built = _build(builder, signature, inputs, aliased_inputs, targets)
    results = built.results if signature.writes else [_reduced_already(built.builder, each) for each in built.results]
    moved = [
        _move_to_target(built.builder, register, target) for register, target in zip(results, targets, strict=False)
    ]
    return built._replace(results=(*moved, *results[len(targets) :]))


def _reduced_already(builder: ProgramBuilder, result: int) -> int:
    """The register with the reduced value of a partial result, if the program reduces it for another step: later ops
    need not reduce it again. Otherwise the result itself."""
    if builder.spec(result).partial:
        for step in builder.steps:
            if isinstance(step, Move) and step.input == result and not builder.spec(step.output).partial:
                return step.output
    return result


def _move_to_target(builder: ProgramBuilder, register: int, target: Target) -> int:
    spec = builder.spec(register)
    return builder.move(
        register, target if isinstance(target, ShardingSpec) else satisfy(target, spec) if target else spec
    )


def _is_linear_with_constants(signature: Signature) -> bool:
    scalars = [complex(arg.real, arg.imag) for arg in signature.args if isinstance(arg, Complex)]
    return is_linear_with(signature.functional or signature.op, scalars)


def _build(
    builder: ProgramBuilder,
    signature: Signature,
    inputs: Sequence[Register],
    aliased_inputs: Mapping[int, int],
    targets: Sequence[Target],
) -> BuiltOp:
    missing, mesh = "", builder.mesh
    layouts = [register.spec for register in inputs] + [target for target in targets if target is not None]
    is_sharded = any(isinstance(layout, Constraint) or not layout.is_whole for layout in layouts)
    if is_sharded or signature.algorithm is not None:
        try:
            return BuiltOp(builder, _emit_on_shards(builder, signature, bool(aliased_inputs), targets))
        except NoRule as lack:
            missing = str(lack)
        except UnfitAlgorithm as error:
            return BuiltOp(builder, builder.refuse(signature, str(error)))
        except Exception as error:  # an error in a rule costs the user this op only
            return _build_failing(signature, inputs, mesh, error)
    builder = ProgramBuilder(mesh, inputs, signature.writes)
    sources = [aliased_inputs.get(position, position) for position in range(len(inputs))]
    return BuiltOp(builder, builder.emit_whole(signature, sources), missing)


def _build_failing(signature: Signature, inputs: Sequence[Register], mesh: DeviceMesh, error: Exception) -> BuiltOp:
    """A program that fails with an error of a sharding rule."""
    builder = ProgramBuilder(mesh, inputs, signature.writes)
    layouts = ", ".join([f"{meta} as [{spec}]" for meta, spec, _ in inputs])
    text = "".join(traceback.format_exception(error)).rstrip()
    reason = f"GT has a mistake in its sharding rule of {signature.op} for {layouts}; please report it:\n{text}"
    return BuiltOp(builder, builder.refuse(signature, reason[:_REASON_LENGTH]))


def _emit_on_shards(
    builder: ProgramBuilder, signature: Signature, is_aliased: bool, targets: Sequence[Target]
) -> tuple[int, ...]:
    """Emit an op by its rule, with reads and writes through views. Raises NoRule if that is not possible. `is_aliased`:
    some input aliases a written one."""
    if signature.writes:
        return write_shards(builder, signature, is_aliased)
    return _read_shards(builder, signature, targets)


def _read_shards(builder: ProgramBuilder, signature: Signature, targets: Sequence[Target]) -> tuple[int, ...]:
    used = [builder.view(position, path) for position, path in enumerate(signature.paths)]
    metas = tuple(builder.registers[register].meta for register in used)
    call = OpCall(signature.op, signature.args, signature.kwargs, metas, signature.outputs, signature.positions)
    return builder.apply(call, used, targets, random=signature.random, default_dtype=signature.default_dtype)
