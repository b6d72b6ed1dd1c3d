"""The table of GT_DEBUG_CLIENT: calls that are inferred anew, uploads, reads, segments that were found, and batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from gt.client.cached_calls import CachedCall, MultiResultCall, SingleResultCall, ViewCall, WriteCall
from gt.client.call_sites import Sites
from gt.client.storage import Geometry, TensorRef
from gt.core.messages import CreateTensor, DefineProgram, Instruction, RunOp, RunProgram
from gt.core.signatures import Signature
from gt.core.tables import CALLS, Column, LogTable, count, print_bytes, print_tensors, short_op

COLUMNS = (
    Column("what", 7),
    Column("op", 22),
    Column("tensors", 40),
    Column("inferred by", 11),
    Column("bytes", 7, is_number=True),
    Column("line", 17, keeps_end=True),
)
BY_RULE, BY_TORCH, BY_GT, BY_WORKER = "shape rule", "torch", "gt", "a worker"


def open_call_log(sites: Sites, signatures: Callable[[], Mapping[int, Signature]]) -> CallLog | None:
    """The log of a session; None if nobody reads it, so that nothing is recorded."""
    table = LogTable(CALLS, "call", COLUMNS)
    return CallLog(table, sites, signatures) if table.is_on else None


class CallLog:
    """Writes the rows of a session. `signatures` are those of its ops, by id."""

    def __init__(self, table: LogTable, sites: Sites, signatures: Callable[[], Mapping[int, Signature]]) -> None:
        self._table = table
        self._sites = sites
        self._signatures = signatures

    def note_inferred(self, op: str, refs: Sequence[TensorRef], call: CachedCall, by: str) -> None:
        """A call whose results were inferred by a shape rule, by torch's or GT's shape function, or by a worker."""
        inputs = _print_geometries([ref.geometry for ref in refs])
        results = _print_geometries(_geometries_of(call)) or ("as computed" if by == BY_WORKER else "in place")
        self._add("infer", short_op(op), f"{inputs} -> {results}".strip(), by, None, self._sites.current())

    def note_read(self, geometry: Geometry) -> None:
        self._add("read", "", _print_geometries([geometry]), "", geometry.nbytes, self._sites.current())

    def note_batch(self, batch: Sequence[Instruction], uploads: int) -> None:
        """A batch that is sent: its uploads, the segments that it defines, and its size."""
        for instruction in batch:
            if isinstance(instruction, CreateTensor):
                nbytes = instruction.byte_range.nbytes
                self._add("upload", "", print_tensors([instruction.meta]), "", nbytes, instruction.site)
            elif isinstance(instruction, DefineProgram):
                ops = [step for step in instruction.steps if isinstance(step, RunOp)]
                ends = f"{count(len(ops), 'op')} from {self._name(ops[0].op_id)} to {self._name(ops[-1].op_id)}"
                self._add("segment", "", ends, "", None, ops[0].site)
        kinds = Counter(map(type, batch))
        parts = [count(kinds[RunOp], "op"), count(kinds[RunProgram], "segment"), count(uploads, "upload")]
        self._add("flush", count(len(batch), "instruction"), ", ".join(parts), "", None, 0)

    def _name(self, op_id: int) -> str:
        signature = self._signatures().get(op_id)
        return short_op(signature.op) if signature is not None else "?"

    def _add(self, what: str, op: str, tensors: str, by: str, nbytes: int | None, site: int) -> None:
        size = "" if nbytes is None else print_bytes(nbytes)
        self._table.add((what, op, tensors, by, size, self._sites.text(site) if site else ""))


def _print_geometries(geometries: Iterable[Geometry]) -> str:
    return print_tensors([geometry.meta() for geometry in geometries])


def _geometries_of(call: CachedCall) -> Sequence[Geometry]:
    if isinstance(call, SingleResultCall):
        return (call.geometry,)
    return call.geometries if isinstance(call, MultiResultCall | ViewCall | WriteCall) else ()
