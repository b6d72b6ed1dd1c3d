"""Scopes in a program: `with gt.signal.context("forward"):` runs the ops inside under the signal "forward".

The public functions only. A *signal* is a name, configured with workers and layouts (`GT_CONFIG`, `gt.load_config`,
`gt.register_config`; package gt/signals); a name without a configuration changes nothing. A *scope* is its use in a
program; gt/client/scope_stack.py holds the scopes that each thread or task has entered.
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client import active_session, scope_stack
from gt.client.scope import Scope
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import SignalError


def context(name: str, *, backward: str | None = None) -> Scope:
    """A scope in which tensors are created and ops run as the signal is configured. Gradients run under the signal
    `backward`, by default the one that the configuration names, or the same signal."""
    return Scope(name, backward)


def enter(name: str, *, backward: str | None = None) -> None:
    """Enter a scope; `exit` with the same name leaves it."""
    active_session.enter_scope(name, backward)


def exit(name: str) -> None:
    """Leave the scope that was entered last, which must have this name."""
    innermost = scope_stack.top()
    if innermost is None:
        raise SignalError(f"gt.signal.exit({name!r}), but no scope was entered")
    if innermost.owner is not None:
        raise SignalError(
            f"gt.signal.exit({name!r}), but the innermost scope is {innermost.name!r}, which its `with` leaves"
        )
    if innermost.name != name:
        raise SignalError(f"gt.signal.exit({name!r}), but the scope that was entered last is {innermost.name!r}")
    scope_stack.pop(innermost)


def tensor(x: Any, name: str) -> Tensor:
    """A copy of a tensor in the layout of tensors that are created in the signal's scope. Gradients pass through."""
    if not isinstance(name, str) or not name:
        raise SignalError(f"the name of a signal is a text that is not empty, not {name!r}")
    source = x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
    layout = active_session.current().resolve_scopes().layout(name, source.shape)
    if layout is None and isinstance(source, Tensor):
        return source.clone()  # type: ignore[return-value]
    return to_gt(source, layout)
