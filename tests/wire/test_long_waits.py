"""Long waits are told of, short ones cost nothing; those who wait say for whom and how far."""

import time

import pytest
import torch

import gt
from gt.core.errors import ServerLost
from gt.launch import hosted_dispatcher_channel
from gt.wire import long_waits
from gt.wire.long_waits import REFRESH_SECONDS, SHOW_AFTER_SECONDS, LongWait, told_in_background
from gt.wire.socket_channel import SocketChannel
from tests.subprocesses import reserved_port


class Shown:
    """A display that keeps what it was told."""

    def __init__(self):
        self.texts = []

    def show(self, text):
        self.texts.append(text)

    def clear(self):
        self.texts.append("cleared")


@pytest.fixture
def shown():
    return Shown()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(long_waits, "SHOW_AFTER_SECONDS", 0.0)


def test_a_short_wait_shows_nothing(shown):
    clock = iter([0.0, SHOW_AFTER_SECONDS / 2])
    with LongWait(shown, lambda: next(clock)) as wait:
        wait.tell(lambda: pytest.fail("nobody asks for a text"))
    assert shown.texts == []


def test_a_long_wait_shows_its_time_and_is_cleared_even_by_an_error(shown):
    times = [0.0, SHOW_AFTER_SECONDS, SHOW_AFTER_SECONDS + REFRESH_SECONDS / 2, SHOW_AFTER_SECONDS + 3]
    clock = iter(times)
    with pytest.raises(KeyboardInterrupt), LongWait(shown, lambda: next(clock)) as wait:
        for number in range(3):
            wait.tell(lambda: f"waiting, turn {number}")
        raise KeyboardInterrupt
    assert shown.texts == ["gt: waiting, turn 0 (2 s)", "gt: waiting, turn 2 (5 s)", "cleared"]


def test_work_without_a_loop_is_told_of_by_a_thread(shown, at_once):
    with told_in_background(shown, lambda: "uploading 1 GB"):
        deadline = time.monotonic() + 30
        while not shown.texts and time.monotonic() < deadline:
            time.sleep(0.01)
    assert shown.texts[0].startswith("gt: uploading 1 GB (") and shown.texts[-1] == "cleared"


def test_a_client_without_a_server_says_how_to_start_one(shown, at_once, tmp_path):
    with reserved_port() as port:
        channel = SocketChannel(f"tcp://127.0.0.1:{port}", None, tmp_path, 1.0)
        with pytest.raises(ServerLost):
            channel.greet(1, 0.5, shown)
        channel.close()
    assert "no server of this user answers at" in shown.texts[0] and shown.texts[-1] == "cleared"


def test_without_a_display_the_wait_for_a_server_is_logged_once(at_once, tmp_path, caplog):
    with reserved_port() as port:
        channel = SocketChannel(f"tcp://127.0.0.1:{port}", None, tmp_path, 1.0)
        with pytest.raises(ServerLost):
            channel.greet(1, 0.6, None)
        channel.close()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("waiting: no server of this user answers at")


def test_starts_reads_and_models_are_told_of(shown, at_once, monkeypatch):
    monkeypatch.setattr(hosted_dispatcher_channel, "open_display", lambda is_wanted: shown)
    monkeypatch.setattr(long_waits, "REFRESH_SECONDS", 0.0)
    gt.init(workers=2)
    model = gt.to(torch.nn.Linear(8, 4))
    torch.testing.assert_close(model(gt.ones(2, 8)).shape, torch.Size([2, 4]))
    gt.synchronize()
    gt.shutdown()
    assert shown.texts[0].startswith("gt: starting workers: 0 of 2 are ready (")
    moved = [text for text in shown.texts if "moving a model" in text]
    assert moved[-1].startswith("gt: moving a model: 2 of 2 tensors, 144 B of 144 B (")
    assert shown.texts.count("cleared") >= 2
