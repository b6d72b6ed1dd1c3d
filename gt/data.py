"""Batches on GT: `for x, y in gt.data.loader(dataloader):`.

While the program uses one batch, the next ones are already on their way to the workers: each worker gets its own part.

>>> [batch.sum().item() for batch in gt.data.loader([torch.ones(2), torch.ones(3)])]
[2.0, 3.0]
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserList, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from gt.client.creation import distribute
from gt.client.scope import Scope
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.sharding.placements import Placements
from gt.sharding.spec import DeviceMesh


class Loader:
    """The batches of a `torch.utils.data.DataLoader`, or of anything else that can be iterated, with their tensors on
    GT. Other attributes are those of the loader itself.

    >>> batches = gt.data.loader(torch.utils.data.DataLoader(range(6), batch_size=2))
    >>> len(batches), batches.batch_size
    (3, 2)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        signal: str | None,
        mesh: DeviceMesh | None,
        placements: Placements | None,
        ahead: int,
    ) -> None:
        self._batches = batches
        self._signal = signal
        self._mesh = mesh
        self._placements = placements
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        """An error of the loader is raised when its batch is due, as without GT."""
        waiting: deque[Any] = deque()
        error: Exception | None = None
        batches = iter(self._batches)
        while True:
            try:
                waiting.append(self._moved(next(batches)))
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
        if error is not None:
            raise error

    def _moved(self, batch: Any) -> Any:
        with Scope(self._signal, None) if self._signal is not None else nullcontext():
            return self._replaced(batch)

    def _replaced(self, value: Any) -> Any:
        """A batch with its tensors and NumPy arrays on GT, in new containers of the kinds that torch's `pin_memory`
        knows, and in new dataclasses."""
        if isinstance(value, torch.Tensor):
            return self._laid_out(value)
        if isinstance(value, np.ndarray):
            return self._replaced_array(value)
        if isinstance(value, Mapping):
            return self._replaced_mapping(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._replaced, value))
        if isinstance(value, list | tuple | deque | UserList):
            return type(value)(map(self._replaced, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._replaced_dataclass(value)
        return value

    def _replaced_array(self, array: np.ndarray[Any, Any]) -> Any:
        """An array on GT; itself if torch has no such dtype."""
        try:
            tensor = torch.from_numpy(np.array(array))  # a copy: torch warns of memory that is read-only
        except TypeError:
            return array
        return self._laid_out(tensor)

    def _replaced_mapping(self, mapping: Mapping[Any, Any]) -> Any:
        items = {key: self._replaced(item) for key, item in mapping.items()}
        if not isinstance(mapping, MutableMapping):
            return items
        new = copy.copy(mapping)
        new.update(items)
        return new

    def _replaced_dataclass(self, value: Any) -> Any:
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, self._replaced(getattr(value, field.name)))  # it may be frozen
        return new

    def _laid_out(self, tensor: torch.Tensor) -> Tensor:
        if self._mesh is None:
            return to_gt(tensor)
        return distribute(tensor, self._mesh, self._placements)  # type: ignore[arg-type]


@ends_on_users_line
def loader(
    batches: Iterable[Any],
    *,
    signal: str | None = None,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    ahead: int = 2,
) -> Loader:
    """Batches with their tensors on GT; `ahead` is the number of batches that are sent before they are used. A signal,
    or `mesh` and `placements`, give the layout of the tensors; otherwise the scope in which the loop runs.

    >>> for x, y in gt.data.loader([(torch.ones(2), 1), (torch.zeros(2), 2)]):
    ...     print(type(x).__name__, y)
    Tensor 1
    Tensor 2
    """
    if (mesh is None) != (placements is None):
        raise LayoutError("gt.data.loader() needs both mesh= and placements=, or a signal=, or none of them")
    if mesh is not None and signal is not None:
        raise LayoutError("gt.data.loader() takes the layout of batches from signal= or from mesh=, not from both")
    if ahead < 0:
        raise ValueError(f"ahead={ahead}: the number of batches that are sent before they are used is 0 or more")
    return Loader(batches, signal, mesh, placements, ahead)
