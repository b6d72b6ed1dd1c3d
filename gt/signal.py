"""Scopes in a program: `with gt.signal.context("forward"):` runs the ops inside under the signal "forward".

A *signal* is a name, configured with workers and layouts (`GT_CONFIG`, `gt.load_config`, `gt.register_config`); a name
without a configuration changes nothing. A *scope* is its use in a program; each thread or task has its own.

>>> with gt.signal.context("forward"):
...     y = gt.ones(2) + 1
>>> y.tolist()
[2.0, 2.0]
"""

from __future__ import annotations

from typing import Any

import torch

from gt.client import active_session, scope_stack
from gt.client.scope import Scope
from gt.client.tensor import Tensor, to_gt
from gt.core.errors import SignalError
from gt.core.tracebacks import ends_on_users_line


def context(name: str, *, backward: str | None = None) -> Scope:
    """A scope in which tensors are created and ops run as the signal is configured. Gradients run under the signal
    `backward`, by default the one that the configuration names, or the same signal.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.register_config("forward", gt.SignalConfig(shard=gt.ShardConfig(axis=0)))
    >>> with gt.signal.context("forward"):
    ...     x = gt.ones(4, 3)
    >>> x.shards()[1].shape
    (2, 3)
    """
    return Scope(name, backward)


@ends_on_users_line
def enter(name: str, *, backward: str | None = None) -> None:
    """Enter a scope; `exit` with the same name leaves it.

    >>> gt.signal.enter("forward")
    >>> x = gt.ones(4, 3)
    >>> gt.signal.exit("forward")
    """
    active_session.enter_scope(name, backward)


@ends_on_users_line
def exit(name: str) -> None:
    """Leave the scope that was entered last, which must have this name.

    >>> gt.signal.enter("forward")
    >>> gt.signal.exit("forward")
    """
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


@ends_on_users_line
def tensor(x: Any, name: str) -> Tensor:
    """A copy of a tensor in the layout of tensors that are created in the signal's scope. Gradients pass through.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0)))
    >>> gt.signal.tensor(torch.ones(4, 3), "rows").shards()[1].shape
    (2, 3)
    """
    if not isinstance(name, str) or not name:
        raise SignalError(f"the name of a signal is a text that is not empty, not {name!r}")
    scope_stack.note_entered(name)
    source = x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
    layout = active_session.current().resolve_scopes().layout(name, source.shape)
    if layout is None and isinstance(source, Tensor):
        return source.clone()  # type: ignore[return-value]
    return to_gt(source, layout)
