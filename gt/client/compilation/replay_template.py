"""Templates that repeat a recorded call: they send its instructions with new ids and scalars, and apply its effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from gt.client.cached_calls import rebind, wrap_view
from gt.client.compilation.call_programs import CallPrograms, Table, defined_programs
from gt.client.compilation.recorded_call import (
    RecordedCall,
    RefTemplate,
    ReturnedAgain,
    ReturnedContainer,
    ReturnedGradient,
    ReturnedInput,
)
from gt.client.session import Session
from gt.client.storage import Storage, StorageView, TensorRef
from gt.client.tensor import Tensor
from gt.core.errors import CompileError
from gt.core.messages import Instruction
from gt.core.program import picker


class ReplayTemplate:
    """The instructions of a recorded call for any ids and scalars. `scalar_groups` has, for each op, the position of
    its scalars among the distinct ones that `emit` gets."""

    def __init__(self, recorded: RecordedCall, scalar_groups: Sequence[int], session: Session) -> None:
        self._instructions = recorded.recording.instructions
        self._slots = recorded.slots
        self._dying = [tensor.id for tensor in recorded.recording.collected]
        self.sources = recorded.sources
        self.writes = recorded.writes
        self.effects = recorded.effects
        self._made = len(recorded.slots) - len(recorded.sources)
        self._pick_scalars = picker(scalar_groups)
        self._programs = self._as_programs(session.matcher.shortest)
        self._is_defined = False

    def _as_programs(self, shortest: int | None) -> CallPrograms:
        return CallPrograms(self._instructions, self._slots, self._dying, shortest)

    def reset_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Drop the gradients that the call replaces: those that it does not use are freed before it."""
        for position, _ in self.effects.gradients:
            tensors[position].grad = None

    def emit(self, session: Session, externals: Sequence[Storage], scalars: Sequence[tuple[Any, ...]]) -> Table:
        """Queue the instructions of one call. Returns its table of ids."""

        def build(ids: tuple[int, ...]) -> tuple[Table, Sequence[Instruction]]:
            definitions = () if self._is_defined else self._define(session)
            runs = len(self._programs.defined)
            session.matcher.count_runs(runs, self._programs.op_count, new=runs if definitions else 0)
            made = tuple(islice(session.ids, self._made))
            while made and made[-1] - made[0] >= self._made:  # another thread took some between
                made = tuple(islice(session.ids, self._made))
            table = (*ids, *made)
            return table, [*definitions, *self._programs.instructions(table, self._pick_scalars(scalars))]

        return session.outbox.submit_all(build, externals, self.writes, self._programs.op_count)

    def _define(self, session: Session) -> Sequence[Instruction]:
        """The instructions that define the programs, sent before the first repetition. If the session has too many
        programs already, none is defined, and the ops are sent one by one."""
        self._is_defined = True
        definitions = defined_programs(session).define(session, self._programs)
        if definitions is None:
            self._programs = self._as_programs(None)
        return definitions or ()

    def apply_effects(
        self,
        session: Session,
        table: Table,
        externals: Sequence[Storage],
        tensors: Sequence[Tensor],
        containers: Sequence[Any],
    ) -> Any:
        """Give the tensors of the program their new gradients and storages, and return the results. `containers` are
        those among the arguments, if a result is one of them."""
        storages: dict[int, Storage] = dict(enumerate(externals))
        effects = self.effects

        def ref_of(template: RefTemplate) -> TensorRef:
            storage = storages.get(template.slot)
            if storage is None:
                storage = Storage(session, table[template.slot], template.storage_geometry, template.is_parameter)
                storages[template.slot] = storage
            return storage if template.path is None else StorageView(storage, template.path, template.geometry)

        for position, gradient in effects.gradients:
            tensors[position].grad = None if gradient is None else wrap_view(gradient.kind, ref_of(gradient))
        for position, template in effects.rebound:
            rebind(tensors[position], ref_of(template))
        bumped = [tensors[position] for position, count in effects.versions for _ in range(count)]
        if bumped:
            torch.autograd.graph.increment_version(bumped)
        results: list[Any] = []
        for result in effects.results:
            results.append(_result(result, ref_of, tensors, containers, results))
        return results


def _result(
    result: Any,
    ref_of: Callable[[RefTemplate], TensorRef],
    tensors: Sequence[Tensor],
    containers: Sequence[Any],
    earlier: Sequence[Any],
) -> Any:
    if isinstance(result, RefTemplate):
        return result_handle(result.kind, ref_of(result), result.requires_grad, result.is_leaf)
    if isinstance(result, ReturnedInput):
        return tensors[result.position]
    if isinstance(result, ReturnedGradient):
        return tensors[result.position].grad
    if isinstance(result, ReturnedContainer):
        return containers[result.number]
    return earlier[result.number] if isinstance(result, ReturnedAgain) else result


def result_handle(kind: type[Any], ref: TensorRef, requires_grad: bool, is_leaf: bool) -> torch.Tensor:
    """A handle for a result. A backward through a result that has a graph in the function raises CompileError."""
    if is_leaf:
        return wrap_view(kind, ref).requires_grad_(requires_grad)
    return _WithoutGraph.apply(_anchor(), kind, ref)  # type: ignore[no-any-return]


class _WithoutGraph(torch.autograd.Function):
    """Makes a result that requires a gradient but has no graph, as the results of a skipped call have none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kind: type[Any], ref: TensorRef) -> torch.Tensor:
        return wrap_view(kind, ref)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise CompileError(
            "backward through a result of a function of gt.compile, which keeps no graph: call backward inside of the "
            "function, as in `def step(x): loss = model(x).mean(); loss.backward(); return loss`"
        )


def _anchor() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)
