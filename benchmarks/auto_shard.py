"""The table of docs/autoshard.md: plans of `gt.auto_shard` for small models against plans of people, by the model of
costs, and the bytes that virtual workers count.

    python -m benchmarks.auto_shard [--models gpt2 llama] [--workers 4 8] [--out table.md]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import gt
from gt.signals.registry import registry
from tests.auto_shard_models import gt_step, handwritten

MESHES = {4: "2x2", 8: "2x4"}
PEOPLE = ("data parallel", "megatron", "fsdp", "2-d")
STEPS = 3


def count_bytes(name: str, workers: int, file: Path) -> int:
    """The bytes that virtual workers exchange in a step of the plan in a file."""
    registry.clear()
    gt.init(workers=workers, mode="virtual")
    gt.load_config(file)
    training = gt_step(name)
    for _ in range(STEPS):
        with gt.debug.comm() as c:
            training.step(*training.args)
    gt.shutdown()
    registry.clear()
    return c.bytes


def row(name: str, workers: int) -> str:
    gt.init(workers=workers, mode="shapes")
    training = gt_step(name)
    start = time.process_time()  # other programs may run
    plan = gt.auto_shard(training.step, *training.args, mesh=MESHES[workers], machine=gt.Calibration())
    seconds = time.process_time() - start
    costs = {person: plan.evaluate(config).seconds for person, config in handwritten(name, plan.mesh).items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.yaml")
        plan.to_yaml(file)
        gt.shutdown()
        counted = count_bytes(name, workers, file)
    times = " | ".join(f"{cost * 1e3:.2f}" for cost in (plan.cost, *[costs[person] for person in PEOPLE]))
    return f"| {name} | {MESHES[workers]} | {times} | {plan.gap:.2%} | {plan.bytes:,} | {counted:,} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt2", "llama", "mixtral"])
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    heads = ["model", "mesh", "plan, ms", *[f"{person}, ms" for person in PEOPLE], "gap", "predicted bytes"]
    lines = [f"| {' | '.join([*heads, 'counted bytes', 'planned in, CPU s'])} |", "|" + "---|" * (len(heads) + 2)]
    print("\n".join(lines), flush=True)
    for name in options.models:
        for workers in options.workers:
            lines.append(row(name, workers))
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
