"""The exception tree.

    GTError
    ├── SettingsError        a setting, argument or environment variable that cannot be used
    ├── SignalError          a configuration of signals that makes no sense, or a scope used in a way it does not allow
    ├── LayoutError          a mesh, spec or placement that makes no sense
    ├── SessionError         GT used in a way its state does not allow (after shutdown, in a forked child)
    ├── ProtocolError        bytes from a peer that are not what the protocol says
    ├── RecoveryError        values of one moment of the program that cannot be brought back
    ├── OpError              an op failed on a worker; also a RuntimeError, as torch's own would be
    └── ConnectionLost       a peer is gone
        ├── WorkerLost       a worker died; its tensors are lost
        └── ServerLost       the dispatcher died or does not answer

Every error says what was tried, why it cannot be, and what to do.
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


class OpError(GTError, RuntimeError):
    pass


class ConnectionLost(GTError, ConnectionError):
    pass


class WorkerLost(ConnectionLost):
    pass


class ServerLost(ConnectionLost):
    pass


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"
