"""`gt.publish` and `gt.subscribe`: tensors that sessions of one server share, read-only and without moving a byte."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Collection, Sequence

import torch

from gt.client import active_session
from gt.client.cached_calls import wrap
from gt.client.inbox import NOTICE_SECONDS
from gt.client.interrupts import require_outside
from gt.client.session import Session
from gt.client.session_reads import fetch, read_versions
from gt.client.storage import Storage, geometry_from_meta
from gt.client.tensor import Handle, Tensor, to_gt
from gt.core.errors import PublishError, SettingsError
from gt.core.messages import NotPublished, PublishTensor, Subscribed, SubscribeTensor, UnpublishTensor
from gt.core.tracebacks import ends_on_users_line
from gt.wire.long_waits import LongWait

log = logging.getLogger("gt.client")
POLL_SECONDS = 0.05  # between two looks for a name that is not published yet
MAX_NAME = 256  # characters
MAX_KEYS = 4096  # keys to which one tensor is published: as many as a server admits


@ends_on_users_line
def publish(name: str, x: torch.Tensor, to: str | Sequence[str] = ()) -> None:
    """Let other sessions of the server read the present value of a tensor by `gt.subscribe(name)`: those of the same
    key, and of the keys that `to` names (`"*"`: all). Nothing moves, and the layout stays. The value is a snapshot:
    later writes to `x` copy it first. Publishing a name again replaces what it names; it is gone with `gt.unpublish`,
    or when this session ends, and subscribers keep what they have.

    >>> gt.publish("weights", gt.ones(2))
    >>> gt.subscribe("weights").tolist()
    [1.0, 1.0]
    """
    _check_name(name)
    if not isinstance(x, torch.Tensor):
        raise SettingsError(f"gt.publish({name!r}, ...) takes a tensor, not {type(x).__name__}; use gt.tensor(...)")
    keys = _check_keys(to)
    session = active_session.current()
    require_outside()
    ref = (x if isinstance(x, Tensor) else to_gt(x))._ref
    storage = ref if isinstance(ref, Storage) else session.derive(ref)
    _require_value(session, storage)
    request, site = next(session.ids), session.sites.current()
    session.outbox.submit(lambda ids: PublishTensor(request, ids[0], name, keys, site), [storage])
    _require_done(session.answer(request).answer)


@ends_on_users_line
def unpublish(name: str) -> None:
    """Let no more sessions subscribe to a name. Those that have subscribed keep the value.

    >>> gt.publish("weights", gt.ones(2))
    >>> gt.unpublish("weights")
    """
    _check_name(name)
    session = active_session.current()
    _require_done(_ask(session, UnpublishTensor(next(session.ids), name)))


@ends_on_users_line
def subscribe(name: str, timeout: float = 0.0) -> Tensor:
    """The tensor that a session of the same server has published by a name, as it was then. It has the layout and the
    memory of the published one, and cannot be written: `gt.ReadOnlyError`. Wait up to `timeout` seconds until it is
    published.

    >>> gt.publish("weights", gt.arange(3.0))
    >>> x = gt.subscribe("weights").requires_grad_()
    >>> (x * x).sum().backward()
    >>> x.grad.tolist()
    [0.0, 2.0, 4.0]
    """
    _check_name(name)
    _check_timeout(timeout)
    session = active_session.current()
    require_outside()
    start = time.monotonic()
    notice = start + NOTICE_SECONDS
    with LongWait(session.display) as wait:
        while True:
            ident = next(session.ids)
            answer = _ask(session, SubscribeTensor(next(session.ids), ident, name))
            now = time.monotonic()
            if isinstance(answer, Subscribed):
                break
            if now - start >= timeout:
                _require_done(answer)
            wait.tell(lambda: f"waiting for a session that publishes {name!r}")
            if now > notice and session.display is None:
                log.warning("waiting for %.0f s for a session that publishes %r", now - start, name)
                notice = now + NOTICE_SECONDS
            time.sleep(min(POLL_SECONDS, timeout - (now - start)))
    session.outbox.read_only[ident] = name
    return wrap(Handle, Storage(session, ident, geometry_from_meta(answer.meta)))  # type: ignore[return-value]


def _ask(session: Session, instruction: UnpublishTensor | SubscribeTensor) -> object:
    session.require_open()
    session.outbox.emit(instruction)
    return session.answer(instruction.request).answer


def _require_done(answer: object) -> None:
    if isinstance(answer, NotPublished):
        raise PublishError(answer.reason)


def _check_name(name: object) -> None:
    if not _is_name(name):
        shown = f"{name[:20]!r}... ({len(name)} characters)" if isinstance(name, str) and len(name) > 99 else repr(name)
        raise SettingsError(
            f"{shown} cannot be the name of a published tensor: use 1 to {MAX_NAME} characters that can be printed"
        )


def _check_keys(to: object) -> tuple[str, ...]:
    keys = (to,) if isinstance(to, str) else tuple(to) if isinstance(to, Collection) else (to,)
    if len(keys) > MAX_KEYS or not all(_is_name(key) for key in keys):
        raise SettingsError(
            f"gt.publish(to={reprlib.repr(to)}) is not possible: to= takes up to {MAX_KEYS} names of keys "
            f"(python -m gt.keys list)"
        )
    return keys


def _is_name(name: object) -> bool:
    """Whether a message can hold a name: the server drops a session whose messages it cannot decode."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


def _check_timeout(timeout: object) -> None:
    if not isinstance(timeout, int | float) or math.isnan(timeout):
        raise SettingsError(f"gt.subscribe(timeout={timeout!r}) is not possible: timeout= takes a number of seconds")


def _require_value(session: Session, storage: Storage) -> None:
    """Raise a failed tensor's error here: a subscriber could not trace it to a line."""
    if not session.computes:
        return
    (span,) = read_versions(session, [storage])
    if not span.since or span.until:
        fetch(storage)
