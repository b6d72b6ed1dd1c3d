"""Compiled code of a unit, as a function of the unit's inputs and scalars."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from gt.core.signatures import Number
from gt.worker.compilation.compile_units import Compiled, CompileUnit
from gt.worker.engines.torch_private import Code

# As torch.testing.assert_close has them. Other dtypes have to be equal.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def difference(compiled: torch.Tensor, eager: torch.Tensor) -> str | None:
    """Why two tensors do not agree; None if they do. Beside torch's own tolerances, an error in proportion to the
    largest element is allowed: sums of many elements are rounded in another order."""
    if (compiled.shape, compiled.dtype) != (eager.shape, eager.dtype):
        return f"{compiled.dtype} of shape {list(compiled.shape)} instead of {eager.dtype} of {list(eager.shape)}"
    rtol, atol = _TOLERANCES.get(eager.dtype, (0.0, 0.0))
    if rtol and eager.numel():
        finite = eager[eager.isfinite()].abs()
        atol = max(atol, max(atol, rtol) * float(finite.max()) if finite.numel() else 0.0)
    try:
        torch.testing.assert_close(compiled, eager, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


class CompiledCode:
    """The code of a unit, to be called only with tensors that `fits` accepts and scalars that `has_constants` accepts.
    It returns the live tensors of the unit, in order, and writes to the inputs at the positions `writes`. The live
    tensors share memory with inputs and each other as those of the ops do."""

    def __init__(self, unit: CompileUnit, compiled: Compiled, code: Code) -> None:
        self._code = code
        self._takes = compiled.takes
        self.writes = compiled.writes
        self._outputs = [(output.source, output.view) for output in compiled.outputs]
        self._count = len(unit.inputs)
        self._geometry = [(meta.shape, meta.stride, getattr(torch, meta.dtype)) for meta in unit.inputs]
        self._constants = [(place, value) for place, value in enumerate(unit.scalars) if value is not None]
        self._dynamic = [place for place, value in enumerate(unit.scalars) if value is None]
        self._memory = array("d", [0.0] * len(self._dynamic))
        self._vector = torch.frombuffer(self._memory, dtype=torch.float64) if self._dynamic else None
        self._copied: frozenset[int] | None = None

    def fits(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether tensors have the shapes, strides and dtypes of the unit, and share no memory that it writes."""
        for value, (shape, stride, dtype) in zip(values, self._geometry, strict=True):
            if value.stride() != stride or value.shape != shape or value.dtype is not dtype:
                return False
        if not self.writes:
            return True
        places = [value.untyped_storage().data_ptr() for value in values]
        return all(places.count(places[position]) == 1 for position in self.writes)

    def has_constants(self, scalars: Sequence[Number]) -> bool:
        """Whether scalars have the values that the code was compiled for."""
        return all(
            type(scalars[place]) is type(value) and scalars[place] == value for place, value in self._constants
        ) and all(type(scalars[place]) is float for place in self._dynamic)

    def __call__(self, values: Sequence[torch.Tensor], scalars: Sequence[Number]) -> list[torch.Tensor]:
        given = [values[position] for position in self._takes]
        if self._vector is not None:
            memory = self._memory
            for number, place in enumerate(self._dynamic):
                memory[number] = scalars[place]
            given.insert(0, self._vector)
        results = self._code(given)
        if self._copied:
            results = [_copy(made) if place in self._copied else made for place, made in enumerate(results)]
        outputs = []
        for source, view in self._outputs:
            tensor = results[source - self._count] if source >= self._count else values[source]
            if view is not None:
                size, stride, offset = view
                tensor = tensor.as_strided(size, stride, offset + tensor.storage_offset())
            outputs.append(tensor)
        return outputs

    def with_own_memory(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same inputs, with copies of those that the code writes to."""
        return [_copy(value) if position in self.writes else value for position, value in enumerate(values)]

    def compare(
        self,
        values: Sequence[torch.Tensor],
        scalars: Sequence[Number],
        after: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
    ) -> str | None:
        """How the results of the code differ from those of the ops; None if they agree. `values` are the inputs from
        before the ops (`with_own_memory`), `after` the inputs after them, and `expected` the live tensors that the ops
        gave."""
        self._note_shared_memory(values, scalars)
        found = self([*values], scalars)
        for position in self.writes:
            reason = difference(values[position], after[position])
            if reason is not None:
                return f"an input that is written to differs: {reason}"
        for made, wanted in zip(found, expected, strict=True):
            reason = difference(made, wanted)
            if reason is not None:
                return f"a result differs: {reason}"
            if made.stride() != wanted.stride():
                return f"a result has strides {made.stride()} instead of {wanted.stride()}"
        return None

    def _note_shared_memory(self, values: Sequence[torch.Tensor], scalars: Sequence[Number]) -> None:
        """Find the results of the code that share memory with other results or with inputs. Calls copy them, since the
        corresponding results of the ops have their own memory."""
        self._copied = None
        fresh = [_copy(value) for value in values]
        given = [fresh[position] for position in self._takes]
        if self._vector is not None:
            self._memory[:] = array("d", [float(scalars[place]) for place in self._dynamic])
            given.insert(0, self._vector)
        results = self._code(given)
        used = {tensor.untyped_storage().data_ptr() for tensor in given}
        copied = set()
        for place, result in enumerate(results):
            address = result.untyped_storage().data_ptr()
            size = result.untyped_storage().nbytes()
            if result.numel() and (address in used or size > 2 * result.numel() * result.itemsize + 64):
                copied.add(place)
            used.add(address)
        self._copied = frozenset(copied)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
