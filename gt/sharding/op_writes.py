"""Builds the programs of ops that write to their inputs: on shards, and through views of them."""

from __future__ import annotations

from collections.abc import Sequence

from gt.core.signatures import Arg, Input, Move, Signature
from gt.sharding.lowering import NoRule
from gt.sharding.op_calls import OpCall, functional_args, inputs_in, with_inputs
from gt.sharding.program_builder import InPlaceWrite, ProgramBuilder
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
