"""The compile server gives a unit that gets no CPU ordinary priority."""

from __future__ import annotations

import os
import socket
import time

from gt.worker.compilation import compile_server
from gt.worker.compilation.compile_server import CompileServer


def test_a_unit_without_a_cpu_is_started_again_at_ordinary_priority(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_server, "_compile_and_exit", lambda *_: (time.sleep(60), os._exit(0)))
    monkeypatch.setattr(compile_server, "_set_group_niceness", lambda _: None)  # of the tests' session
    listener, link = socket.socketpair()
    with listener, link:
        compiling = CompileServer(tmp_path, 300.0, listener, 19)
        worker = compile_server._Worker(link)
        compiling._workers.add(worker)
        compiling._waiting["key"] = [worker]
        compiling._queue.append(("key", None))  # type: ignore[arg-type]
        priorities = [priority_of_next(compiling)]
        compiling._check_time()
        assert compiling._job is not None, "it is not starved yet"
        monkeypatch.setattr(compile_server, "_STARVED_SECONDS", 0.0)
        monkeypatch.setattr(compile_server, "_STARVED_SHARE", 1e9)
        compiling._check_time()
        priorities.append(priority_of_next(compiling))
        compiling._check_time()
        assert compiling._job is not None, "it is started again once"
        compiling._end_job()
    assert priorities == [19, os.nice(0)]


def priority_of_next(compiling: CompileServer) -> int:
    compiling._start_job()
    assert compiling._job is not None
    end = time.monotonic() + 10
    while (found := os.getpriority(os.PRIO_PROCESS, compiling._job.pid)) != compiling._niceness:
        assert time.monotonic() < end, found
    return found
