"""A slow training program that becomes faster in steps: the figures of docs/tuning.md.

    python -m benchmarks.tuning [--rounds 3] [--steps 10] [--write | --draw]

The model is GPT-2 of `transformers` with random weights, on two worker processes. Each stage is the one before it
with one thing done better, and runs in a process of its own, in turns. `--write` puts the table into the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import gt
from benchmarks.comparison.machine import describe_machine
from benchmarks.comparison.tables import replace_between_markers
from gt.scripts.visualize import draw_log

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tuning.md"
PLANS = ROOT / "examples" / "signals"
VOCABULARY, BATCH, LONGEST, PADDED_TO, BINS, SMOOTHING, RATE = 1000, 4, 64, 16, 32, 0.1, 1e-3
WARM_UP, LOG_EVERY = 12, 10
NO_LABEL = -100
PICTURE_INCHES = 5.0  # high


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=256, vocab_size=VOCABULARY, n_positions=LONGEST, loss_type="ForCausalLM",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and the labels that they should predict, of another length in each step."""
    length = LONGEST - 7 * number % 29
    tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def pad(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The batch with columns that do not count, so that all batches have one of a few lengths."""
    columns = -tokens.shape[1] % PADDED_TO
    return functional.pad(tokens, (0, columns)), functional.pad(labels, (0, columns), value=NO_LABEL)


def keep_length(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, labels


Loss = Callable[[Tensor, Tensor], Tensor]


def smooth_targets(labels: Tensor) -> Tensor:
    """The targets as the program makes them: a float for each token and word, which are sent in each step."""
    return gt.to(functional.one_hot(labels, VOCABULARY) * (1 - SMOOTHING) + SMOOTHING / VOCABULARY)


def loss_row_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    pairs = zip(logits, smooth_targets(labels), strict=True)
    return torch.stack([-(goal * row.log_softmax(-1)).sum(-1).mean() for row, goal in pairs]).mean()


def loss_of_uploaded_targets(logits: Tensor, labels: Tensor) -> Tensor:
    return -(smooth_targets(labels) * logits.log_softmax(-1)).sum(-1).mean()


def loss_at_once(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING)


class AdamByHand:
    """Adam as in the paper, one parameter after the other."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._means = [torch.zeros_like(each) for each in self._parameters]
        self._squares = [torch.zeros_like(each) for each in self._parameters]
        self._count = 0

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self._count += 1
        for parameter, mean, square in zip(self._parameters, self._means, self._squares, strict=True):
            gradient = parameter.grad
            mean.copy_(0.9 * mean + 0.1 * gradient)
            square.copy_(0.999 * square + 0.001 * gradient * gradient)
            unbiased = mean / (1 - 0.9**self._count)
            scale = (square / (1 - 0.999**self._count)).sqrt() + 1e-8
            parameter.copy_(parameter - RATE * unbiased / scale)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=RATE)


Log = Callable[[int, Tensor, Tensor, torch.nn.Module], None]


def log_histogram_and_norms(number: int, loss: Tensor, logits: Tensor, model: torch.nn.Module) -> None:
    torch.histc(logits.detach(), BINS).tolist()
    log_norms(number, loss, logits, model)


def log_norms(number: int, loss: Tensor, logits: Tensor, model: torch.nn.Module) -> None:
    """A read for each parameter, and one for the loss."""
    for parameter in model.parameters():
        parameter.grad.norm().item()
    loss.item()


def log_sometimes(number: int, loss: Tensor, logits: Tensor, model: torch.nn.Module) -> None:
    """One read of everything, in every tenth step."""
    if number % LOG_EVERY == 0:
        norms = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        torch.stack([loss.detach(), norms]).tolist()


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program; the defaults are the slow one."""

    plan: str = "gpt2_fsdp.yaml"
    log: Log = log_histogram_and_norms
    loss: Loss = loss_row_by_row
    optimizer: Callable[[Iterable[Tensor]], AdamByHand | torch.optim.Adam] = AdamByHand
    lengths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keep_length
    compiler: Callable[[Callable[..., object]], Callable[..., object]] = lambda step: step


def stages() -> dict[str, Program]:
    """By title; each differs from the one before in one thing."""
    programs = {"as it was written": Program()}
    for title, change in (
        ("1. no op that gathers", {"log": log_norms}),
        ("2. reads in every tenth step", {"log": log_sometimes}),
        ("3. torch's optimizer", {"optimizer": adam}),
        ("4. whole weights, cut batch", {"plan": "gpt2_data_parallel.yaml"}),
        ("5. no loop over rows", {"loss": loss_of_uploaded_targets}),
        ("6. no upload of targets", {"loss": loss_at_once}),
        ("7. two lengths, padded", {"lengths": pad}),
        ("8. gt.compile", {"compiler": gt.compile}),
    ):
        programs[title] = dataclasses.replace(list(programs.values())[-1], **change)
    return programs


class Training:
    """The steps of a program."""

    def __init__(self, program: Program, model: torch.nn.Module) -> None:
        self._program, self._model, self._number = program, model, 0
        self._optimizer = program.optimizer(model.parameters())
        self._step = program.compiler(self._compute)

    def _compute(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self._optimizer.zero_grad()
        logits = self._model(input_ids=tokens).logits
        loss = self._program.loss(logits, labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach(), logits.detach()

    def run(self, steps: int) -> None:
        """All work of the steps is done when this returns."""
        numbers = range(self._number, self._number + steps)
        self._number += steps
        batches = (self._program.lengths(*make_batch(number)) for number in numbers)
        for number, (tokens, labels) in zip(numbers, batches, strict=True):
            loss, logits = self._step(tokens, labels)
            self._program.log(number, loss, logits, self._model)
        gt.synchronize()


def measure(program: Program, steps: int) -> dict[str, float]:
    """The figures of one stage, on workers of its own."""
    training = start(program)
    cpu, clock = cpu_seconds(), time.perf_counter()
    training.run(steps)
    found = {"ms": (time.perf_counter() - clock) / steps * 1e3, "cpu": (cpu_seconds() - cpu) / steps * 1e3}
    found |= look_inside(training)
    gt.shutdown()
    return found


def start(program: Program) -> Training:
    """A training whose weights are where they belong, on two worker processes."""
    gt.init(workers=2)
    gt.load_config(PLANS / program.plan)
    training = Training(program, gt.to(make_model()))
    training.run(WARM_UP)
    return training


def cpu_seconds() -> float:
    """CPU time of this process and of the processes that it started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def look_inside(training: Training) -> dict[str, float]:
    """What the tools tell of as many steps as are between two lines of the log."""
    with gt.debug.comm() as moved, gt.debug.timeline() as t:
        training.run(LOG_EVERY)
    commands = [event for event in t.events if event.worker == 0 and event.op not in ("define", "free")]
    return {
        "MB": moved.bytes / LOG_EVERY / 1e6,
        "exchanges": len(moved.events) / LOG_EVERY,
        "ops": len(commands) / LOG_EVERY,
        "reads": sum(event.op == "fetch" for event in commands) / LOG_EVERY,
        "busy": 100 * t.busy(0) / t.span,
    }


def draw(title: str, picture: Path) -> None:
    """A picture of one step of a stage."""
    training = start(stages()[title])
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "step.log"
        with gt.debug.trace(log):
            training.run(1)
        gt.shutdown()
        draw_log(log, picture, height=PICTURE_INCHES)


PICTURES = {"as it was written": "before.png", "8. gt.compile": "after.png"}


def in_a_process(title: str, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.tuning", "--stage", title, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{title!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS = {
    "ms": "ms a step", "cpu": "ms of CPU", "gain": "gain", "MB": "MB moved", "exchanges": "exchanges",
    "ops": "commands", "reads": "reads", "busy": "% computing",
}  # fmt: skip


def table(figures: dict[str, dict[str, float]]) -> str:
    """A row for each stage; the gain is the CPU time of the stage before, divided by its own: other programs of the
    machine disturb it less than the time by the clock."""
    lines = [f"| stage | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    before = None
    for title, found in figures.items():
        if before:
            found = found | {"gain": before / found["cpu"]}
        before = found["cpu"]
        lines.append(f"| {' | '.join([title, *[shown(name, found.get(name)) for name in COLUMNS]])} |")
    return "\n".join(lines)


def shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if name == "gain" else f"{value:.1f}" if name in ("MB", "reads") else f"{value:,.0f}"


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The shortest times of all rounds, since other programs only make them longer, and medians of the rest."""
    return {
        name: (min if name in ("ms", "cpu") else statistics.median)(each[name] for each in rounds) for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stage", help="measure one stage only, and print its figures as JSON")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tuning.md")
    parser.add_argument("--draw", action="store_true", help="only draw the first stage and the last one")
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(measure(stages()[arguments.stage], arguments.steps)))
        return
    if arguments.draw:
        for title, name in PICTURES.items():
            draw(title, PAGE.with_name("tuning") / name)
        return
    measure_rounds(arguments.rounds, arguments.steps, report=write_table if arguments.write else print)


def measure_rounds(rounds: int, steps: int, report: Callable[[str], object]) -> None:
    """Runs every stage once in each round, and reports a table of all rounds so far after each of them."""
    machine = describe_machine()
    found: dict[str, list[dict[str, float]]] = {title: [] for title in stages()}
    for number in range(rounds):
        for title, figures in found.items():
            figures.append(in_a_process(title, steps))
            print(f"round {number + 1}, {title}: {figures[-1]['ms']:.0f} ms a step", file=sys.stderr, flush=True)
        rows = table({title: best(figures) for title, figures in found.items()})
        report(f"{rows}\n\nMeasured with torch {torch.__version__}, gt {gt.__version__}; {machine}.")


def write_table(text: str) -> None:
    PAGE.write_text(replace_between_markers(PAGE.read_text(), "stages", text))


if __name__ == "__main__":
    main()
