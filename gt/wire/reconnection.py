"""Connects a client again whose connection was lost, and goes on with its session."""

from __future__ import annotations

import logging
import select
import threading
import time
from pathlib import Path
from typing import Protocol

from gt.core.errors import ConnectionLost, ProtocolError, ServerLost, SessionLost, SettingsError
from gt.core.messages import Refused, Resume, Resumed, SessionEnded, Welcome
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.connections import Link, NoConnection, open_link
from gt.wire.process_identity import ServerProcess

log = logging.getLogger("gt.wire")

CHECK_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_TOLD_SECONDS = 1.0  # a lost connection is reported to the program after this time
_ANSWER_SECONDS = 10.0  # time for the answer to a Resume
_REFUSED_SECONDS = 10.0  # a server that refuses keys, or whose machine refuses connections, has ended after this time
_AGAIN = "Start again with gt.shutdown() and gt.connect()"


class ReconnectingChannel(Protocol):
    """The channel of a client, as its reconnection sees it."""

    @property
    def is_over(self) -> bool: ...

    @property
    def received(self) -> int: ...

    def check_link(self) -> bool: ...

    def resume(self, link: Link, received: int) -> None: ...

    def fail(self, failure: ServerLost) -> None: ...


class Reconnection:
    """A thread that looks after the connection of a session, so that a program is connected again also while it does
    not use GT. `lock` is that of the channel."""

    def __init__(
        self,
        channel: ReconnectingChannel,
        lock: threading.Lock,
        server: ServerProcess,
        welcome: Welcome,
        keys: Path | None,
        silence: float,
    ) -> None:
        self._channel = channel
        self._lock = lock
        self._server = server
        self._welcome = welcome
        self._keys = keys
        self._silence = silence
        self._answers: Decoder[Resumed | SessionEnded | Refused] = Decoder(Resumed | SessionEnded | Refused)
        self._lost: list[Link] = []
        self._lost_at = 0.0
        self._is_cut_off = self._was_told = False
        self._is_needed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gt-reconnection", daemon=True)
        self._thread.start()

    def begin(self, lost: Link) -> None:
        """A connection is lost. With the lock."""
        self._lost.append(lost)
        if not self._is_cut_off:
            self._lost_at = time.monotonic()
        self._is_cut_off = True
        self._is_needed.set()

    def take_news(self) -> str | None:
        """What a disconnected program waits for; "" once after that, and None otherwise. With the lock."""
        if self._is_cut_off:
            self._was_told = True
            away = time.monotonic() - self._lost_at
            return (
                f"for the server at {self._server.endpoint}, to which the connection was lost {away:.0f} s ago; the "
                f"session is kept for {max(0.0, self._welcome.lease - away):.0f} s more"
            )
        was_told, self._was_told = self._was_told, False
        return "" if was_told else None

    def close(self) -> None:
        self._closing.set()
        self._is_needed.set()
        self._thread.join(_ANSWER_SECONDS)

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._is_needed.wait(CHECK_SECONDS)
            with self._lock:
                self._is_needed.clear()
                if self._channel.is_over:
                    break
                is_connected = self._channel.check_link()
            if not is_connected:
                self._reconnect()
        self._close_lost()

    def _close_lost(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, []
        for link in lost:
            link.close(linger=0)

    def _reconnect(self) -> None:
        """Try to connect until the session goes on, or is lost."""
        lease, is_told = self._welcome.lease, False
        refused_at: float | None = None  # since when the server itself refuses
        while not self._channel.is_over and not self._closing.is_set():
            self._close_lost()
            if self._server.has_ended():
                self._channel.fail(self._server.describe_end())
                return
            is_resumed, refusal = self._try()
            if is_resumed or self._channel.is_over:
                return
            now = time.monotonic()
            if not is_told and now - self._lost_at > _TOLD_SECONDS:
                is_told = True
                log.warning(
                    "the connection to the server at %s was lost; connecting again, for at most %g s",
                    self._server.endpoint,
                    lease,
                )
            refused_at = (refused_at or now) if refusal else None
            if refused_at is not None and now - refused_at > min(_REFUSED_SECONDS, lease):
                self._channel.fail(ServerLost(f"{refusal}; the session and its tensors are lost. {_AGAIN}"))
            elif now - self._lost_at > lease:
                self._channel.fail(self._describe_loss())
            self._closing.wait(_RETRY_SECONDS)

    def _try(self) -> tuple[bool, str]:
        """Whether the session goes on; and why a server that is there admits no clients."""
        try:
            link = open_link(self._server.endpoint, self._keys, 0, self._silence, cancelled=self._closing)
        except NoConnection:
            return False, ""
        except SettingsError as error:
            return False, str(error)
        if link is not None:
            return self._shake_hands(link), ""
        if self._server.refuses_connections():
            return False, f"nothing listens at {self._server.endpoint} any more: the server has ended"
        return False, ""

    def _shake_hands(self, link: Link) -> bool:
        """Ask for the session over a new connection; returns whether it goes on."""
        try:
            answer = self._ask(link)
        except (ConnectionLost, ProtocolError):
            answer = None
        if isinstance(answer, Resumed):
            with self._lock:
                away = time.monotonic() - self._lost_at
                self._is_cut_off = False
            self._channel.resume(link, answer.received)
            log.warning(
                "the connection to the server at %s was lost; connected again after %.1f s, with nothing lost",
                self._server.endpoint,
                away,
            )
            return True
        link.close(linger=0)
        if answer is not None:
            self._channel.fail(
                SessionLost(
                    f"the server at {self._server.endpoint} does not go on with the session: {answer.reason}. {_AGAIN}"
                )
            )
        return False

    def _ask(self, link: Link) -> Resumed | SessionEnded | Refused | None:
        welcome = self._welcome
        link.send(
            encode([Resume(__version__, welcome.server, welcome.ident, welcome.session_secret, self._channel.received)])
        )
        poller = select.poll()
        poller.register(link.descriptor, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._closing.is_set():
            frames = link.receive(waits=False)
            if frames is not None:
                return self._answers.decode(frames)[0][0]
            if link.is_lost():
                return None
            poller.poll(50)
        return None

    def _describe_loss(self) -> ServerLost:
        return ServerLost(
            f"the connection to the server at {self._server.endpoint} was lost: it was closed, or silent for "
            f"{self._silence:g} s (GT_HEARTBEAT_TIMEOUT), and could not be made again for "
            f"{self._welcome.lease:g} s, the time of the session's lease (GT_LEASE of the server); the session and its "
            f"tensors are lost. {_AGAIN}"
        )
