"""The exception tree.

    GTError
    ├── SettingsError        a setting, argument or environment variable that cannot be used
    ├── SignalError          an invalid configuration of signals, or a scope used against its configuration
    ├── LayoutError          an invalid mesh, spec or placement
    ├── SessionError         GT used in the wrong state (after shutdown, in a forked child)
    ├── ProtocolError        a message from a peer that violates the protocol
    ├── RecoveryError        values of an earlier moment of the program that cannot be recovered
    ├── CompileError         a read or another effect inside a function of gt.compile; a backward outside of it
    ├── OpError              an op failed on a worker; also a RuntimeError, as torch's own would be
    └── ConnectionLost       the connection to a peer has ended
        ├── WorkerLost       a worker died; its tensors are lost
        └── ServerLost       the dispatcher died or does not answer

An error should say what was tried, why it cannot be, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GTError(Exception):
    pass


class SettingsError(GTError, ValueError):
    pass


class SignalError(GTError, ValueError):
    pass


class LayoutError(GTError, ValueError):
    pass


class SessionError(GTError, RuntimeError):
    pass


class ProtocolError(GTError, RuntimeError):
    pass


class RecoveryError(GTError, RuntimeError):
    pass


class CompileError(GTError, RuntimeError):
    pass


class OpError(GTError, RuntimeError):
    pass


class ConnectionLost(GTError, ConnectionError):
    pass


class WorkerLost(ConnectionLost):
    pass


class ServerLost(ConnectionLost):
    pass


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known name, or all known names."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"
