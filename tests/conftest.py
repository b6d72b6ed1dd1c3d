"""Sessions for tests, and the checks that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.client.session import Session
from gt.signals.registry import registry
from tests import faults
from tests.browser import missing_browser
from tests.subprocesses import serving

os.environ.setdefault("GT_CHECK_GEOMETRY", "1")  # of every result, in every process that a test starts

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("steady", deadline=None)  # how long an example takes says nothing here
hypothesis.settings.load_profile("steady")

# Tensors of tests are small: threads of one kernel wait for each other longer than they compute, the more so where two
# processes run tests. Worker processes choose their own number.
torch.set_num_threads(1)

gt.init()
(gt.ones(2, requires_grad=True) + 1).sum().backward()
torch.optim.SGD([gt.ones(2, requires_grad=True)])  # imports dynamo and sympy, which are large
gt.shutdown()
gc.collect()
gc.freeze()  # torch's own objects need not be walked by the collection after each test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-faults", action="store_true", help="write the table of faults in docs/reliability.md")


# Files that take more than twenty seconds run first: with `--dist loadfile` one of them would else be the last, and
# all but one process would wait for it.
LONG_FILES = (
    "test_shape_rules.py",
    "test_conformance.py",
    "test_forward_ad.py",
    "test_server_connection.py",
    "test_docs.py",
    "test_docstrings.py",
    "test_examples.py",
    "test_connections.py",
    "test_fuzz.py",
    "test_segment_compiler.py",
    "compilation/test_inductor_private.py",
    "test_trace.py",
    "test_segments.py",
    "test_site.py",
    "test_notebooks.py",
    "test_page.py",
    "test_auto_shard.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not str(item.path).endswith(LONG_FILES))
    missing = missing_browser() if any(item.get_closest_marker("browser") for item in items) else ""
    for item in items:
        if "fault" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.fault)
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=missing))


_tried: dict[str, str] = {}


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Notes a fault that the test has tried, and what happened: an error, or words. It must be what the docs say."""

    def note(tried: str, happened: object) -> None:
        _tried[tried] = faults.outcome_of(happened)
        if not request.config.getoption("--write-faults"):
            told = faults.read_table(faults.DOCUMENT.read_text()).get(tried)
            assert told == _tried[tried], "docs/reliability.md says otherwise; `make faults` writes its table again"

    return note


_not_tried: list[str] = []  # tests that were skipped, have failed or were left out


def pytest_deselected(items: list[pytest.Item]) -> None:
    _not_tried.extend(item.nodeid for item in items if "fault" in getattr(item, "fixturenames", ()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed and "fault" in report.keywords:
        _not_tried.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the faults that were tried. If some were not, their rows stay as they were."""
    if session.config.getoption("--write-faults"):
        document = faults.DOCUMENT.read_text()
        kept = faults.read_table(document) if _not_tried else {}
        faults.DOCUMENT.write_text(faults.with_table(document, kept | _tried))


MODES = {
    "embedded": {},
    "virtual": {"workers": 3, "mode": "virtual"},
    "processes": {"workers": 2},
}


@pytest.fixture(params=["embedded", "virtual"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[str]:
    """A test that must give the same result on one worker and on several."""
    gt.init(**MODES[request.param])
    yield request.param
    gt.shutdown()


@pytest.fixture
def embedded() -> Iterator[None]:
    gt.init()
    yield
    gt.shutdown()


@pytest.fixture(scope="session")
def server_of_two() -> Iterator[int]:
    """The port of a server with two workers, for all modules; starting them costs seconds."""
    with serving(2) as port:
        yield port


@pytest.fixture(scope="module", params=["local", "by hand"])
def two_processes(request: pytest.FixtureRequest) -> Iterator[str]:
    """Two worker processes for all tests of a module, with the dispatcher in this process or in one of its own."""
    if request.param == "local":
        gt.init(workers=2)
    else:
        gt.connect(f"localhost:{request.getfixturevalue('server_of_two')}")
    yield request.param
    gt.shutdown()


@pytest.fixture(scope="module")
def eight_workers() -> Iterator[None]:
    """Eight virtual workers for all tests of a module."""
    gt.init(workers=8, mode="virtual")
    yield
    gt.shutdown()


@pytest.fixture
def four_workers() -> Iterator[None]:
    """Four virtual workers."""
    gt.init(workers=4, mode="virtual")
    yield
    gt.shutdown()


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """This process, and those that it starts, may use one CPU only."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity of processes")
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield
    os.sched_setaffinity(0, usable)


@pytest.fixture
def no_signals() -> Iterator[None]:
    """No signal is configured when the test begins, nor after it."""
    registry.clear()
    yield
    registry.clear()


SHARED = {
    "two_processes",
    "eight_workers",
    "shared_board",
    "mesh_of_two",
}  # fixtures of a module, whose session outlives a test


@pytest.fixture(autouse=True, scope="session")
def server_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A directory for the keys of servers that tests start, and kill. pytest removes it some runs later, also if this
    run is killed."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GT_KEYS", str(tmp_path_factory.mktemp("keys")))
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, processes, shared memory and handles that a test made are gone when it ends."""
    shared = SHARED.intersection(request.fixturenames)
    opened, before = len(_opened), _leftovers()
    yield
    if len(_opened) > opened:
        gc.collect()  # tensors and sessions end now, and not in the middle of another test
    if not shared:
        is_running = active_session.active is not None
        gt.shutdown()  # else every test after this one would fail
        assert not is_running, "the test did not call gt.shutdown()"
        after = _leftovers()
        assert after <= before, f"left behind: {after - before}"


_opened: list[None] = []
_activate = active_session.activate


def _count_and_activate(session: Session | None) -> None:
    _opened.append(None)
    _activate(session)


active_session.activate = _count_and_activate


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What modules have loaded need not be walked by the collections after their tests."""
    gc.collect()
    gc.freeze()


def _leftovers() -> set[str]:
    threads = {f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("gt-")}
    commands = [(process, _command(process)) for process in _descendants(psutil.Process())]
    children = {f"process {process.pid} {command}" for process, command in commands if _is_of_gt(process, command)}
    directory = Path("/dev/shm")
    buffers = (
        {f"shared buffer {path.name}" for path in directory.glob(f"gt-{os.getpid()}-*")}
        if directory.is_dir()
        else set()
    )
    return threads | children | buffers


LISTS_CHILDREN = any(Path("/proc/self/task").glob("*/children"))


def _descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    """All processes below one. Linux keeps lists of children; psutil reads the parents of all processes of the machine,
    which takes 2 ms, twice for each test."""
    if not LISTS_CHILDREN:
        yield from process.children(recursive=True)
        return
    for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
            for pid in path.read_text().split():
                child = psutil.Process(int(pid))
                yield child
                yield from _descendants(child)


def _command(process: psutil.Process) -> str:
    """The command of a process; "" if it has ended, and its parent has not asked for its status yet."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline()[:4])
    return ""


def _is_of_gt(process: psutil.Process, command: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "gt." in command or ("tests.program_server" in command and process.ppid() != os.getpid())
    return False
