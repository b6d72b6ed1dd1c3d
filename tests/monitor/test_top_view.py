"""The tables of `gt.scripts.top` on screens of all sizes."""

import pytest
from rich.console import Console

from gt.core.program_view import ProgramStatus, SessionState, WorkerState
from gt.monitor.activity import ActivityMeter
from gt.monitor.top_view import draw

SECOND = 1_000_000_000


def shown(width, height=None, workers=2, refused=None, **state):
    """The lines of a screen of two looks, a second apart."""
    meter = ActivityMeter()
    for at in (1, 2):
        each = {"state": "running", "op": "aten.mm.default", "site": "/home/me/project/train.py:12", "ops": 500 * at}
        states = [WorkerState(n, "here", 8, "cpu", 10**10, **{**each, **state}) for n in range(workers)]
        sessions = (SessionState(1, "here", 7, 3, 4096, 0, 1),)
        activity = meter.add(ProgramStatus(at * SECOND, 7, tuple(states), sessions, refused or {}))
    console = Console(width=width, height=height or 100, no_color=True)
    with console.capture() as capture:
        console.print(draw(activity, "python train.py", width=width, height=height))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 40, 80, 120, 200])
def test_every_width_has_room_for_the_worker_its_state_and_its_line(width):
    lines = shown(width)
    assert max(map(len, lines)) <= width
    (row,) = [line for line in lines if line.lstrip().startswith("0 cpu")]
    assert "running" in row and ("train.py:12" in row or width < 40)
    assert ("mm.default" in row, "500" in row) == (width >= 80,) * 2


@pytest.mark.parametrize("height", [20, 30, 50])
def test_a_screen_has_room_for_some_of_many_workers(height):
    lines = shown(100, height, workers=200)
    assert len(lines) <= height
    assert any(line.startswith(f"and {200 - (height - 13)} more: ") and "running" in line for line in lines)
    assert lines[-1].startswith("q quit") and any("lines: train.py:12 100%" in line for line in lines)
    assert len(shown(100, None, workers=200)) > 200


def test_names_of_the_program_are_no_markup():
    text = "\n".join(shown(200, op="my.[bold]op[/]", site="[red].py:1", waits_for=(1,), state="exchanging"))
    assert "my.[bold]op[/]" in text and "[red].py:1" in text and "waits for 1" in text


def test_refusals_of_a_server_have_a_line():
    lines = shown(80, 30, workers=200, refused={"key": 3, "frame": 1200})
    assert "refused  frame 1,200  key 3" in lines and len(lines) <= 30
    assert not any("refused" in line for line in shown(80))
