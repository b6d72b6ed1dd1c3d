"""`python -m gt.worker.compilation DIRECTORY`: the compile server of the workers of a host, which start it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from gt.worker.compilation.compile_server import run_server


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.worker.compilation", description=__doc__)
    parser.add_argument("directory", type=Path, help="a private directory")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a unit")
    parser.add_argument("--nice", type=int, default=19, help="added to the niceness of this process")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run_server(options.directory, options.limit, options.nice)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
