"""torch.nn with parameters on GT: `gt.nn.Linear(784, 10)` builds its weights straight on the workers.

A class of this module is a subclass of torch's that builds itself inside `gt.device()`; it behaves as torch's in every
other way, and `isinstance(gt.nn.Linear(1, 1), torch.nn.Linear)` holds. Names that create no parameters are torch's own.

>>> model = gt.nn.Sequential(gt.nn.Linear(3, 4), gt.nn.ReLU(), gt.nn.Linear(4, 1))
>>> model(gt.ones(2, 3)).shape
torch.Size([2, 1])
>>> isinstance(gt.nn.Linear(1, 1), torch.nn.Linear)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import gt.optim
from gt.client.creation import device
from gt.client.tensor import to_gt
from gt.core.tracebacks import ends_on_users_line

if TYPE_CHECKING:
    from torch.nn import *  # noqa: F403
    from torch.nn import functional as functional
    from torch.nn import init as init
    from torch.nn import utils as utils
    from torch.optim import *  # noqa: F403

_classes: dict[type, type] = {}


def _on_gt(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same class with parameters on GT."""

    @ends_on_users_line
    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        with device():
            kind.__init__(self, *args, **kwargs)

    found = _classes.get(kind)
    if found is None:
        body = {
            "__init__": __init__,
            "__module__": __name__,
            "__doc__": kind.__doc__,
            "__qualname__": kind.__qualname__,
        }
        found = _classes[kind] = type(kind.__name__, (kind,), body)
    return found


class _ParameterType(type(torch.nn.Parameter)):  # type: ignore[misc]
    """Makes every parameter, plain or on GT, an instance of `gt.nn.Parameter`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.nn.Parameter)


class Parameter(torch.nn.Parameter, metaclass=_ParameterType):
    """Torch's parameter, made on GT.

    >>> weight = gt.nn.Parameter(torch.ones(2))
    >>> isinstance(weight, gt.Tensor), weight.requires_grad
    (True, True)
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> torch.nn.Parameter:  # type: ignore[misc]
        return torch.nn.Parameter(to_gt(torch.empty(0) if data is None else data.detach()), requires_grad)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        value = getattr(torch.nn, name, None)
        if value is None:
            return getattr(gt.optim, name)  # `from gt.nn import Module, Linear, SGD`
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value is not torch.nn.Module:
            return _on_gt(value)
        return value
