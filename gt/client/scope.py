"""`Scope`: a signal scope that a program enters by `with`, or as a decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from gt.client import active_session, scope_stack
from gt.core.errors import SignalError
from gt.core.tracebacks import ends_on_users_line

Function = TypeVar("Function", bound=Callable[..., Any])


class Scope:
    """A scope to enter with `with`, or a decorator that runs a function in the scope. May be entered repeatedly."""

    def __init__(self, name: str, backward: str | None = None) -> None:
        self.name = name
        self.backward = backward

    @ends_on_users_line
    def __enter__(self) -> Scope:
        active_session.enter_scope(self.name, self.backward, self)
        return self

    @ends_on_users_line
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        innermost = scope_stack.top()
        left = scope_stack.leave(self)
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
