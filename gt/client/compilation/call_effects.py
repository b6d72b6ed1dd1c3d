"""The effects of a recorded call on the tensors of the program: gradients, storages, versions, results.

`CallTensors` holds the state of these tensors before the call. A `RecordedCallBuilder` compares it with their state
after the call.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gt.client.compilation.argument_changes import MUTABLE, ArgumentChanges
from gt.client.compilation.call_recorder import Recording
from gt.client.compilation.recorded_call import (
    Effects,
    RecordedCall,
    RefTemplate,
    ReturnedAgain,
    ReturnedContainer,
    ReturnedGradient,
    ReturnedInput,
    Source,
    step_ids,
)
from gt.client.compilation.replay_template import result_handle
from gt.client.compilation.static_reads import is_instance
from gt.client.compilation.traced_floats import TracedFloat
from gt.client.storage import Storage, TensorRef
from gt.client.tensor import Tensor
from gt.client.torch_patches.autograd_nodes import gradient_hooks
from gt.client.torch_patches.dispatch import tree_flatten, tree_unflatten
from gt.client.transfers import MAX_BYTES, payload

_CONSTANTS = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)
MAX_HASHED_BYTES = 1 << 20
read_ref = attrgetter("_ref")
read_requires_grad = attrgetter("requires_grad")


class NotRepeatable(Exception):
    """A recorded call has an effect that cannot be repeated without its function."""


class CallTensors:
    """The tensors that a call may use, as they are before it: the GT tensors among its `arguments`, then those of the
    function's state. `plain` are the plain tensors of this state; `counts` are the id()s of those that belong to
    optimizers. Holds ids of gradients and no gradients, so that a gradient that the call resets is freed."""

    def __init__(
        self, arguments: Sequence[Tensor], others: Sequence[Tensor], plain: Sequence[torch.Tensor], counts: set[int]
    ) -> None:
        self.tensors = tensors = [*arguments, *others]
        self.arguments = len(arguments)
        self.plain = plain
        self.plain_versions = list(map(version_of, plain))
        self.plain_contents = list(map(content_of, plain))
        self.counts = counts
        self.refs: list[TensorRef] = list(map(read_ref, tensors))
        self.storage_ids = [ref.storage.id for ref in self.refs]
        self.versions = list(map(version_of, tensors))
        gradients = list(map(_gradient, tensors))
        self.gradients = [gradient._ref.storage.id if gradient is not None else 0 for gradient in gradients]
        self.gradient_keys = [gradient._ref.key if gradient is not None else None for gradient in gradients]

    def keep(self, positions: Sequence[int]) -> None:
        """Forget all tensors but those at some positions, which come in this order."""
        for name in ("tensors", "refs", "storage_ids", "versions", "gradients", "gradient_keys"):
            values = getattr(self, name)
            setattr(self, name, [values[position] for position in positions])


class RecordedCallBuilder:
    """Makes a RecordedCall of a recording and of the tensors before the call. Raises NotRepeatable if the call has an
    effect that cannot be repeated. Positions of tensors in the call are those of `used`: the arguments, then the
    tensors of the state in the order in which the call uses them; `used_plain` has its plain tensors."""

    def __init__(self, recording: Recording, before: CallTensors, arguments: ArgumentChanges) -> None:
        self._recording = recording
        self._arguments = arguments
        self._before = before
        self._storages: list[Storage] = list(recording.externals.values())
        self._index = {id(storage): number for number, storage in enumerate(self._storages)}
        self._first_ids = list(recording.externals)
        handles = {id(ref.storage): position for position, ref in reversed(list(enumerate(before.refs)))}
        gradients = {ident: position for position, ident in enumerate(before.gradients) if ident}
        self._handles, self._gradients = handles, gradients
        self._plain = {id(tensor): position for position, tensor in enumerate(before.plain)}
        self._positions = {position: position for position in range(before.arguments)}
        self._plain_positions: dict[int, int] = {}
        self._sources: list[Source] = []

    def unfound(self) -> list[Storage]:
        """The tensors that the call uses and that are not among those before the call."""
        known = {*self._handles, *self._recording.operands}
        externals = self._recording.externals.items()
        return [each for ident, each in externals if id(each) not in known and ident not in self._gradients]

    @property
    def used(self) -> list[int]:
        """The positions before the call of the tensors that it uses."""
        return list(self._positions)

    @property
    def used_plain(self) -> list[torch.Tensor]:
        return [self._before.plain[position] for position in self._plain_positions]

    def _position(self, before: int) -> int:
        return self._positions.setdefault(before, len(self._positions))

    def results(self, output: Any, known: Container[int]) -> tuple[Any, list[Any], Any]:
        """The function's output without autograd graphs, and the templates and the structure of its leaves. `known` are
        the id()s of containers that exist before the call."""
        self._sources = [self._source(storage, ident) for ident, storage in self._recording.externals.items()]
        leaves, structure = self._flattened(output, known)
        tensors = self._before.tensors
        known_tensors: dict[int, tuple[Any, int]] = {
            id(tensor.grad): (ReturnedGradient, n) for n, tensor in _with_gradients(tensors)
        }
        known_tensors.update((id(tensor), (ReturnedInput, n)) for n, tensor in enumerate(tensors))
        templates_of: dict[int, Any] = {}
        templates_of.update((ident, ReturnedContainer(n)) for ident, n in self._arguments.container_numbers.items())
        templates: list[Any] = []
        values: list[Any] = []
        for number, leaf in enumerate(leaves):
            template = templates_of.get(id(leaf))
            if template is None and id(leaf) in known_tensors:
                kind, before = known_tensors[id(leaf)]
                template = kind(self._position(before))
            if template is None and not is_instance(leaf, Tensor):
                values.append(_constant(leaf))
                templates.append(values[-1])
                continue
            if isinstance(template, ReturnedAgain):
                values.append(values[template.number])
            elif template is not None:
                values.append(self._arguments.original_of(leaf))
            else:
                _require_bare(leaf)
                template = self._template(leaf)
                values.append(result_handle(type(leaf), leaf._ref, leaf.requires_grad, leaf.is_leaf))
                templates_of[id(leaf)] = ReturnedAgain(number)
            templates.append(template)
        return tree_unflatten(values, structure), templates, structure

    def _flattened(self, output: Any, known: Container[int]) -> tuple[list[Any], Any]:
        """The leaves of an output, with containers among the arguments as leaves."""
        seen: set[int] = set()

        def is_argument(value: Any) -> bool:
            if id(value) in self._arguments.containers and is_instance(value, MUTABLE):
                return True
            if is_instance(value, MUTABLE):
                if id(value) in known:
                    raise NotRepeatable("it returns a container that it does not make; return a copy")
                if id(value) in seen:
                    raise NotRepeatable("it returns one container in two places; return a copy")
                seen.add(id(value))
            return False

        return tree_flatten(output, is_leaf=is_argument)

    def call(self, templates: list[Any], structure: Any) -> RecordedCall:
        """The recorded call. `templates` and `structure` are those of its results."""
        recording = self._recording
        gradients = tuple(self._new_gradients())
        rebound = tuple(self._rebound())
        versions = tuple(self._versions())
        kept = [*templates, *[template for _, template in (*gradients, *rebound)]]
        self._require_nothing_else_alive({each.slot for each in kept if isinstance(each, RefTemplate)})
        slots = self._slots()
        writes = [
            (number, slots[storage.id])
            for number, (storage, ident) in enumerate(zip(self._storages, self._first_ids, strict=True))
            if storage.id != ident
        ]
        effects = Effects(
            tuple((position, self._with_slot(template, slots)) for position, template in gradients),
            tuple((position, self._with_slot(template, slots)) for position, template in rebound),
            versions,
            tuple(self._with_slot(template, slots) for template in templates),
            structure,
        )
        return RecordedCall(recording, self._sources, slots, tuple(writes), effects)

    # Storages

    def _source(self, storage: Storage, ident: int) -> Source:
        """The source of an external, which had the id `ident` when the call first used it."""
        if id(storage) in self._recording.operands:
            return self._operand(storage, self._recording.operands[id(storage)])
        if id(storage) in self._handles:
            return Source("handle", (self._position(self._handles[id(storage)]),))
        if ident in self._gradients:
            return Source("grad", (self._position(self._gradients[ident]),))
        position = self._recording.first_use.get(ident, len(self._recording.instructions))
        raise NotRepeatable(
            f"{self._recording.line(position)}: it uses a tensor that no earlier call has used; pass it as an "
            "argument, or in state="
        )

    def _operand(self, storage: Storage, uses: Sequence[tuple[torch.Tensor, int]]) -> Source:
        """The source of an external that was uploaded from plain tensors, all with the same content."""
        known = [(self._plain[id(tensor)], version) for tensor, version in uses if id(tensor) in self._plain]
        found = dict.fromkeys(position for position, _ in known)
        positions = tuple([self._plain_positions.setdefault(each, len(self._plain_positions)) for each in found])
        line = self._recording.line(self._recording.first_use.get(storage.id, 0))
        are_counts = len(known) == len(uses) and all(id(tensor) in self._before.counts for tensor, _ in uses)
        if are_counts and all(version == version_of(self._before.plain[position]) for position, version in known):
            return Source("count", positions)
        if any(version != self._before.plain_versions[position] for position, version in known):
            raise NotRepeatable(f"{line} uses a plain tensor that the function changes; have it on GT")
        if len(known) == len(uses):
            return Source("plain", positions)
        if storage.geometry.nbytes > MAX_BYTES:
            raise NotRepeatable(
                f"{line} uses a large plain tensor that GT does not find; have it on GT, or pass it in state="
            )
        tensor, version = uses[0]
        return Source("constant", positions, storage, content_of(tensor) if version_of(tensor) == version else None)

    def _locate(self, storage: Storage) -> int:
        """The number of a storage among the externals, or the id that the call gave to a storage that it made."""
        if id(storage) in self._index:
            return self._index[id(storage)]
        if storage.id in self._recording.made:
            return storage.id
        self._sources.append(self._source(storage, storage.id))
        self._index[id(storage)] = len(self._storages)
        self._storages.append(storage)
        self._first_ids.append(storage.id)
        return self._index[id(storage)]

    def _template(self, tensor: Tensor) -> RefTemplate:
        ref, storage = tensor._ref, tensor._ref.storage
        return RefTemplate(
            self._locate(storage),
            ref.path,
            ref.geometry,
            storage.geometry,
            type(tensor),
            tensor.requires_grad,
            storage.is_parameter,
            tensor.is_leaf,
        )

    def _with_slot(self, template: Any, slots: dict[int, int]) -> Any:
        """A template with the slot of its storage in place of an id."""
        if not isinstance(template, RefTemplate) or template.slot < len(self._storages):
            return template
        others: Any = template[1:]
        return RefTemplate(slots[template.slot], *others)

    def _slots(self) -> dict[int, int]:
        """The slot of each id of the call: externals first, then the ids that the call made."""
        recording = self._recording
        made = sorted([*recording.made, *step_ids(recording.instructions)])
        return {ident: slot for slot, ident in enumerate([*self._first_ids, *made])}

    # Effects

    def _new_gradients(self) -> Iterable[tuple[int, RefTemplate | None]]:
        """The positions of tensors whose gradients the call has replaced, with the new gradients (None: reset)."""
        for position, (tensor, before) in enumerate(zip(self._before.tensors, self._before.gradients, strict=True)):
            gradient = _gradient(tensor)
            if gradient is None:
                if before:
                    yield self._position(position), None
                continue
            storage = gradient._ref.storage
            if storage.id == before or (before and self._recording.externals.get(before) is storage):
                continue
            if gradient.requires_grad:
                raise NotRepeatable("it makes gradients with a graph (create_graph=True)")
            yield self._position(position), self._template(gradient)

    def _rebound(self) -> Iterable[tuple[int, RefTemplate]]:
        """The positions of tensors that the call has given other storages or views."""
        for position, (tensor, ref) in enumerate(zip(self._before.tensors, self._before.refs, strict=True)):
            if tensor._ref is not ref:
                yield self._position(position), self._template(tensor)

    def _versions(self) -> Iterable[tuple[int, int]]:
        """The positions of tensors that the call has written to, with the number of writes."""
        for position, (tensor, version) in enumerate(zip(self._before.tensors, self._before.versions, strict=True)):
            if (written := version_of(tensor) - version) > 0:
                yield self._position(position), written

    def _require_nothing_else_alive(self, kept: set[int]) -> None:
        """Refuse a call whose tensors are still referenced outside of its results: a skipped call makes none."""
        alive = self._recording.alive
        self._recording.note_collected()
        kept = kept | {storage.id for storage in self._storages}
        if alive.keys() - kept:
            gc.collect()
            self._recording.note_collected()
        for ident in sorted(alive.keys() - kept):
            raise NotRepeatable(
                f"{self._recording.line(alive[ident])} makes a tensor that is still in use after the call, and is not "
                "among the results; return it"
            )


def _constant(leaf: Any) -> Any:
    """A result that is no tensor, and is the same in every call."""
    if not is_instance(leaf, _CONSTANTS):
        kind = "a plain tensor" if is_instance(leaf, torch.Tensor) else f"an object of type {type(leaf).__name__}"
        raise NotRepeatable(f"it returns {kind}; return GT tensors, and numbers that do not change")
    return leaf.pin() if isinstance(leaf, TracedFloat) else leaf


def _require_bare(result: Tensor) -> None:
    """Refuse a result with attributes, hooks or a gradient, which a skipped call would not give to its result."""
    has_gradient = (result.is_leaf or result.retains_grad) and result.grad is not None
    if result.__dict__ or gradient_hooks(result) or has_gradient or result.retains_grad:
        raise NotRepeatable("it sets attributes, hooks or a gradient of a result; set them outside of the function")


def _with_gradients(tensors: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
    return ((n, tensor) for n, tensor in enumerate(tensors) if _gradient(tensor) is not None)


def _gradient(tensor: Tensor) -> Any:
    """The gradient of a leaf on GT, None for any other tensor."""
    gradient = tensor.grad if tensor.is_leaf else None
    return gradient if isinstance(gradient, Tensor) else None


def content_of(tensor: torch.Tensor) -> bytes | None:
    """A hash of the content of a plain tensor; None for one that is large or not strided."""
    if tensor.nbytes > MAX_HASHED_BYTES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return blake2b(payload(resolved, resolved.stride()), digest_size=16).digest()


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor that autograd has counted; 0 if it counts none."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version
