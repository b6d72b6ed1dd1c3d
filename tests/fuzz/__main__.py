"""`python -m tests.fuzz --seconds 600`: random programs until the time is over; exit code 1 if one differs."""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
import warnings
from collections.abc import Sequence

import torch

from tests.fuzz.compare import close, difference
from tests.fuzz.programs import draw_program
from tests.fuzz.shrink import shrink


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (60)")
    parser.add_argument("--seed", type=int, help="the seed of the first program; each next one has the next number")
    parser.add_argument("--count", type=int, help="at most so many programs")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"the first seed is {seed}", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # torch warns of some calls that nobody would write
    failed, ran, deadline = 0, 0, time.monotonic() + options.seconds
    while time.monotonic() < deadline and ran != options.count:
        failed += _try(seed + ran)
        ran += 1
    close()
    print(f"{ran} programs from seed {seed}: {failed} differ")
    return 1 if failed else 0


def _try(seed: int) -> bool:
    text = failure(seed)
    if text:
        print(text, flush=True)
    return bool(text)


def failure(seed: int) -> str:
    """What is wrong with the program of a seed, with the smallest program that shows it, or an empty string."""
    program = draw_program(seed)
    found = difference(program)
    if not found:
        return ""
    small = shrink(program, lambda candidate: bool(difference(candidate)))
    again = difference(small) or found
    return f"python -m tests.fuzz --seed {seed} --count 1\n{found}\n{small}\n{again}\n"


if __name__ == "__main__":
    sys.exit(main())
