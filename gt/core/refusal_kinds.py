"""The kinds of things that a server refuses, by which it counts them."""

from __future__ import annotations

from typing import Literal, TypeAlias

RefusalKind: TypeAlias = Literal[
    "key", "handshake", "frame", "malformed", "unknown", "foreign", "name", "limit", "instruction", "op", "report"
]

MEANINGS: dict[RefusalKind, str] = {
    "key": "a key that is not let in",
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
