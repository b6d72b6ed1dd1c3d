"""`python -m gt.scripts.top`: what the workers of a running program or server do now, like htop."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.live import Live

from gt.core.errors import GTError
from gt.monitor.activity import ActivityMeter
from gt.monitor.attachment import RunningProgram, ask, find_program
from gt.monitor.monitor_protocol import StatusAnswer, StatusRequest
from gt.monitor.top_view import SORT_KEYS, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.scripts.top", description="Watch the workers of a GT program.")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two looks (default: 0.5)")
    parser.add_argument("--once", action="store_true", help="look once, print and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    parser.add_argument("--pid", type=int, help="the program, if several run")
    parser.add_argument("--server", default="", help="a server of this machine, as localhost:12345")
    options = parser.parse_args()
    if options.interval <= 0:
        parser.error("--interval must be positive")
    try:
        program = find_program(options.pid, options.server)
        if options.once or options.json:
            _print(program, options.interval, once=options.once, as_json=options.json)
        else:
            _watch(program, options.interval)
    except GTError as error:
        print(f"gt.scripts.top: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


def _print(program: RunningProgram, interval: float, *, once: bool, as_json: bool) -> None:
    """Print what is seen. The first look has no rates, so it is not shown."""
    meter, console = ActivityMeter(), Console()
    for number, answer in enumerate(ask(program, StatusRequest(interval))):
        assert isinstance(answer, StatusAnswer)
        activity = meter.add(answer.status)
        if not number:
            continue
        if as_json:
            print(msgspec.json.encode(activity).decode(), flush=True)
        else:
            console.print(draw(activity, program.command))
        if once:
            return


def _watch(program: RunningProgram, interval: float) -> None:
    """Show tables until `q` is pressed or the program ends."""
    meter, sort_key, is_paused = ActivityMeter(), "w", False
    with _single_keys() as keys, Live(screen=True, auto_refresh=False) as live:
        for answer in ask(program, StatusRequest(interval)):
            assert isinstance(answer, StatusAnswer)
            for key in keys():
                if key == "q":
                    return
                is_paused = not is_paused if key == "p" else is_paused
                sort_key = key if key in SORT_KEYS else sort_key
            activity = meter.add(answer.status)
            if not is_paused:
                shown = activity
            live.update(draw(shown, program.command, sort_key, is_paused=is_paused), refresh=True)


@contextmanager
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
