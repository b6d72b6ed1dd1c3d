"""The page in a real browser."""

import os
import signal

import pytest

import gt
from gt.core.program_view import (
    FailuresState,
    FailureState,
    LineMemory,
    LostWorker,
    MemoryState,
    PairTraffic,
    ProgramStatus,
    SessionState,
    WorkerState,
)
from gt.web_dashboard.http_server import Dashboard
from tests.browser import browsing
from tests.subprocesses import reserved_port, running, start, wait_until
from tests.web_dashboard.requests import ask

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='document.title=`hacked`'></td><script>document.title='hacked'</script>"


class GivenView:
    """A program that is what a test says."""

    def __init__(self, workers=(), sessions=(), memory=None, traffic=(), failures=None):
        self.workers = tuple(workers)
        self.sessions = tuple(sessions)
        self.memory = memory or MemoryState(0, 0, 0, (), (), 0)
        self.traffic = tuple(traffic)
        self.failures = failures or FailuresState(0, (), ())

    def read_workers(self):
        return self.workers

    def read_status(self):
        return ProgramStatus(5, 7, self.workers, self.sessions)

    def read_memory(self):
        return self.memory

    def read_traffic(self):
        return self.traffic

    def read_failures(self):
        return self.failures

    def watch_lines(self, on):
        pass


@pytest.fixture
def serve():
    """Serves the dashboard of a view."""
    boards = []

    def serve(view):
        boards.append(Dashboard(view, 0, "", lambda change: None))
        return boards[-1]

    yield serve
    for board in boards:
        board.close()


def text_of(page, selector):
    return page.inner_text(selector)


def test_a_running_program_is_shown(four_workers):
    board = gt.dashboard()
    with browsing() as page:
        page.goto(board.url)
        page.wait_for_selector("#connection.live")
        assert "token" not in page.url
        x = gt.ones(512, 64)
        gt.replicate(x @ gt.ones(64, 64), x.spec.mesh)
        gt.synchronize()
        page.wait_for_function("document.querySelectorAll('#workers tbody tr').length == 4")
        page.wait_for_selector("#tensors svg")
        page.wait_for_selector("#memory .code:has-text('gt.ones(512, 64)')")
        page.wait_for_selector("#legend li:has-text('products')")
        assert str(os.getpid()) in text_of(page, "#process")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_comes_from_programs_is_text(serve):
    worker = WorkerState(0, HOSTILE, 8, HOSTILE, 0, "running", HOSTILE, HOSTILE)
    failure = FailureState(1, 5.0, 1, HOSTILE, (HOSTILE,), HOSTILE, HOSTILE, HOSTILE, HOSTILE, (0,))
    view = GivenView(
        [worker],
        [SessionState(1, HOSTILE, 2, 3, 4, 5, 6)],
        MemoryState(1, 1, 0, (LineMemory(HOSTILE, 1, 1),), (), 3),
        [PairTraffic(0, 1, 5)],
        FailuresState(1, (failure,), (LostWorker(4, 5, HOSTILE, HOSTILE),)),
    )
    with browsing() as page:
        page.goto(serve(view).url)
        page.wait_for_selector("#failure-list pre")
        page.wait_for_selector("#workers td:has-text('onerror')")
        page.wait_for_selector("#mix .code:has-text('onerror')")
        assert page.locator("main img, main script").count() == 0
        assert "GT dashboard" in page.title()


def test_nobody_is_connected(serve):
    with browsing() as page:
        page.goto(serve(GivenView()).url)
        page.wait_for_selector("text=No worker is connected. Workers of a server join with")
        for text in ("The workers hold no tensors.", "No program is connected.", "The workers are idle."):
            assert page.locator(f"text={text}").first.is_visible()
        assert not page.locator("#failures").is_visible()


def test_a_lost_worker_and_a_failed_op_are_shown_first(serve):
    failure = FailureState(
        1,
        5.0,
        1,
        "aten.mm.default",
        ("float32[2, 3]",),
        "/x/train.py:7",
        "RuntimeError",
        "bad",
        "Traceback: here",
        (0, 1),
    )
    lost = LostWorker(1, 99, "has ended without a goodbye (killed, or crashed)", "aten.mm.default (train.py:7)")
    view = GivenView([WorkerState(0, "h", 8, "cpu", 0, "idle")], failures=FailuresState(1, (failure,), (lost,)))
    with browsing() as page:
        page.goto(serve(view).url)
        page.wait_for_selector("#workers .state.lost")
        assert "1 op failed, 1 worker lost" in text_of(page, "#failures h2")
        issued, failed = page.locator("#failure-list pre").all_inner_texts()
        assert 'File "/x/train.py", line 7' in issued and "aten.mm.default(float32[2, 3])" in issued
        assert failed == "Traceback: here"
        assert "Failed on workers 0, 1" in text_of(page, "#failures")


@pytest.mark.parametrize(("width", "height"), [(1366, 768), (1920, 1080)])
def test_sixty_four_workers_fit(serve, width, height):
    workers = [WorkerState(n, "h", n, "cuda", 80 << 30, "running", "aten.mm.default", "a.py:1") for n in range(64)]
    pairs = [PairTraffic(one, other, 1000) for one in range(64) for other in range(64) if one != other]
    with browsing(width, height) as page:
        page.goto(serve(GivenView(workers, traffic=pairs)).url)
        page.wait_for_function("document.querySelectorAll('#workers tbody tr').length == 64")
        page.wait_for_selector(".matrix rect")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_end_of_the_program_is_told():
    gt.init()
    with browsing(ignored="ERR_CONNECTION_REFUSED") as page:
        page.goto(gt.dashboard().url)
        page.wait_for_selector("#connection.live")
        gt.shutdown()
        page.wait_for_selector("#banner:has-text('The program has ended')")


PROGRAM = "import signal, sys, gt; gt.dashboard(int(sys.argv[1])); gt.ones(4).sum().item(); signal.pause()"
TOKEN = "a-token-that-both-programs-have"


def test_a_connection_that_is_lost_is_regained():
    with reserved_port() as port, browsing(ignored="ERR_") as page:

        def start_program():
            process = start("-c", PROGRAM, str(port), GT_DASHBOARD_TOKEN=TOKEN)
            wait_until(lambda: is_served(port), what="the dashboard")
            return process

        first = start_program()
        with running(first):
            page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
            page.wait_for_selector("#connection.live")
            first.send_signal(signal.SIGKILL)
            page.wait_for_selector("#banner:has-text('There is no connection')")
        with running(start_program()):
            page.wait_for_selector("#connection.live")
            assert not page.locator("#banner").is_visible()


def is_served(port):
    try:
        return ask(port, "/health").status == 200
    except OSError:
        return False
