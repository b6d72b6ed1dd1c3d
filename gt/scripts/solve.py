"""`python -m gt.scripts.solve script.py --mesh 2x4 --out plan.yaml`: plans the layouts of a program without running it.

The script defines `step`, a function of one step, and may define `example_args`, a tuple of its arguments. It is run
with GT in the mode "shapes", in which nothing is computed, so a model that fits nowhere is planned too.
"""

from __future__ import annotations

import argparse
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import gt
from gt.core.errors import GTError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.scripts.solve", description="Plan the layouts of a program.")
    parser.add_argument("script", type=Path, help="defines step() and, if that takes arguments, example_args")
    parser.add_argument("--mesh", default="", help="such as 2x4; without it, all grids over --workers are compared")
    parser.add_argument("--workers", type=int, default=0, help="workers to plan for (default: those of the mesh, or 8)")
    parser.add_argument("--memory", default=None, help="of a worker, such as 16GiB")
    parser.add_argument("--constraints", type=Path, help="a signals file whose layouts are fixed")
    parser.add_argument("--method", default="auto", choices=("auto", "exact", "fast"))
    parser.add_argument("--out", type=Path, help="the signals file to write (default: standard output)")
    options = parser.parse_args()
    try:
        workers = options.workers or (math.prod(map(int, options.mesh.split("x"))) if options.mesh else 8)
    except ValueError:
        parser.error(f"--mesh {options.mesh} is no shape such as 2x4")
    if options.out is not None and not options.out.parent.is_dir():  # before planning, which takes long
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    try:
        plan = solve(options, workers)
    except GTError as error:
        print(f"gt.scripts.solve: {error}", file=sys.stderr)
        return 1
    print(plan, file=sys.stderr)
    text = plan.to_yaml(options.out)
    if options.out is None:
        print(text, end="")
    return 0


def solve(options: argparse.Namespace, workers: int) -> Any:
    """The plan of a script."""
    if not options.script.is_file():
        raise gt.SessionError(f"{options.script} is no file; give the path of a script that defines step()")
    gt.init(workers=workers, mode="shapes")
    names = runpy.run_path(str(options.script), run_name="__solve__")
    step = names.get("step")
    if not callable(step):
        raise gt.SessionError(f"{options.script} defines no function step(); name the function of one step so")
    args = names.get("example_args", ())
    if not isinstance(args, tuple | list):
        raise gt.SessionError(
            f"example_args of {options.script} is a {type(args).__name__}; make it a tuple of the arguments of step()"
        )
    return gt.auto_shard(
        step,
        *args,
        mesh=options.mesh or None,
        memory=options.memory,
        constraints=options.constraints,
        method=options.method,
        progress=None if sys.stderr.isatty() else lambda line: print(f"gt: {line}", file=sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
