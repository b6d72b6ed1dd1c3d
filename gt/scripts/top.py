"""`python -m gt.scripts.top`: what the workers of a running program or server do now, like htop."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console
from rich.live import Live

from gt.core.errors import SessionError
from gt.monitor.activity import Activity, ActivityMeter
from gt.monitor.attachment import RunningProgram, ask, find_program
from gt.monitor.monitor_protocol import StatusAnswer, StatusRequest
from gt.monitor.monitor_socket import SHORTEST_INTERVAL
from gt.monitor.top_view import SORT_KEYS, draw
from gt.scripts.command_line import positive_number, run_tool

LOOKS = 5  # looks in an interval
PATIENCE = 10.0  # seconds, after the interval, that a program may say nothing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.scripts.top", description="Watch the workers of a GT program.")
    parser.add_argument(
        "--interval", type=positive_number, default=0.5, help="seconds between two looks (default: 0.5)"
    )
    parser.add_argument("--once", action="store_true", help="look once, print and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    parser.add_argument("--pid", type=int, help="the program, if several run")
    parser.add_argument("--server", default="", help="a server of this machine, as localhost:12345")
    options = parser.parse_args()
    return run_tool("gt.scripts.top", lambda: _top(options))


def _top(options: argparse.Namespace) -> int:
    program = find_program(options.pid, options.server)
    if not options.once and not options.json:
        return _watch(program, options.interval)
    return _print(program, options.interval, once=options.once, as_json=options.json)


def _looks(program: RunningProgram, interval: float) -> Iterator[Activity]:
    """The activity of each interval, until the program ends. In each of them the program is looked at several times,
    for the mix of ops."""
    looks = max(1, min(LOOKS, int(interval / SHORTEST_INTERVAL)))
    meter = ActivityMeter(looks)
    for number, answer in enumerate(ask(program, StatusRequest(interval / looks), interval + PATIENCE)):
        assert isinstance(answer, StatusAnswer)
        activity = meter.add(answer.status)
        if number and not number % looks and not answer.is_last:  # the last one is none of a whole interval
            yield activity


def _print(program: RunningProgram, interval: float, *, once: bool, as_json: bool) -> int:
    """Print each look; once, or until Ctrl-C or the end of the program."""
    console = Console()
    with contextlib.nullcontext() if once else contextlib.suppress(KeyboardInterrupt):
        for activity in _looks(program, interval):
            if as_json:
                print(msgspec.json.encode(activity).decode(), flush=True)
            else:
                console.print(draw(activity, program.command, width=console.width))
            if once:
                return 0
    if once:
        raise SessionError(f"process {program.pid} has ended before it was looked at twice")
    return 0


def _watch(program: RunningProgram, interval: float) -> int:
    """Show tables until `q` or Ctrl-C is pressed, or the program ends."""
    sort_key, is_paused = "w", False
    with contextlib.suppress(KeyboardInterrupt), _single_keys() as keys, Live(screen=True, auto_refresh=False) as live:
        for activity in _looks(program, interval):
            for key in keys():
                if key == "q":
                    return 0
                is_paused = not is_paused if key == "p" else is_paused
                sort_key = key if key in SORT_KEYS else sort_key
            if not is_paused:
                shown = activity
            width, height = live.console.size
            view = draw(shown, program.command, sort_key, width=width, height=height, is_paused=is_paused)
            live.update(view, refresh=True)
    return 0


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[], str]]:
    """A function that gives the keys that were pressed, without waiting; none if there is no terminal."""
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> str:
        ready = select.select([terminal], [], [], 0)[0]
        return os.read(terminal, 64).decode(errors="ignore") if ready else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
