"""The store of the workers, with values that only workers read and write which the dispatcher has introduced.

Anybody who reaches the port of torch's TCPStore can list, read and write it. The dispatcher gives each worker the token
of the store over its own, encrypted connection. Values are encrypted, and written with a seal that is made of token,
key and value; a value with another seal is refused. Members of a new process group prove to each other that they know
the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gt.worker.exchange.group_backends import GlooGroup

_SEAL_BYTES = 32
_NONCE_BYTES = 16
Guard: TypeAlias = Callable[[Callable[[], Any]], Any]


class SealedStore:
    """A part of a store, whose keys begin with `prefix`. `guard` calls what asks the store, whose host may vanish."""

    def __init__(self, store: dist.Store, token: str, prefix: str, guard: Guard = lambda ask: ask()) -> None:
        self._guard = guard
        self._store = store
        self._token = token
        self._prefix = prefix

    def part(self, prefix: str) -> SealedStore:
        return SealedStore(self._store, self._token, f"{self._prefix}/{prefix}", self._guard)

    def set(self, key: str, value: str | bytes) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = nonce + self._encrypt(nonce, value.encode() if isinstance(value, str) else value)
        self._guard(lambda: self._store.set(self._name(key), self._seal(key, data) + data))

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises RuntimeError if it was not written by a worker that knows the token."""
        sealed = bytes(self._guard(lambda: self._store.get(self._name(key))))
        seal, data = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise RuntimeError(f"the value of {key!r} in the store of the workers was not written by one of them")
        return self._encrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._guard(lambda: self._store.check([self._name(key) for key in keys])))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._guard(lambda: self._store.wait([self._name(key) for key in keys], timeout))

    def delete_key(self, key: str) -> None:
        self._guard(lambda: self._store.delete_key(self._name(key)))

    def prove_membership(self, group: GlooGroup, rank: int, nonces: Sequence[str], timeout: timedelta) -> None:
        """Prove to the other members of a new process group that this one knows the token, and check their proofs, each
        of which is good for this group only: the members have chosen `nonces` for it, in the order of ranks. Raises
        RuntimeError if one is wrong."""
        proofs = [self._seal(f"rank {other} of {' '.join(nonces)}", b"") for other in range(len(nonces))]
        mine = torch.frombuffer(bytearray(proofs[rank]), dtype=torch.uint8)
        rows = torch.empty(len(nonces) * _SEAL_BYTES, dtype=torch.uint8)
        group.all_gather(rows, mine).wait(timeout)
        if not hmac.compare_digest(rows.numpy().tobytes(), b"".join(proofs)):
            raise RuntimeError("a member of a new process group is not a worker that the dispatcher has introduced")

    def _name(self, key: str) -> str:
        """The name of a key in torch's store, which tells nothing to others."""
        return hmac.digest(self._token.encode(), f"{self._prefix}/{key}".encode(), "sha256").hex()

    def _encrypt(self, nonce: bytes, data: bytes) -> bytes:
        """Encrypt a value, or decrypt it: a stream that depends on the token and on a nonce is added to it."""
        stream = hashlib.shake_256(b"values of " + self._token.encode() + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _seal(self, key: str, data: bytes) -> bytes:
        name = self._name(key).encode()
        return hmac.digest(self._token.encode(), b"%d %b%b" % (len(name), name, data), "sha256")


def hidden_prefix(token: str) -> str:
    """A prefix of keys that cannot be guessed without the token, and from which the token cannot be found."""
    return hashlib.sha256(f"keys of {token}".encode()).hexdigest()[:32]
