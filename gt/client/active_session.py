"""The active session of the process, which ops without their own session use; the first use of GT opens it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gt.client.scope_stack import note_use, push
from gt.client.session import Session
from gt.client.storage import ROOT, forget_geometries
from gt.client.torch_patches.avoided_imports import import_shape_functions
from gt.lazy_launch import load_launcher

_connect: Callable[[], Session] | None = None
connecting = threading.RLock()
active: Session | None = None


def set_connector(connect: Callable[[], Session]) -> None:
    """Set the function that makes the session of a program's first op; `gt.launch` does."""
    global _connect
    _connect = connect


def enter_scope(name: str, backward: str | None = None, owner: object = None) -> None:
    """Enter a signal scope; the active session, if any, finds the scope of each op from then on."""
    push(name, backward, owner)
    if active is not None:
        active.resolve_scopes()


def follow_scopes() -> None:
    """From now on, look for the scope of each op, as if the program had entered one."""
    note_use()
    if active is not None:
        active.resolve_scopes()


def activate(session: Session | None) -> None:
    global active
    if session is not None:
        import_shape_functions()
    active = session
    forget_geometries()
    ROOT.children.clear()


def current() -> Session:
    """The active session; the first use of GT opens it."""
    with connecting:  # several threads may be the first
        if active is None:
            if _connect is None:
                load_launcher()
            assert _connect is not None, "gt.launch sets the connector when it is loaded"
            activate(_connect())
        assert active is not None
        return active


def _leave_to_parent() -> None:
    global connecting
    connecting = threading.RLock()
    if active is not None:
        active.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
