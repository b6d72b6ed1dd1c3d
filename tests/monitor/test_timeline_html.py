"""Pages of timelines and of shardings in a real browser: titles under the pointer, nothing from elsewhere, no delay."""

import time

import pytest
import torch

import gt
from gt.core.message_events import WorkerRan
from gt.core.messages import Ran, Swapped
from gt.scripts.visualize import draw_log
from tests.browser import browsing
from tests.monitor.timeline_logs import MS, op, write_log
from tests.records import own

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
HOSTILE = "</title><script>window.hit = 1</script><img src=x onerror=window.hit=1>"
LOAD_SECONDS = 20.0  # 2 on an idle machine
MIDDLE = """beginning => {
    const titles = [...document.querySelectorAll("rect > title")];
    const shape = titles.find(title => title.textContent.match("^" + beginning)).parentElement;
    shape.scrollIntoView({block: "center"});
    const box = shape.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
}"""
PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def opened(page, path):
    """Open a file; returns what it requests besides itself."""
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.evaluate(PAINTED)
    return requests[1:]


def title_under_pointer(page, beginning):
    """The title of the shape on top, where the first one is whose title begins so."""
    x, y = page.evaluate(MIDDLE, beginning)
    page.mouse.move(x, y)
    return page.evaluate("([x, y]) => document.elementFromPoint(x, y).querySelector('title').textContent", [x, y])


def test_the_pointer_shows_op_line_time_and_bytes(tmp_path):
    draw_log(write_log(tmp_path / "run.log"), tmp_path / "run.html")
    with browsing() as page:
        assert opened(page, tmp_path / "run.html") == []
        title = title_under_pointer(page, "aten.mm")
        assert title == "aten.mm.default /home/train.py:7: 4 ms, scope forward"
        assert title_under_pointer(page, "all-gather").endswith("receives 48 B")
        assert "for worker 1" in title_under_pointer(page, "waits [0-9]")


def test_names_of_a_program_are_no_code(tmp_path):
    records = [op(0, f"my.{HOSTILE}", 0, 9, scope=HOSTILE, site=f"{HOSTILE}.py:1"), op(1, "aten.mm.default", 0, 9)]
    log = write_log(tmp_path / "<img src=x onerror=hit=1> \u00fc\n.log", records)
    draw_log(log, tmp_path / "page.html")
    with browsing() as page:
        assert opened(page, tmp_path / "page.html") == []
        assert page.evaluate("window.hit") is None and page.locator("img, script").count() == 0
        assert page.title().startswith("<img src=x")


def many_records(workers, events):
    """Ops of two lengths, and every tenth an exchange of all workers."""
    for worker in range(workers):
        for number in range(events // workers):
            start = number * 2
            if number % 10 == 9:
                peers = tuple([(peer, 4096) for peer in range(4) if peer != worker])
                swap = Swapped(start * MS + worker, (start + 2) * MS, peers, peers, "all-reduce")
                ran = Ran("redistribute", 1, "", start * MS, (start + 2) * MS, (swap,), 1, (), (own(number + 2),))
                yield WorkerRan(worker, ran, "/home/train.py:9")
            else:
                yield op(
                    worker, "aten.mm.default", start, start + 1, f"layer{number // 50 % 4}", f"train.py:{number % 7}"
                )


@pytest.mark.slow
def test_64_workers_and_50000_events_open_without_a_delay(tmp_path):
    draw_log(write_log(tmp_path / "run.log", list(many_records(64, 50_000))), tmp_path / "run.html")
    with browsing() as page:
        start = time.monotonic()
        assert opened(page, tmp_path / "run.html") == []
        assert time.monotonic() - start < LOAD_SECONDS
        title = title_under_pointer(page, "[0-9]+ short op")
        assert "short op" in title and "mm train.py:" in title and " ms" in title


def test_a_picture_of_a_sharding_shows_its_workers_and_requests_nothing(tmp_path):
    gt.init(workers=4, mode="virtual")
    try:
        x = gt.distribute(torch.ones(6, 4), gt.mesh((2, 2), ("dp", "tp")), "dp, -")
        page_text = gt.visualize_sharding(x)._repr_html_()
    finally:
        gt.shutdown()
    (tmp_path / "sharding.html").write_text(f"<!DOCTYPE html><meta charset=utf-8>{page_text}")
    with browsing() as page:
        assert opened(page, tmp_path / "sharding.html") == []
        shown = page.locator("body").inner_text()
        assert "dp=1 tp=0" in shown and "[3:6, 0:4]" in shown and "48 B" in shown
