"""Tensors that lose their values: by failures of ops, by failed writes, and by lost workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gt.core.meta import TensorMeta
from gt.dispatcher.instruction_errors import Cause
from gt.dispatcher.tensor_records import (
    Losses,
    MissingValue,
    PreviousValue,
    TensorRecord,
    mesh_without,
    spec_without,
)
from gt.dispatcher.tensor_tables import TensorTables
from gt.sharding.spec import DeviceMesh, ShardingSpec


@dataclass
class TensorLosses(TensorTables):
    """Marks tensors as missing, keeps the values that they had before failed writes, and takes lost workers from
    them."""

    # Failures

    def mark_missing(self, ident: int, meta: TensorMeta, cause: Cause) -> None:
        """Add a tensor without a value."""
        self.undo.put(self.missing, ident, MissingValue(meta, cause))

    def mark_write_failed(self, old: int, new: int, cause: Cause) -> list[tuple[int, DeviceMesh]]:
        """A tensor that should have been written continues under its new id without a value. The value before the write
        is kept until the tensor is freed. Returns the copies, to be freed."""
        self.mark_missing(new, self.meta(old), cause)
        if old in self.missing:
            self.undo.drop(self.missing, old)
            if old in self.previous_values:
                self.undo.put(self.previous_values, new, self.undo.drop(self.previous_values, old))
            return []
        tensor = self.tensors[old]
        copies = self.remove(old)[1:]
        self._keep_previous_value(new, PreviousValue(old, tensor, new))
        return copies

    def renew(self, ident: int, spec: ShardingSpec) -> list[tuple[int, DeviceMesh]]:
        """A tensor without a value is about to be overwritten, in a layout. Returns its previous value, to be freed."""
        meta = self.missing[ident].meta
        freed = self.remove(ident)
        self.add_tensor(ident, TensorRecord.of(meta, spec))
        return freed

    # Lost workers

    def lose_parts(self, idents: Sequence[int], worker: int) -> Losses:
        """Take a lost worker's parts from tensors. A tensor of which other workers hold all elements, or a copy, keeps
        its value; any other becomes a missing value."""
        losses = Losses([], [], [])
        for ident in idents:
            if ident in self.previous_values:
                self._lose_part_of_previous_value(losses, ident, worker)
                continue
            spec = self.tensors[ident].spec
            is_affected = worker in spec.mesh
            rest = spec_without(spec, worker) if is_affected else spec
            self._lose_parts_of_copies(losses, ident, worker, is_needed=rest is None)
            if is_affected:
                self._lose_part(losses, ident, worker, rest)
        return losses

    def _lose_part_of_previous_value(self, losses: Losses, ident: int, worker: int) -> None:
        old, tensor, until = self.previous_values[ident]
        self._remove_previous_value(ident)
        rest = spec_without(tensor.spec, worker)
        if rest is not None:
            kept = TensorRecord.of(tensor.meta, rest, tensor.placed)
            self._keep_previous_value(ident, PreviousValue(old, kept, until))
        _add_useless(losses, old, tensor.spec, rest, worker)

    def _lose_parts_of_copies(self, losses: Losses, ident: int, worker: int, is_needed: bool) -> None:
        """Drop the copies on a lost worker: it may have been part of the exchange that makes them, and an op that needs
        one makes it again. With `is_needed`, copies are all that is left of the tensor, and are kept where complete."""
        for spec, copy in [item for item in self.copies.get(ident, {}).items() if worker in item[0].mesh]:
            self.drop_copy(ident, spec)
            rest = spec_without(spec, worker) if is_needed else None
            if rest is not None and rest not in self.copies.get(ident, {}):
                self.add_copy(ident, rest, copy)
            else:
                rest = None
            _add_useless(losses, copy, spec, rest, worker)

    def _lose_part(self, losses: Losses, ident: int, worker: int, rest: ShardingSpec | None) -> None:
        """Lose a worker's part of a tensor. `rest` is the layout on other workers that hold all of it, if any."""
        tensor = self.tensors[ident]
        _add_useless(losses, ident, tensor.spec, rest, worker)
        if rest is not None:
            self.set_layout(ident, rest, is_moved=False)
            return
        copies = self.copies.get(ident, {})
        spec = next((spec for spec in copies if spec.is_partition(tensor.meta.shape)), None)
        if spec is not None:
            losses.promoted.append((ident, copies[spec]))
            self.drop_copy(ident, spec)
            self.set_layout(ident, spec)
        else:
            losses.useless.extend((copy, spec.mesh) for spec, copy in copies.items())
            self.remove(ident)
            self.mark_missing(ident, tensor.meta, worker)
            losses.missing.append((ident, tensor.meta))

    def forget_meshes_of(self, worker: int) -> None:
        """Drop the byte counts of meshes with a lost worker: no tensor is on them any more."""
        for table in (self.bytes_on, self.copy_bytes, *[use.bytes_on for use in self.uses.values()]):
            for mesh in [mesh for mesh in table if worker in mesh]:
                self.undo.drop(table, mesh)


def _add_useless(losses: Losses, ident: int, spec: ShardingSpec, rest: ShardingSpec | None, worker: int) -> None:
    """Note the parts of a tensor on workers that do not belong to the layout `rest` which is left of it."""
    others = mesh_without(spec.mesh, worker, *(rest.mesh.workers if rest is not None else ()))
    if others is not None:
        losses.useless.append((ident, others))
