"""What a user reads when something failed far away: their line first, then the op, then the worker's side."""

from __future__ import annotations

import linecache

from gt.core.messages import Failure, Lost


def describe_failure(failure: Failure, place: tuple[str, int, str]) -> str:
    file, line, function = place
    source = linecache.getline(file, line).strip()
    lines = [
        f"{failure.kind}: {failure.message}",
        f'  issued at: File "{file}", line {line}, in {function or "<module>"}',
        *([f"    {source}"] if source else []),
        f"  op: {failure.op}({', '.join(failure.inputs)}) on worker {failure.worker}",
        "  worker's traceback:",
        *[f"    {text}" for text in failure.traceback.rstrip().splitlines()],
    ]
    return "\n".join(lines)


def describe_loss(lost: Lost, how_it_ended: str) -> str:
    ending = how_it_ended or lost.reason
    last = f"its last op was {lost.last_op}" if lost.last_op else "it had not run an op"
    return (
        f"worker {lost.worker} (pid {lost.pid}) {ending}; {last}. The tensors it held are lost; those of other workers "
        f"can still be read. Start again with gt.shutdown() and gt.init()."
    )
