"""Counts what a server has refused, and logs the first refusal of each peer."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict

from gt.core.errors import RefusalKind

log = logging.getLogger("gt.dispatcher")
_REMEMBERED = 1024  # peers; of an older one, the next refusal is logged again
MAX_REASON = 1000  # characters of a reason that are logged and sent: the peer may have chosen them


class Refusals:
    """Counts refusals by kind, in `counts`. Several threads may use it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: OrderedDict[tuple[RefusalKind, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, kind: RefusalKind, peer: str, reason: str) -> None:
        """Count a refusal of a peer, which is given as its address or connection."""
        with self._lock:
            self.counts[kind] += 1
            is_new = (kind, peer) not in self._logged
            self._logged[kind, peer] = None
            self._logged.move_to_end((kind, peer))
            if len(self._logged) > _REMEMBERED:
                self._logged.popitem(last=False)
        if is_new:
            log.warning("refused %s", shorten(reason))

    def read(self) -> dict[str, int]:
        """The counts so far, by kind."""
        with self._lock:
            return dict(self.counts)


def shorten(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
