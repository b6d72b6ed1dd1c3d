"""The tensors of all sessions: their layouts, copies and sizes, and those without a value.

The base of `TensorLosses`, which is the base of `State`. Only the files of these three change the state, through the
undo log; `apply_results`, `apply_program` and `free`, each the last change of an instruction, are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gt.core.ids import session_of, short_id
from gt.core.messages import VersionSpan
from gt.core.meta import TensorMeta
from gt.core.settings import Limits
from gt.dispatcher.instruction_errors import IdInUse, InvalidInstruction, NoValue, UnknownId
from gt.dispatcher.tensor_records import GradientRecord, MissingValue, PreviousValue, SessionUse, TensorRecord
from gt.dispatcher.undo_log import UndoLog
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole


@dataclass
class TensorTables:
    """Tables by tensor id.

    `tensors` have a value, `missing` have none. `copies` are other layouts in which a tensor exists too, with the ids
    of these copies on the workers; `copy_order` has the tensor and the layout of each copy by the copy's id, the least
    recently used first, and `copy_bytes` counts the bytes of copies on each worker of a mesh. `unused_copies` are those
    that were there when a module began and that no op has used since; some of them may be dropped already.
    `previous_values` holds, for missing tensors that should have been written, the value before the write. `may_resize`
    are tensors that an unanswered query may resize. `gradients` are gradients of parameters that were partial when
    autograd made them; those that still are wait to be reduced together. `bytes_on` counts the bytes on each worker of
    a mesh, copies included. `shared` has the tensors that share memory with others, each with all of these in the order
    in which the memory counts: as that of the first, and the others have no bytes. `uses` counts the same for each
    session, and is kept only if there are `limits` to the tensors of a session."""

    tensors: dict[int, TensorRecord] = field(default_factory=dict)
    copies: dict[int, dict[ShardingSpec, int]] = field(default_factory=dict)
    copy_order: dict[int, tuple[int, ShardingSpec]] = field(default_factory=dict)
    copy_bytes: dict[DeviceMesh, int] = field(default_factory=dict)
    unused_copies: set[int] = field(default_factory=set)
    bytes_on: dict[DeviceMesh, int] = field(default_factory=dict)
    missing: dict[int, MissingValue] = field(default_factory=dict)
    previous_values: dict[int, PreviousValue] = field(default_factory=dict)
    may_resize: set[int] = field(default_factory=set)
    gradients: dict[int, GradientRecord] = field(default_factory=dict)
    shared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    limits: Limits | None = None
    uses: dict[int, SessionUse] = field(default_factory=dict)
    undo: UndoLog = field(default_factory=UndoLog, compare=False, repr=False)

    # Lookup

    def tensor(self, ident: int) -> TensorRecord:
        """Raises NoValue for a tensor without a value and UnknownId for no tensor at all."""
        found = self.tensors.get(ident)
        if found is None:
            if ident in self.missing:
                raise NoValue(self.missing[ident].cause, f"tensor {short_id(ident)}")
            raise UnknownId("tensor", ident)
        return found

    def meta(self, ident: int) -> TensorMeta:
        """The meta of a tensor, even if it has no value."""
        return self.missing[ident].meta if ident in self.missing else self.tensor(ident).meta

    def tensors_of(self, session: int) -> list[int]:
        """The tensors of a session, with or without a value."""
        return [ident for ident in (*self.tensors, *self.missing) if session_of(ident) == session]

    def tensors_on(self, worker: int) -> dict[int, list[int]]:
        """By session, the tensors of which a worker holds a part, a part of a copy, or a part of a previous value."""
        found: dict[int, list[int]] = {}
        for ident in sorted((*self.tensors, *self.previous_values)):
            tensor = self.tensors[ident] if ident in self.tensors else self.previous_values[ident].tensor
            if any(worker in spec.mesh for spec in (tensor.spec, *self.copies.get(ident, ()))):
                found.setdefault(session_of(ident), []).append(ident)
        return found

    def require_new(self, idents: Sequence[int]) -> None:
        """Raises InvalidInstruction if ids for new tensors repeat or are taken."""
        if len(set(idents)) < len(idents):
            raise InvalidInstruction(f"one id is given to several new tensors: {', '.join(map(short_id, idents))}")
        for ident in idents:
            if ident in self.tensors or ident in self.missing or ident in self.may_resize:
                raise IdInUse("tensor", ident)
        if self.previous_values and not {kept.ident for kept in self.previous_values.values()}.isdisjoint(idents):
            raise InvalidInstruction("an id is used again that a written tensor had")

    def readable_version(self, ident: int) -> PreviousValue | None:
        """The last value of a tensor that workers hold, with `until` 0 if no write to it has failed; None if there is
        no such value."""
        if ident in self.previous_values:
            return self.previous_values[ident]
        return PreviousValue(ident, self.tensors[ident], 0) if ident in self.tensors else None

    def span(self, ident: int, spans: Mapping[int, Mapping[int, VersionSpan]]) -> VersionSpan:
        """When a tensor had the value that can be read, from the spans of each worker's part. A whole tensor on several
        workers is read on the first of them."""
        version = self.readable_version(ident)
        if version is None:
            return VersionSpan(0, 0)
        local, tensor, until = version
        workers = tensor.spec.mesh.workers[:1] if tensor.spec.is_whole else tensor.spec.mesh.workers
        return _common_span([spans[worker][local] for worker in workers if local in spans.get(worker, ())], until)

    # Changes

    def add_tensor(self, ident: int, tensor: TensorRecord) -> None:
        assert ident not in self.tensors and ident not in self.missing, f"tensor {short_id(ident)} is there already"
        self.undo.put(self.tensors, ident, tensor)
        self._count_bytes(ident, tensor.spec.mesh, tensor.nbytes, 1)

    def apply_results(
        self, writes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], results: Sequence[TensorRecord]
    ) -> Sequence[tuple[int, DeviceMesh]]:
        """Add the outputs of an op; a written input continues under a new id and its old id is removed. Returns the
        copies of the written inputs, to be freed. Hot path, and the last change of an instruction, after which nothing
        can fail: not recorded in the undo log."""
        tensors, bytes_on = self.tensors, self.bytes_on
        copies: Sequence[tuple[int, DeviceMesh]] = ()
        if writes:
            results = self._placed_like_inputs(writes, inputs, results)
            if self.gradients:
                self._follow_gradients(writes, inputs, outputs, results)
            copies = [copy for position in writes for copy in self._consume(inputs[position])]
        if self.limits is not None and results:
            self.uses[session_of(outputs[0])].add(results)
        for position, tensor in enumerate(results):  # a zip takes longer
            tensors[outputs[position]] = tensor
            mesh = tensor.spec.mesh
            bytes_on[mesh] = bytes_on.get(mesh, 0) + tensor.nbytes
        return copies

    def apply_program(
        self, written: Sequence[int], freed: Sequence[int], results: Sequence[tuple[int, TensorRecord]]
    ) -> Sequence[tuple[int, DeviceMesh]]:
        """Apply the results of a part of a program: remove the tensors that it writes to or frees, and add those of its
        results that outlive it. Returns the copies of the written tensors, to be freed. Hot path, and not recorded in
        the undo log, as in `apply_results`."""
        tensors, bytes_on = self.tensors, self.bytes_on
        copies = [copy for ident in written for copy in self._consume(ident)]
        if self.shared:
            self._leave_groups(freed)
        for ident in freed:
            self._consume(ident)
            if self.gradients:
                self.gradients.pop(ident, None)
        if self.limits is not None and results:
            self.uses[session_of(results[0][0])].add([tensor for _, tensor in results])
        for ident, tensor in results:
            tensors[ident] = tensor
            mesh = tensor.spec.mesh
            bytes_on[mesh] = bytes_on.get(mesh, 0) + tensor.nbytes
        return copies

    def _consume(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        """Remove a tensor that was written or freed; returns its copies. Only one with copies is in the undo log."""
        if ident in self.copies:
            return self.remove(ident)[1:]
        tensor = self.tensors.pop(ident)
        self.bytes_on[tensor.spec.mesh] -= tensor.nbytes
        if self.limits is not None:
            self.uses[session_of(ident)].take(tensor)
        return []

    def _placed_like_inputs(
        self, writes: Sequence[int], inputs: Sequence[int], results: Sequence[TensorRecord]
    ) -> tuple[TensorRecord, ...]:
        """The results of an op, whose new versions are placed if the written inputs are."""
        count = len(results) - len(writes)
        written = [self.tensors[inputs[position]] for position in writes]
        return (*results[:count], *map(TensorRecord.with_placing, results[count:], written))

    def set_layout(self, ident: int, spec: ShardingSpec, *, is_moved: bool = True) -> None:
        """Give a tensor another layout, and mark it as placed; its copies stay. One that `is_moved` has memory of its
        own then; any other has the same memory on fewer workers."""
        if is_moved and ident in self.shared:
            self.unshare(ident)
        before = self.tensors[ident]
        after = TensorRecord.of(before.meta, spec, placed=True)
        if self._is_counted_elsewhere(ident):
            after = after._replace(nbytes=0)
        self._count_bytes(ident, before.spec.mesh, -before.nbytes)
        if ident in self.gradients and spec not in self.gradients[ident].move:
            self.undo.drop(self.gradients, ident)
        self.undo.put(self.tensors, ident, after)
        self._count_bytes(ident, spec.mesh, after.nbytes)

    def restore_placing(self, ident: int, before: TensorRecord) -> None:
        """Let a tensor be as placed as it was before a move that it was not asked for."""
        self.undo.put(self.tensors, ident, self.tensors[ident].with_placing(before))

    def resize(self, ident: int, meta: TensorMeta) -> list[tuple[int, DeviceMesh]]:
        """A whole tensor was resized by a query. Returns its copies, to be freed."""
        mesh = self.tensors[ident].spec.mesh
        copies = self.remove(ident)[1:]
        self.add_tensor(ident, TensorRecord.of(meta, whole(mesh, len(meta.shape))))
        return copies

    def mark_placed(self, idents: Sequence[int]) -> None:
        """Keep tensors in their present layouts, in which a scope uses them."""
        for ident in idents:
            tensor = self.tensors[ident]
            if not tensor.placed:
                self.undo.put(self.tensors, ident, tensor._replace(placed=True))

    def add_copy(self, ident: int, spec: ShardingSpec, copy: int) -> None:
        self.undo.put(self.copies, ident, {**self.copies.get(ident, {}), spec: copy})
        self.undo.put(self.copy_order, copy, (ident, spec))
        self._count_copy(copy, self.tensors[ident].meta, spec, 1)

    def use_copy(self, ident: int, spec: ShardingSpec) -> int | None:
        """The id of the copy in one layout, which is now the most recently used one; None if there is none. The order
        is not recorded in the undo log: no value depends on it."""
        copy = self.copies[ident].get(spec) if ident in self.copies else None
        if copy is not None:
            self.copy_order[copy] = self.copy_order.pop(copy)
            if copy in self.unused_copies:
                self.undo.discard(self.unused_copies, [copy])
        return copy

    def drop_copy(self, ident: int, spec: ShardingSpec) -> int | None:
        """Remove the copy in one layout; returns its id, None if there is no such copy."""
        rest = dict(self.copies.get(ident, {}))
        copy = rest.pop(spec, None)
        if copy is None:
            return None
        self._forget_copy(copy, self.tensors[ident].meta, spec)
        if rest:
            self.undo.put(self.copies, ident, rest)
        else:
            self.undo.drop(self.copies, ident)
        return copy

    def drop_copies(self, idents: Sequence[int]) -> list[tuple[int, DeviceMesh]]:
        """Remove all copies of tensors; returns their ids and meshes. Ids of other tensors, or of none, are ignored."""
        copies = self.copies
        found = [(ident, spec) for ident in idents if ident in copies for spec in copies[ident]]
        dropped = [(self.drop_copy(ident, spec), spec.mesh) for ident, spec in dict.fromkeys(found)]
        return [(copy, mesh) for copy, mesh in dropped if copy is not None]

    def remove(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        """Remove a tensor and its copies; returns their ids and meshes, the tensor's own first."""
        if ident in self.missing:
            self.undo.drop(self.missing, ident)
            return self._remove_previous_value(ident)
        if ident not in self.tensors:
            return []
        if ident in self.shared:
            self._leave_group(ident)
        tensor = self.undo.drop(self.tensors, ident)
        if ident in self.gradients:
            self.undo.drop(self.gradients, ident)
        self._count_bytes(ident, tensor.spec.mesh, -tensor.nbytes, -1)
        freed = [(ident, tensor.spec.mesh)]
        if ident in self.copies:
            for spec, copy in self.undo.drop(self.copies, ident).items():
                self._forget_copy(copy, tensor.meta, spec)
                freed.append((copy, spec.mesh))
        return freed

    def _remove_previous_value(self, ident: int) -> list[tuple[int, DeviceMesh]]:
        if ident not in self.previous_values:
            return []
        previous = self.undo.drop(self.previous_values, ident)
        self._count_bytes(ident, previous.tensor.spec.mesh, -previous.tensor.nbytes)
        return [(previous.ident, previous.tensor.spec.mesh)]

    def _keep_previous_value(self, ident: int, previous: PreviousValue) -> None:
        self.undo.put(self.previous_values, ident, previous)
        self._count_bytes(ident, previous.tensor.spec.mesh, previous.tensor.nbytes)

    def free(self, idents: Sequence[int]) -> dict[DeviceMesh, list[int]]:
        """Remove tensors and their copies; returns their ids by mesh. Hot path, and like `apply_results` the last
        change of an instruction: not recorded in the undo log."""
        tensors, copies, bytes_on = self.tensors, self.copies, self.bytes_on
        if self.shared:
            self._leave_groups(idents)
        if self.gradients:
            for ident in self.gradients.keys() & idents:
                del self.gradients[ident]
        freed: dict[DeviceMesh, list[int]] = {}
        for ident in idents:
            tensor = tensors.get(ident)
            if tensor is None or ident in copies:
                for copy, mesh in self.remove(ident):
                    freed.setdefault(mesh, []).append(copy)
                continue
            del tensors[ident]
            mesh = tensor.spec.mesh
            bytes_on[mesh] -= tensor.nbytes
            if self.limits is not None:
                self.uses[session_of(ident)].take(tensor)
            if mesh in freed:
                freed[mesh].append(ident)
            else:
                freed[mesh] = [ident]
        return freed

    # Shared memory

    def share(self, source: int, target: int) -> None:
        """Add a tensor that has the memory of another one, in the layout in which that is."""
        tensor = self.tensors[source]
        self.add_tensor(target, tensor._replace(nbytes=0, placed=True))
        members = (*self.shared.get(source, (source,)), target)
        for member in members:
            self.undo.put(self.shared, member, members)

    def unshare(self, ident: int) -> None:
        """A tensor gets its own memory, whose bytes count."""
        is_counted = not self._is_counted_elsewhere(ident)
        self._leave_group(ident)
        if not is_counted:
            self._count_whole(ident)

    def _is_counted_elsewhere(self, ident: int) -> bool:
        """Whether the memory of a tensor counts as that of another one."""
        return ident in self.shared and self.shared[ident][0] != ident

    def _leave_groups(self, idents: Sequence[int]) -> None:
        for ident in self.shared.keys() & idents:
            self._leave_group(ident)

    def _leave_group(self, ident: int) -> None:
        """A tensor does not share its memory any more. If that was counted as its own, it is now that of the next."""
        members = self.undo.drop(self.shared, ident)
        rest = tuple([member for member in members if member != ident])
        if members[0] == ident:
            self._count_whole(rest[0])
        for member in rest:
            if len(rest) > 1:
                self.undo.put(self.shared, member, rest)
            else:
                self.undo.drop(self.shared, member)

    def _count_whole(self, ident: int) -> None:
        """Count the bytes of a tensor that had none because it shared memory."""
        tensor = self.tensors[ident]
        counted = TensorRecord.of(tensor.meta, tensor.spec, tensor.placed)
        self.undo.put(self.tensors, ident, counted)
        self._count_bytes(ident, counted.spec.mesh, counted.nbytes - tensor.nbytes)

    # Byte counts

    def _forget_copy(self, copy: int, meta: TensorMeta, spec: ShardingSpec) -> None:
        self.undo.drop(self.copy_order, copy)
        self._count_copy(copy, meta, spec, -1)

    def copy_size(self, meta: TensorMeta, spec: ShardingSpec) -> int:
        """The largest number of bytes that one worker holds of a copy."""
        return TensorRecord.of(meta, spec).nbytes

    def _count_copy(self, copy: int, meta: TensorMeta, spec: ShardingSpec, sign: int) -> None:
        nbytes = sign * self.copy_size(meta, spec)
        self.undo.put(self.copy_bytes, spec.mesh, self.copy_bytes.get(spec.mesh, 0) + nbytes)
        self._count_bytes(copy, spec.mesh, nbytes)

    def _count_bytes(self, ident: int, mesh: DeviceMesh, nbytes: int, tensors: int = 0) -> None:
        """Count bytes of a tensor, or of a copy, and the tensor itself if it is new (1) or removed (-1)."""
        self.undo.put(self.bytes_on, mesh, self.bytes_on.get(mesh, 0) + nbytes)
        if self.limits is not None:
            use = self.uses[session_of(ident)]
            self.undo.put(use.bytes_on, mesh, use.bytes_on.get(mesh, 0) + nbytes)
            self.undo.assign(use, "tensors", use.tensors + tensors)

    # Gradients

    def is_waiting(self, ident: int) -> bool:
        """Whether a tensor is a gradient that waits to be reduced with others."""
        gradient = self.gradients.get(ident)
        return gradient is not None and self.tensors[ident].spec is gradient.move.source

    def note_gradient(self, ident: int, gradient: GradientRecord) -> None:
        self.undo.put(self.gradients, ident, gradient)

    def _follow_gradients(
        self, writes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], results: Sequence[TensorRecord]
    ) -> None:
        """A gradient that an op writes to is a gradient under its new id."""
        first = len(outputs) - len(writes)
        for number, position in enumerate(writes, first):
            gradient = self.gradients.pop(inputs[position], None)
            if gradient is not None and results[number].spec in gradient.move:
                self.gradients[outputs[number]] = gradient


def _common_span(parts: Sequence[VersionSpan], until: int) -> VersionSpan:
    """The span in which all parts of a tensor had their readable values."""
    if not parts:
        return VersionSpan(0, 0)
    ends = [end for end in (*[part.until for part in parts], until) if end]
    since = max(part.since for part in parts) if all(part.since for part in parts) else 0
    kept = [(part.kept_since, part.kept_until) for part in parts]
    if not all(first for first, _ in kept):
        return VersionSpan(since, min(ends, default=0))
    return VersionSpan(since, min(ends, default=0), max(first for first, _ in kept), min(last for _, last in kept))
