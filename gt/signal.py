"""Scopes in a program: `with gt.signal.context("forward"):` runs the ops inside under the signal "forward".

The public functions only. A *signal* is a name, configured with workers and layouts (`GT_CONFIG`, `gt.load_config`,
`gt.register_config`; package gt/signals); a name without a configuration changes nothing. A *scope* is its use in a
program; the stack of scopes of each thread or task is in gt/client/scopes.py, which needs torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from gt.client import scopes
from gt.client import session as sessions
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import SignalError

Function = TypeVar("Function", bound=Callable[..., Any])


class Scope:
    """A scope to enter with `with`, or a decorator that runs a function in the scope. May be entered repeatedly."""

    def __init__(self, name: str, backward: str | None = None) -> None:
        self.name = name
        self.backward = backward

    def __enter__(self) -> Scope:
        sessions.enter_scope(self.name, self.backward, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        innermost = scopes.top()
        left = scopes.leave(self)
        if left is None:
            raise SignalError(f"signal {self.name!r} is left in another thread or task than it was entered in")
        if left is not innermost and error is None:
            assert innermost is not None
            raise SignalError(f"the scope of signal {self.name!r} ends, and {innermost.name!r} inside it was not left")

    def __call__(self, function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise SignalError(
                f"gt.signal.context({self.name!r}) cannot decorate the generator {function.__name__}: what it yields "
                "to would run in the scope too; use `with` inside it, around no yield"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with Scope(self.name, self.backward):
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with Scope(self.name, self.backward):
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"gt.signal.context({self.name!r})"


def context(name: str, *, backward: str | None = None) -> Scope:
    """A scope in which tensors are created and ops run as the signal is configured. Gradients run under the signal
    `backward`, by default the one that the configuration names, or the same signal."""
    return Scope(name, backward)


def enter(name: str, *, backward: str | None = None) -> None:
    """Enter a scope; `exit` with the same name leaves it."""
    sessions.enter_scope(name, backward)


def exit(name: str) -> None:
    """Leave the scope that was entered last, which must have this name."""
    innermost = scopes.top()
    if innermost is None:
        raise SignalError(f"gt.signal.exit({name!r}), but no scope was entered")
    if innermost.owner is not None:
        raise SignalError(
            f"gt.signal.exit({name!r}), but the innermost scope is {innermost.name!r}, which its `with` leaves"
        )
    if innermost.name != name:
        raise SignalError(f"gt.signal.exit({name!r}), but the scope that was entered last is {innermost.name!r}")
    scopes.pop(innermost)


def tensor(x: Any, name: str) -> Tensor:
    """A copy of a tensor in the layout of tensors that are created in the signal's scope. Gradients pass through."""
    if not isinstance(name, str) or not name:
        raise SignalError(f"the name of a signal is a text that is not empty, not {name!r}")
    source = to_gt(x if isinstance(x, torch.Tensor) else torch.as_tensor(x))
    layout = sessions.current().resolve_scopes().layout(name, source.shape)
    return source.clone() if layout is None else source.redistribute(placements=layout)  # type: ignore[return-value]
