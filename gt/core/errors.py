"""The exception tree.

    GTError
    ├── SettingsError        a setting, argument or environment variable that cannot be used
    ├── SignalError          an invalid configuration of signals, or a scope used against its configuration
    ├── LayoutError          an invalid mesh, spec or placement
    ├── SessionError         GT used in the wrong state (after shutdown, in a forked child)
    ├── ProtocolError        a message from a peer that violates the protocol
    ├── PublishError         a published tensor that is not there, or not for this session
    ├── ReadOnlyError        a write to a tensor that another session has published
    ├── RecoveryError        values of an earlier moment of the program that cannot be recovered
    ├── CompileError         a read inside a function of gt.compile; a backward outside of it; a check that disagrees
    ├── NonFiniteError       an op made NaN or infinity inside `gt.debug.find_nan`
    ├── OpError              an op failed on a worker; also a RuntimeError, as torch's own would be
    │   └── LimitError       an op needs more than the session's limits, or the memory of a worker, allow
    └── ConnectionLost       the connection to a peer has ended
        ├── WorkerLost       a worker died; its tensors are lost
        └── ServerLost       the dispatcher died or does not answer
            └── SessionLost  the dispatcher has freed the session

An error should say what was tried, why it cannot be, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias

RefusalKind: TypeAlias = Literal[
    "key", "handshake", "frame", "malformed", "unknown", "foreign", "name", "limit", "instruction", "op", "report"
]

MEANINGS: dict[RefusalKind, str] = {
    "key": "a key that is not admitted",
    "handshake": "a handshake that failed: a peer without encryption, with another server's key, or that left",
    "frame": "a frame over the limit, or bytes that are no frames",
    "malformed": "a message that cannot be decoded, or that does not hold what it announces",
    "unknown": "a message that is not known, or not one that this peer may send now",
    "foreign": "an id or a shared buffer that belongs to another session or process",
    "name": "a path where a name belongs",
    "limit": "more than a peer may make the server hold",
    "instruction": "an instruction that cannot be carried out",
    "op": "an op that is not known, or not allowed",
    "report": "a report of a worker that does not fit what it was asked for",
}

OP_NOT_ALLOWED = "OpNotAllowed"
"""The kind of a worker's Failure for an op that is not known, or not allowed."""


MAX_COMPARED = 1 << 10  # names that are compared with an unknown one
MAX_NAMED = 64  # names in a hint


class GTError(Exception):
    """Any error of GT: all others are subclasses of it.

    >>> try:
    ...     gt.mesh(64)
    ... except gt.GTError as error:
    ...     print(type(error).__name__)
    LayoutError
    """


class SettingsError(GTError, ValueError):
    """A setting, argument or environment variable that cannot be used.

    >>> try:
    ...     gt.connect("localhost")
    ... except gt.SettingsError as error:
    ...     print(error)
    'localhost' is not an address of a server; write host:port, for example localhost:12345
    """


class SignalError(GTError, ValueError):
    """An invalid configuration of signals, or a scope that is used against its configuration.

    >>> try:
    ...     gt.ShardConfig(axis=0, replicate=True)
    ... except gt.SignalError as error:
    ...     print(error)
    ShardConfig: ...
    """


class LayoutError(GTError, ValueError):
    """An invalid mesh, spec or placement.

    >>> try:
    ...     gt.ones(4, mesh=gt.mesh(1), placements=gt.Shard(3))
    ... except gt.LayoutError as error:
    ...     print(error)
    Shard(dim=3) names a dim that a tensor of 1 dims does not have
    """


class SessionError(GTError, RuntimeError):
    """GT is used in the wrong state: after `gt.shutdown()`, or in a forked child.

    >>> x = gt.ones(2)
    >>> gt.shutdown()
    >>> try:
    ...     x + 1
    ... except gt.SessionError as error:
    ...     print(type(error).__name__)
    SessionError
    """


class ProtocolError(GTError, RuntimeError):
    """A message from a peer that violates the protocol. `kind` is the one by which a server counts it."""

    def __init__(self, text: str, kind: RefusalKind = "malformed") -> None:
        super().__init__(text)
        self.kind = kind


class PublishError(GTError, LookupError):
    """A name that is not published for this session, or one that sessions of another key have published.

    >>> try:
    ...     gt.subscribe("weights")
    ... except gt.PublishError as error:
    ...     print(error)
    'weights' is not published for this session; nothing is published for this session
    """


class ReadOnlyError(GTError, RuntimeError):
    """A write to a tensor of `gt.subscribe`, which is that of another session: use a copy, `x.clone()`.

    >>> gt.publish("weights", gt.ones(3))
    >>> x = gt.subscribe("weights")
    >>> try:
    ...     x += 1
    ... except gt.ReadOnlyError:
    ...     x = x + 1
    >>> x.tolist()
    [2.0, 2.0, 2.0]
    """


class RecoveryError(GTError, RuntimeError):
    """Values of an earlier moment of the program that `gt.recover` cannot restore.

    >>> x = gt.ones(2)
    >>> try:
    ...     gt.recover(x)
    ... except gt.RecoveryError:
    ...     x = gt.ones(2)  # begin anew, or from a checkpoint
    >>> x.tolist()
    [1.0, 1.0]
    """


class CompileError(GTError, RuntimeError):
    """A read or another effect inside a function of `gt.compile`, a backward outside of it, or a check of its code that
    found something else than was recorded.

    >>> @gt.compile
    ... def norm(x):
    ...     return x / x.norm()
    >>> try:
    ...     y = norm(gt.ones(4))
    ... except gt.CompileError as error:
    ...     print(error)  # names the line to change
    >>> y.tolist()
    [0.5, 0.5, 0.5, 0.5]
    """


class NonFiniteError(GTError, RuntimeError):
    """An op made NaN or infinity out of finite values inside `with gt.debug.find_nan():`.

    >>> try:
    ...     with gt.debug.find_nan():
    ...         y = gt.zeros(2).log()
    ... except gt.NonFiniteError as error:
    ...     print("aten.log.default, which made infinity" in str(error))
    True
    """


class OpError(GTError, RuntimeError):
    """An op failed on a worker. It is also a RuntimeError, as torch's own error would be. Raised where a value
    that depends on the op is read; its text begins with the line that issued the op.

    >>> row = gt.arange(3.0)[gt.tensor([7])]
    >>> try:
    ...     row.tolist()
    ... except gt.OpError as error:
    ...     print("index 7 is out of bounds" in str(error))
    True
    """


class LimitError(OpError):
    """An op, an upload or a copy needs more than the limits of the session, or the memory of a worker, allow. It was
    not run, no memory was taken for it, and the session goes on: free tensors, and try again. Raised, like any
    OpError, where a value that depends on the op is read; its text begins with the line that issued the op.

    >>> gt.init(limits="bytes=1MiB")
    >>> x = gt.zeros(1 << 20)
    >>> try:
    ...     x.sum().item()
    ... except gt.LimitError as error:
    ...     print("4.19 MB" in str(error))
    True
    >>> gt.zeros(1 << 10).sum().item()
    0.0
    """


class ConnectionLost(GTError, ConnectionError):
    """The connection to a peer has ended."""


class WorkerLost(ConnectionLost):
    """A worker died, and its tensors are lost. The text names the worker and says what became of it.

    >>> loss = gt.ones(3).sum()
    >>> try:
    ...     value = loss.item()
    ... except gt.WorkerLost:  # go on with the workers that are left: see gt.recover
    ...     value = None
    >>> value
    3.0
    """


class ServerLost(ConnectionLost):
    """The dispatcher died, or does not answer.

    >>> try:
    ...     value = gt.ones(3).sum().item()
    ... except gt.ServerLost:  # all tensors are gone: join again, and load a checkpoint
    ...     value = None
    >>> value
    3.0
    """


class SessionLost(ServerLost):
    """The dispatcher is there, and has freed the session: the program was cut off for longer than its lease, the server
    was started again, or somebody has ended the session. The text says who and why, and what is lost.

    >>> try:
    ...     value = gt.ones(3).sum().item()
    ... except gt.SessionLost:  # join again, and load a checkpoint
    ...     value = None
    >>> value
    3.0
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known name, or the known names. Of very many, only some are looked at."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options[:MAX_COMPARED], n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f", and {len(options) - MAX_NAMED} more" if len(options) > MAX_NAMED else ""
    return f"known: {', '.join(options[:MAX_NAMED])}{more}"
