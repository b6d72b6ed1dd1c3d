"""`python -m gt.launch.slurm --nodes 4 --gpus-per-node 8 train.py`: runs a program as a batch job of SLURM.

The batch script asks for the nodes, and runs `gt.launch.slurm_job` on the first of them, which starts the server, the
workers (by srun) and the program. The program is one that also runs without SLURM: GT_SERVER tells it where its
workers are.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from gt.core.command_options import positive
from gt.core.errors import GTError, SettingsError
from gt.core.output_files import open_text
from gt.launch.commands import read_template

_NOT_HERE = (
    "there is no `sbatch` on this machine, which submits jobs to SLURM; run this on a login node of the cluster, or "
    "write the batch script with --script FILE and submit it there: sbatch FILE"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        script = write_script(options)
        if options.dry_run:
            sys.stdout.write(script)
            return 0
        if options.script is not None:
            return _save(script, options.script)
        _require_program(options)
        return _submit(script, is_waiting=options.wait)
    except GTError as error:
        print(f"gt.launch.slurm: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gt.launch.slurm",
        description="Run a program as a batch job of SLURM, on workers of all its nodes. Options of this command come "
        "before the program, its own arguments after it.",
    )
    parser.add_argument("--nodes", type=positive, default=1, help="how many nodes (default: 1)")
    parser.add_argument("--gpus-per-node", type=_gpus, metavar="[TYPE:]N", help="GPUs of each node, with a worker each")
    parser.add_argument("--workers-per-node", type=positive, metavar="N", help="default: one for each GPU, or one")
    parser.add_argument("--cpus-per-worker", type=positive, metavar="N", help="CPUs of each worker (default: SLURM's)")
    parser.add_argument(
        "--min-workers", type=positive, metavar="N", help="how many the program waits for (default: all)"
    )
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", default=300, help="of that wait (default: 300)")
    parser.add_argument("--job-name", help="default: the name of the program")
    for option in ("--time", "--partition", "--account", "--qos", "--mem", "--output"):
        parser.add_argument(option, help=f"passed on to sbatch: {option}")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="another one, e.g. --sbatch=--exclusive"
    )
    parser.add_argument(
        "--directory", help="where the keys of jobs are, which all nodes see (default: .gt/slurm in the home)"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter on the nodes (default: this one)")
    parser.add_argument("--wait", action="store_true", help="until the job has ended; exit with its exit code")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    parser.add_argument("--script", type=Path, metavar="FILE", help="write the batch script, and submit nothing")
    parser.add_argument("program", help="a Python file, or -m MODULE after --")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    return parser


def _gpus(text: str) -> str:
    if not re.fullmatch("([A-Za-z0-9_.-]+:)?[0-9]{1,4}", text) or not gpu_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; for example 8, or a100:8")
    return text


def gpu_count(text: str) -> int:
    """The number in `--gpus-per-node`, which may name a type: `a100:8`."""
    return int(text.rpartition(":")[2])


def write_script(options: argparse.Namespace) -> str:
    """The batch script. It holds no secret: the job makes its keys when it starts."""
    workers = options.workers_per_node or (gpu_count(options.gpus_per_node) if options.gpus_per_node else 1)
    asked = {
        "--job-name": options.job_name or f"gt-{Path(_name_of(options)).stem}",
        "--nodes": options.nodes,
        "--ntasks-per-node": workers,
        "--gpus-per-node": options.gpus_per_node,
        "--cpus-per-task": options.cpus_per_worker,
        **{name: getattr(options, name[2:]) for name in ("--time", "--partition", "--account", "--qos", "--mem")},
        "--output": options.output,
    }
    lines = [f"{name}={_word(str(value))}" for name, value in asked.items() if value is not None]
    lines += [_checked_option(option) for option in options.sbatch]
    job = [options.python, "-P", "-m", "gt.launch.slurm_job", f"--workers-per-node={workers}"]
    job += [f"--min-workers={options.min_workers or workers * options.nodes}", f"--timeout={options.timeout}"]
    job += [f"--directory={options.directory}"] if options.directory else []
    command = shlex.join([*job, "--", options.program, *options.arguments])
    return Template(read_template("slurm.sh")).substitute(
        options="\n".join(f"#SBATCH {line}" for line in lines), job=command
    )


def _name_of(options: argparse.Namespace) -> str:
    is_module = options.program == "-m" and options.arguments
    return str(options.arguments[0]) if is_module else str(options.program)


def _require_program(options: argparse.Namespace) -> None:
    """Jobs begin in the directory in which they are submitted."""
    if options.program != "-m" and not Path(options.program).is_file():
        raise SettingsError(f"there is no program {options.program!r} in {Path.cwd()}, where the job would run it")


def _word(text: str) -> str:
    """A value in a line of options, which sbatch splits like a shell."""
    if "\n" in text:
        raise SettingsError(f"{text!r} has a line break, which an option of sbatch cannot have")
    return shlex.quote(text)


def _checked_option(text: str) -> str:
    if not text.startswith("-") or "\n" in text:
        raise SettingsError(f"--sbatch={text!r} is no option of sbatch; write, for example, --sbatch=--exclusive")
    return text


def _save(script: str, path: Path) -> int:
    try:
        with open_text(path) as file:
            file.write(script)
    except OSError as error:
        raise SettingsError(f"the batch script cannot be written: {error}; give another file with --script") from None
    print(path)
    print(f"submit it with: sbatch {path}", file=sys.stderr)
    return 0


def _submit(script: str, *, is_waiting: bool) -> int:
    """Submit a batch script; prints the id of the job. With `is_waiting` the exit code is that of the job."""
    if shutil.which("sbatch") is None:
        raise SettingsError(_NOT_HERE)
    command = ["sbatch", "--parsable", *(["--wait"] if is_waiting else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sbatch:
        assert sbatch.stdin is not None and sbatch.stdout is not None
        sbatch.stdin.write(script)
        sbatch.stdin.close()
        job = sbatch.stdout.readline().partition(";")[0].strip()  # the name of the cluster may follow
        if job:
            print(job, flush=True)
            print(f"job {job} is submitted; see `squeue -j {job}`, and end it with: scancel {job}", file=sys.stderr)
        code = sbatch.wait()
    if not job:
        raise SettingsError("sbatch has refused the job, and says why above; --dry-run prints the batch script")
    if is_waiting:
        print(f"job {job} has ended with exit code {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
