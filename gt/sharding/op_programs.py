"""Builds the program of one op on a mesh: by its sharding rule, or on whole tensors if it has none."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gt.core.signatures import Arg, Complex, Input, Move, Signature
from gt.sharding.considered_strategies import NotedCall
from gt.sharding.constraints import Constraint, Target, satisfy
from gt.sharding.lowering import NoRule
from gt.sharding.op_calls import OpCall, functional_args, inputs_in, with_inputs
from gt.sharding.program_builder import InPlaceWrite, ProgramBuilder, Register
from gt.sharding.rules import is_linear_with
from gt.sharding.schedules import UnfitAlgorithm
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.strategies import OpStrategy


def write_shards(builder: ProgramBuilder, signature: Signature, is_aliased: bool) -> tuple[int, ...]:
    """Emit an op that writes, by its rule. Raises NoRule if that is not possible. `is_aliased`: some input aliases a
    written one.

    A partial target stays partial if all tensors can stay as they are, as where partial values are added to it. Any
    other write needs the reduced target.
    """
    if not signature.functional or (is_aliased and any(signature.paths)):
        raise NoRule(signature.op)
    if any(builder.spec(position).partial for position in signature.writes) and not builder.reduces_first:
        results = _write_partial(builder, signature)
        if results is not None:
            return results
    return _write_to(builder, signature, {position: _reduced(builder, position) for position in signature.writes})


def _write_partial(builder: ProgramBuilder, signature: Signature) -> tuple[int, ...] | None:
    """Emit a write to targets as they are, partial ones included; None if some tensor has to change its layout."""
    trial = builder.fork()
    try:
        results = _write_to(trial, signature, {position: position for position in signature.writes})
    except NoRule:
        return None
    if trial.hoisted or any(isinstance(step, Move) for step in trial.steps):
        return None
    builder.adopt(trial)
    return results


def _write_to(builder: ProgramBuilder, signature: Signature, bases: dict[int, int]) -> tuple[int, ...]:
    """Emit an op that writes; `bases` are the registers of its targets, by position."""
    views: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for position in signature.writes:
        found = builder.view_in_place(bases[position], signature.paths[position])
        if found is None:
            raise NoRule(f"{signature.op} through {signature.paths[position][-1].op}")
        views[position] = found
    used = [
        views[position][0] if position in views else builder.view(position, path)
        for position, path in enumerate(signature.paths)
    ]
    only_written = frozenset([value.index for value in inputs_in((), signature.kwargs)]) & views.keys()
    order = [position for position in range(len(used)) if position not in only_written]
    call = _functional_call(builder, signature, used, order, only_written)
    targets = [used[position] for position in signature.writes]
    rest = [position for position in range(len(used)) if position in only_written]
    written = InPlaceWrite(
        (-1,) * len(signature.outputs) + tuple(targets),
        _renumbered(signature, [*order, *rest]),
        tuple(used[position] for position in rest),
    )
    registers = [used[position] for position in order]
    outputs = _write_call(
        builder, call, registers, written, random=signature.random, default_dtype=signature.default_dtype
    )
    for position, (view, steps) in views.items():
        if steps:
            builder.write_back(bases[position], view, steps)
    return (*outputs[: len(signature.outputs)], *[bases[position] for position in signature.writes])


def _write_call(
    builder: ProgramBuilder,
    call: OpCall,
    registers: Sequence[int],
    write: InPlaceWrite,
    *,
    random: bool = False,
    default_dtype: str = "float32",
) -> tuple[int, ...]:
    """Emit a call that writes to registers: in place if the layouts of its results allow that, else by copies of its
    results. Returns the registers of all its outputs."""
    targets = [None if register < 0 else builder.spec(register) for register in write.into]
    specs = [builder.spec(register) for register in registers]
    choice = builder.choose(call, registers, targets)
    if isinstance(choice, ProgramBuilder):
        builder.adopt(choice)
        return _copy_results(builder, write, choice.results)
    given, needed = choice.strategy.results, choice.strategy.operands
    fits = all(target is None or target is spec for target, spec in zip(targets, given, strict=True))
    stays = all(spec is specs[p] for p, spec in enumerate(needed) if registers[p] in write.into)
    if fits and stays:
        return builder.compute(
            call, registers, choice.strategy, random=random, default_dtype=default_dtype, write=write
        )
    results = builder.compute(call, registers, choice.strategy, random=random, default_dtype=default_dtype, casts=True)
    return _copy_results(builder, write, results)


def _copy_results(builder: ProgramBuilder, write: InPlaceWrite, results: Sequence[int]) -> tuple[int, ...]:
    """Emit copies of newly allocated results into the registers that they are written to."""
    return tuple(
        [
            result if target < 0 else _copy_into(builder, target, result)
            for target, result in zip(write.into, results, strict=True)
        ]
    )


def _copy_into(builder: ProgramBuilder, target: int, result: int) -> int:
    meta, spec, _ = builder.registers[target]
    moved = builder.move(result, spec)
    call = OpCall("aten.copy.default", (Input(0), Input(1)), {}, (meta, builder.registers[moved].meta), (meta,))
    signature = Signature("aten.copy_.default", call.args, {}, ((), ()), (0,), (), ())
    strategy = OpStrategy((spec, builder.spec(moved)), (spec,), {})
    return builder.compute(call, (target, moved), strategy, write=InPlaceWrite((target,), signature))[0]


def _reduced(builder: ProgramBuilder, position: int) -> int:
    """The register of an input that is reduced if it is partial: only then it can be written."""
    spec = builder.spec(position)
    return builder.move(position, spec.replace(partial=())) if spec.partial else position


def _functional_call(
    builder: ProgramBuilder,
    signature: Signature,
    used: Sequence[int],
    order: Sequence[int],
    only_written: frozenset[int],
) -> OpCall:
    args, kwargs = functional_args(signature.args, signature.kwargs, only_written)
    new_positions = {position: new for new, position in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(new_positions[value.index])

    written = [builder.registers[used[position]].meta.dense() for position in signature.writes]
    return OpCall(
        signature.functional,
        tuple(with_inputs(arg, renumber) for arg in args),
        {name: with_inputs(arg, renumber) for name, arg in kwargs.items()},
        tuple(builder.registers[used[position]].meta for position in order),
        (*signature.outputs, *written),
    )


def _renumbered(signature: Signature, order: Sequence[int]) -> Signature:
    """The op as it was called, with its inputs in another order and without views."""
    new_positions = {position: new for new, position in enumerate(order)}

    def renumber(value: Input) -> Arg:
        return Input(new_positions[value.index])

    return Signature(
        signature.op,
        tuple(with_inputs(arg, renumber) for arg in signature.args),
        {name: with_inputs(arg, renumber) for name, arg in signature.kwargs.items()},
        ((),) * len(order),
        tuple(new_positions[position] for position in signature.writes),
        (),
        signature.positions,
        signature.random,
        signature.default_dtype,
    )


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
