"""Tracebacks that end on the user's line: frames of GT, and of torch where GT called it, are removed."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from gt.core.settings import shows_full_tracebacks

P = ParamSpec("P")
R = TypeVar("R")


def leave_out_own_frames(error: Exception) -> None:
    """Shorten the traceback of an exception that is about to leave GT. The caller follows with a bare `raise`, which
    does not add its own frame."""
    if shows_full_tracebacks():
        return
    error.__traceback__ = _without_own_frames(error.__traceback__)
    context = error.__context__
    while context is not None and _is_own(context.__traceback__):
        context = context.__context__
    error.__context__ = context


def ends_on_users_line(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates functions that users call: tracebacks of their exceptions have no frame of GT."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave_out_own_frames(error)
            raise

    return call


def with_init_on_users_line(kind: type[R]) -> type[R]:
    """Decorates a class whose `__init__` was made for it: tracebacks of its exceptions have no frame of GT."""
    kind.__init__ = ends_on_users_line(kind.__init__)  # type: ignore[method-assign]
    return kind


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Remove GT's frames; keep frames of the user's functions that GT has called."""
    if traceback is None:
        return None
    rest = _without_own_frames(traceback.tb_next)
    if _is_own(traceback):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _is_own(traceback: TracebackType | None) -> bool:
    if traceback is None:
        return False
    file = traceback.tb_frame.f_code.co_filename
    if file == "<string>":  # a method that `dataclass` has made
        file = traceback.tb_frame.f_globals.get("__file__") or file
    return file.startswith(own_folders())


def own_folders() -> tuple[str, ...]:
    """The folders of GT and, if the program has imported it, of torch."""
    torch = sys.modules.get("torch")
    files = [Path(__file__).parent, *([Path(torch.__file__)] if torch is not None and torch.__file__ else [])]
    return tuple([f"{file.parent}{os.sep}" for file in files])
