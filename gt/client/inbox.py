"""Receives the dispatcher's answers; raises an error if no answer can come any more."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from gt.client.call_sites import Sites
from gt.client.error_text import (
    describe_departure,
    describe_eager_scope,
    describe_gathering,
    describe_loss,
    error_of_op,
    error_of_query,
)
from gt.client.interrupts import CriticalSection
from gt.core.errors import GTError, ProtocolError, ServerLost, SessionLost, WorkerLost
from gt.core.messages import (
    Failed,
    Failure,
    Gathered,
    Joined,
    Left,
    Lost,
    NotCompiled,
    OpFailed,
    Refused,
    Rejected,
    SessionEnded,
    Uploaded,
    Waiting,
)
from gt.core.progress import ProgressDisplay
from gt.wire.client_channel import ClientChannel, Received
from gt.wire.long_waits import LongWait

log = logging.getLogger("gt.client")
sharding_log = logging.getLogger("gt.sharding")
signals_log = logging.getLogger("gt.signals")

POLL_SECONDS = 0.05  # how long a thread receives for all, or waits for the thread that does; defers Ctrl-C
NOTICE_SECONDS = 10.0  # a wait this long is explained on stderr
REMEMBERED = 1024  # failures that other workers may still report


class Inbox:
    """Receives answers for all threads: of those that wait, one receives. `failures` are those of ops that no read has
    shown yet. `note_workers` is called when workers come and go. Long waits are shown by the `display`; without one
    they are explained on stderr every 10 s."""

    def __init__(
        self,
        channel: ClientChannel,
        sites: Sites,
        note_workers: Callable[[Joined | Lost | Left], None] = lambda _: None,
        display: ProgressDisplay | None = None,
    ) -> None:
        self.failures: list[Failure] = []
        self._channel = channel
        self._sites = sites
        self._note_workers = note_workers
        self._display = display
        self._answers: dict[int, Received] = {}
        self._turn = threading.RLock()  # held by the thread that receives
        self._receiving = False
        self._received = threading.Condition()  # notified when that thread has received
        self._abandoned: set[int] = set()  # requests whose wait was interrupted
        self._failures_lock = threading.RLock()
        self._server_lost: ServerLost | None = None
        self._refused = ""
        self._status = ""
        self._known: deque[int] = deque(maxlen=REMEMBERED)
        self._drained: set[int] = set()  # workers that gave their tensors to others before they ended
        self._losses: dict[int, Lost] = {}  # the news of lost workers, with the tensors that are lost

    def wait(self, request: int, seconds: float = math.inf) -> Received:
        """The answer to a request. Raises the error that made an answer impossible, and TimeoutError after `seconds`. A
        long wait is shown to the user."""
        found = self._answers.pop(request, None)
        if found is None:
            try:
                found = self._wait(request, seconds)
            except BaseException:
                if self._answers.pop(request, None) is None:
                    self._abandoned.add(request)
                raise
        return self._checked(found)

    def wait_for_room(self) -> None:
        """Wait until the channel takes more. Raises the error that made that impossible."""
        if self._channel.is_full:
            self._wait_until(lambda: not self._channel.is_full, math.inf)

    def _wait(self, request: int, seconds: float) -> Received:
        self._wait_until(lambda: request in self._answers, seconds)
        return self._answers.pop(request)

    def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        start = time.monotonic()
        notice = start + NOTICE_SECONDS
        with LongWait(self._display) as wait:
            while True:
                self._receive_for_all(is_done)
                if is_done():
                    return
                if self._refused:
                    raise ProtocolError(self._refused)
                now = time.monotonic()
                if now - start > seconds:
                    raise TimeoutError
                wait.tell(self._describe_wait)
                if now > notice and self._display is None:
                    self._explain(now - start)
                    notice = now + NOTICE_SECONDS

    def require_accepted(self) -> None:
        """Raises ProtocolError if the dispatcher has refused an instruction."""
        if self._refused:
            raise ProtocolError(self._refused)

    def collect(self) -> bool:
        """Take the answers that have arrived; returns whether there were any. An answer taken from the channel must be
        kept, so an interrupt in the middle ends the session."""
        try:
            return self._take()
        except GTError:
            raise
        except BaseException as error:  # a second Ctrl-C, or raised by a signal handler: answers may be lost
            self._refused = f"{type(error).__name__} has ended the session while it received"
            raise

    def collect_now(self) -> None:
        """Take all answers that have arrived, unless another thread is receiving. Raises ServerLost."""
        with CriticalSection():
            if not self._turn.acquire(blocking=False):
                return
            try:
                while self.collect():
                    pass
            finally:
                self._turn.release()
                with self._received:
                    self._received.notify_all()

    def _take(self) -> bool:
        """Receive answers: keep those to requests, and act on news. Returns whether there were any."""
        if self._server_lost is not None:
            raise self._server_lost
        try:
            arrived = self._channel.receive()
        except ServerLost as error:
            self._server_lost = error
            raise
        for received in arrived:
            answer = received.answer
            if isinstance(
                answer, Joined | Lost | Left
            ):  # an answer to a request may tell of a loss before the news does
                self._note_workers(answer)
            if isinstance(answer, OpFailed):
                self._note(answer.failure)
            elif isinstance(answer, Waiting):
                self._status = answer.reason
            elif isinstance(answer, Refused | SessionEnded) or (isinstance(answer, Rejected) and answer.request == 0):
                self._note_end(answer)
            elif isinstance(answer, Left) or (isinstance(answer, Lost) and answer.request == 0):
                self._note_departure(answer)
            elif isinstance(answer, Joined | Uploaded):
                continue
            elif isinstance(answer, Gathered | NotCompiled):
                self._tell(answer)
            elif answer.request in self._abandoned:  # type: ignore[union-attr]
                self._abandoned.discard(answer.request)  # type: ignore[union-attr]
            else:
                self._answers[answer.request] = received  # type: ignore[union-attr]
        return bool(arrived)

    def _note_departure(self, news: Lost | Left) -> None:
        if isinstance(news, Left):
            self._drained.add(news.worker)
            log.warning("%s", describe_departure(news))
        else:
            self._drained.discard(news.worker)
            self._losses[news.worker] = news
            log.info("%s", self._describe_loss(news))  # reads raise it

    def _note_end(self, answer: Refused | Rejected | SessionEnded) -> None:
        """The session cannot go on. Raises SessionLost if somebody has ended it."""
        if isinstance(answer, SessionEnded):
            self._server_lost = SessionLost(answer.reason)
            raise self._server_lost
        self._refused = self._refused or answer.reason  # the first one is the cause of the others

    def _tell(self, news: Gathered | NotCompiled) -> None:
        site = self._sites.lookup(news.site)
        if isinstance(news, Gathered):
            sharding_log.warning("%s", describe_gathering(news, site))
        else:
            signals_log.warning("%s", describe_eager_scope(news, site))

    def take_unread_failures(self) -> list[Failure]:
        """Failures that no read has shown, taken out of the inbox."""
        with self._failures_lock:
            failures, self.failures = self.failures, []
        return failures

    def _receive_for_all(self, is_done: Callable[[], bool]) -> None:
        """Receive for a moment, or wait for the thread that does. Ctrl-C is raised at the end of the moment."""
        with CriticalSection():
            if not self._turn.acquire(blocking=False):
                self._wait_for_receiver(is_done)
                return
            try:
                self._receiving = True
                self._receive(is_done)
            finally:
                self._receiving = False
                self._turn.release()
                with self._received:
                    self._received.notify_all()

    def _receive(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + POLL_SECONDS
        while not is_done() and not self.collect() and time.monotonic() < deadline:
            self._channel.wait()

    def _wait_for_receiver(self, is_done: Callable[[], bool]) -> None:
        with self._received:
            if not is_done() and self._receiving:
                self._received.wait(POLL_SECONDS)

    def _note(self, failure: Failure) -> None:
        """Keep a failure, unless another worker has reported the same one before."""
        with self._failures_lock:
            if failure.origin == 0 or failure.origin not in self._known:
                self._known.append(failure.origin)
                self.failures.append(failure)

    def _forget(self, failure: Failure) -> None:
        """Drop a failure that a read shows."""
        with self._failures_lock:
            self._known.append(failure.origin)
            self.failures = [other for other in self.failures if other.origin != failure.origin]

    def _checked(self, found: Received) -> Received:
        """An answer with the result of a request. Raises the error that came in place of a result."""
        self.require_accepted()
        answer = found.answer
        if isinstance(answer, Failed):
            self._forget(answer.failure)
            make = error_of_query if answer.is_own_failure else error_of_op
            raise make(answer.failure, self._sites.lookup(answer.failure.site))
        if isinstance(answer, Lost):
            raise WorkerLost(self._describe_loss(answer))
        if isinstance(answer, Rejected):
            raise ProtocolError(answer.reason)
        return found

    def _describe_loss(self, answer: Lost) -> str:
        site = self._sites.lookup(answer.site) if answer.site else None
        news = self._losses.get(answer.worker, answer)
        lines = [(self._sites.text(line.site) if line.site else "", line) for line in news.lines]
        if answer.worker in self._drained:
            return describe_departure(answer, site)
        return describe_loss(answer, self._channel.how_it_ended(answer.pid), site, lines)

    def _describe_wait(self) -> str:
        return f"waiting {self._status or 'for the workers'}"

    def _explain(self, seconds: float) -> None:
        reason = self._status or "the server has not said for whom"
        print(f"gt: waiting for {seconds:.0f} s; {reason}", file=sys.stderr, flush=True)
