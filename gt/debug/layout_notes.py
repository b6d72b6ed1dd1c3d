"""Notes for `gt.explain` about layouts that cost memory or bytes: parameters that a plan leaves whole, and what does
not lie as the parameter that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from gt.client import active_session
from gt.client.layouts import read_layout
from gt.client.model_layout import laid_out_models, undecided_tensors
from gt.client.parameter_layouts import belongings, layout_beside
from gt.client.tensor import Tensor
from gt.core.readable_units import print_bytes

SHOWN_NAMES = 4


def layout_notes() -> list[str]:
    """The notes about all models and optimizers of the session."""
    if active_session.current().alone:
        return []
    notes: list[str] = []
    names: dict[int, str] = {}
    for model in laid_out_models():
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
        whole = undecided_tensors(model)
        if whole:
            nbytes = print_bytes(sum(tensor.nbytes for tensor in whole.values()))
            notes.append(f"whole on each worker, as no pattern of `model` names them: {_some(list(whole))} ({nbytes})")
    plain, apart = [], []
    for parameter, entry, value in belongings():
        name = f"{entry} of {names.get(id(parameter), f'a parameter {list(parameter.shape)}')}"
        if not isinstance(value, Tensor):
            plain.append(name)
        elif _is_apart(parameter, value):
            apart.append(f"{name} [{value.spec}]")
    if plain:
        notes.append(f"in this program, not on the workers of the parameter: {_some(plain)}")
    if apart:
        notes.append(f"not laid out as the parameter: {_some(apart)}")
    return notes


def _is_apart(parameter: Tensor, value: Tensor) -> bool:
    """Whether a tensor could lie as its parameter, and does not. A gradient may be partial until it is needed."""
    expected, own = layout_beside(parameter, value.shape), read_layout(value._ref)
    if expected is None or own.partial:
        return False
    return own.normal(tuple(value.shape)) is not expected.normal(tuple(value.shape))


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join([*names[:SHOWN_NAMES], *([f"{more} more"] if more > 0 else [])])
