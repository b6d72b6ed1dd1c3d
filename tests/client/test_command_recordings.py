"""Recordings of commands that begin and end in several threads."""

import threading

from gt.client.recordings import CommandRecordings
from gt.core.messages import TimelineRead

SECONDS = 20


def test_a_recording_that_ends_does_not_stop_one_that_begins_meanwhile():
    limits, is_reading, goes_on = [], threading.Event(), threading.Event()

    def read(limit):
        limits.append(limit)
        if threading.current_thread().name == "ends":
            is_reading.set()
            assert goes_on.wait(SECONDS)
        return TimelineRead(0, ())

    recordings = CommandRecordings(read)
    first = recordings.begin(10)
    ends = threading.Thread(target=recordings.end, args=(first,), name="ends", daemon=True)
    begins = threading.Thread(target=recordings.begin, args=(20,), daemon=True)
    ends.start()
    assert is_reading.wait(SECONDS)
    begins.start()
    assert limits[-1] == 0  # the reads of `begins` come after those of `ends`
    goes_on.set()
    for thread in (ends, begins):
        thread.join(SECONDS)
    assert limits[-1] == 20
