"""Draws the pictures of `docs/concepts`, which `concepts.md` shows: `python docs/draw_concepts.py`.

Each picture has a ground of its own, which follows the reader's light or dark setting, so that it reads well on pages
of both kinds. A worker has the same colour in all pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

PICTURES = Path(__file__).with_name("concepts")
WIDTH = 760
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
WORKER_COLORS = ("#8cc4ff", "#8fdc9f", "#ffc480", "#d3b3ff")
PLAIN, ORANGE = "#e3e6ea", "#ff9d5c"  # what is not a worker's; an exchange, as in pictures of runs
STYLE = """
.ground { fill: #f6f8fa; stroke: #d0d7de }
.dark { fill: #1f2328 } .ink { fill: #1f2328 } .pale { fill: #57606a }
.line { stroke: #57606a; fill: none } .tip { fill: #57606a }
@media (prefers-color-scheme: dark) {
  .ground { fill: #22272e; stroke: #444c56 }
  .ink { fill: #e6edf3 } .pale { fill: #a5b0bc } .line { stroke: #a5b0bc } .tip { fill: #a5b0bc }
}
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="tip" d="M 0 0 L 10 5 L 0 10 z"/></marker></defs>'
)


class Canvas:
    """A picture that is being drawn."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def write(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: int = 13,
        look: str = "ink",
        at: str = "middle",
        mono: bool = False,
    ) -> None:
        family = f' font-family="{MONO}"' if mono else ""
        look_and_place = f'font-size="{size}" class="{look}" text-anchor="{at}"{family} xml:space="preserve"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" {look_and_place}>{escape(content)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str = "", **looks: object) -> None:
        """A filled box; its label is dark in both settings, as fills are light."""
        dashed = ' stroke-dasharray="5 3"' if looks.get("dashed") else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="#57606a" stroke-width="1"{dashed}/>'
        )
        if label:
            family = f' font-family="{MONO}"' if looks.get("mono") else ""
            self._parts.append(
                f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" font-size="{looks.get("size", 12)}" '
                f'fill="#1f2328" text-anchor="middle"{family}>{escape(label)}</text>'
            )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line class="line" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="1.4" '
            f'marker-end="url(#tip)"{dashes}/>'
        )

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" font-family="{FONT}">'
        ground = f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self._height - 1}" rx="10"/>'
        title = f"<title>{escape(self._title)}</title>"
        return "\n".join([head, title, f"<style>{STYLE}</style>", TIP, ground, *self._parts, "</svg>"]) + "\n"


def rows(canvas: Canvas, x: float, y: float, width: float, owners: list[int | None], row: float = 16) -> None:
    """A matrix of which each row has the colour of the worker that holds it."""
    for number, owner in enumerate(owners):
        fill = PLAIN if owner is None else WORKER_COLORS[owner]
        canvas.box(x, y + number * row, width, row, fill)


def roles() -> Canvas:
    canvas = Canvas("One line of a program becomes an instruction, and the instruction a command of two workers", 190)
    canvas.write(110, 30, "client", size=15)
    canvas.box(20, 45, 180, 100, PLAIN)
    for number, line in enumerate(("x = gt.randn(4, 3)", "y = x @ w", "print(y.sum())")):
        canvas.write(35, 75 + 24 * number, line, at="start", mono=True, size=12, look="dark")
    canvas.write(110, 165, "your program, whole tensors", look="pale", size=12)
    canvas.arrow(200, 95, 305, 95)
    canvas.write(252, 86, "%3 = mm(%1, %2)", size=10)
    canvas.write(252, 112, "instructions", look="pale", size=11)
    canvas.write(385, 30, "dispatcher", size=15)
    canvas.box(305, 45, 160, 100, PLAIN)
    for number, (name, layout) in enumerate((("%1 is", "w, -"), ("%2 is", "-, -"), ("%3 will be", "w, -"))):
        canvas.write(320, 75 + 24 * number, name, at="start", size=12, look="dark")
        canvas.write(400, 75 + 24 * number, layout, at="start", size=12, look="dark", mono=True)
    canvas.write(385, 165, "layouts, no bytes", look="pale", size=12)
    for worker, y in enumerate((45, 103)):
        canvas.arrow(465, 95, 568, y + 21)
        canvas.box(570, y, 170, 42, WORKER_COLORS[worker], f"rows {2 * worker}, {2 * worker + 1} of %1 and %3")
        canvas.write(655, y - 6 if worker == 0 else y + 58, f"worker {worker}", size=13)
    canvas.write(505, 72, "mm", mono=True, size=11)
    canvas.write(505, 130, "commands", look="pale", size=11)
    return canvas


def stream() -> Canvas:
    canvas = Canvas("The program issues ops and goes on; the workers run them later; only a read waits", 150)
    canvas.write(90, 48, "program", at="end")
    canvas.write(90, 108, "worker", at="end")
    names = ("mm", "relu", "mm", "mean")
    for number, name in enumerate(names):
        canvas.box(105 + 44 * number, 30, 40, 28, PLAIN, name, mono=True, size=11)
        canvas.box(160 + 104 * number, 90, 98, 28, WORKER_COLORS[0], name, mono=True)
        canvas.arrow(125 + 44 * number, 58, 168 + 104 * number, 89)
    canvas.box(281, 30, 62, 28, PLAIN, "item()", mono=True, size=11)
    canvas.box(345, 30, 228, 28, "none", dashed=True)
    canvas.write(459, 49, "waits for the value", look="pale", size=12)
    canvas.arrow(574, 90, 582, 60)
    canvas.box(585, 30, 70, 28, PLAIN, "goes on", size=11)
    canvas.write(720, 140, "time →", at="end", look="pale", size=12)
    return canvas


def layouts() -> Canvas:
    canvas = Canvas("A matrix on two workers: cut by rows, cut by columns, whole on each, and as partial sums", 215)
    titles = ("Shard(0)", "Shard(1)", "Replicate()", "Partial()")
    texts = ("w, -", "-, w", "-, -", "-, - + w")
    for number, (title, text) in enumerate(zip(titles, texts, strict=True)):
        left = 30 + 185 * number
        canvas.write(left + 70, 28, title, mono=True, size=14)
        for worker in (0, 1):
            x, y = left + 78 * worker, 50
            fill = WORKER_COLORS[worker]
            if title == "Shard(0)":
                rows(canvas, x, y, 64, [worker if (row // 2) == worker else None for row in range(4)], 22)
            elif title == "Shard(1)":
                for column in range(2):
                    canvas.box(x + 32 * column, y, 32, 88, fill if column == worker else PLAIN)
            elif title == "Replicate()":
                canvas.box(x, y, 64, 88, fill, "all")
            else:
                canvas.box(x, y, 64, 88, fill, ("a", "b")[worker], dashed=True, size=16)
            canvas.write(x + 32, 156, f"worker {worker}", look="pale", size=11)
        canvas.write(left + 70, 182, f'"{text}"', mono=True, size=13)
    for left, words in (
        (100, "each holds some rows"),
        (285, "some columns"),
        (470, "the same on both"),
        (655, "the value is a + b"),
    ):
        canvas.write(left, 203, words, look="pale", size=12)
    return canvas


def mesh() -> Canvas:
    canvas = Canvas("A mesh of four workers with the axes dp and tp, and a matrix that is cut along both", 240)
    canvas.write(150, 28, 'gt.mesh((2, 2), ("dp", "tp"))', mono=True, size=12)
    for worker in range(4):
        x, y = 95 + 105 * (worker % 2), 70 + 65 * (worker // 2)
        canvas.box(x, y, 95, 55, WORKER_COLORS[worker], f"worker {worker}")
    for number in range(2):
        canvas.write(142 + 105 * number, 60, f"tp = {number}", look="pale", size=12)
        canvas.write(85, 102 + 65 * number, f"dp = {number}", look="pale", size=12, at="end")
    for left, title, owners in (
        (370, "dp, tp", ((0, 1), (2, 3))),
        (500, "dp, -", ((0, 0), (2, 2))),
        (630, "-, tp", ((0, 1), (0, 1))),
    ):
        canvas.write(left + 45, 60, f'"{title}"', mono=True)
        for row, pair in enumerate(owners):
            for column, owner in enumerate(pair):
                canvas.box(left + 45 * column, 70 + 60 * row, 45, 60, WORKER_COLORS[owner])
    for middle, words in (
        (415, ("each has a part", "of its own")),
        (545, ("0 and 1 the same,", "2 and 3 the same")),
        (675, ("0 and 2 the same,", "1 and 3 the same")),
    ):
        for number, line in enumerate(words):
            canvas.write(middle, 210 + 16 * number, line, look="pale", size=12)
    return canvas


def uneven() -> Canvas:
    canvas = Canvas("Ten rows over four workers are 3, 3, 2 and 2; three rows are 1, 1, 1 and none", 120)
    for top, size in ((25, 10), (75, 3)):
        canvas.write(150, top + 19, f"{size} rows, 4 workers", at="end")
        x = 165.0
        for worker in range(4):
            count = size // 4 + (worker < size % 4)
            for _ in range(count):
                canvas.box(x, top, 36, 28, WORKER_COLORS[worker])
                x += 36
            if not count:
                canvas.box(x + 6, top, 60, 28, "none", dashed=True)
                canvas.write(x + 36, top + 19, "nothing", look="pale", size=12)
            x += 8
    for worker in range(4):
        canvas.box(600, 16 + 24 * worker, 16, 16, WORKER_COLORS[worker])
        canvas.write(624, 29 + 24 * worker, f"worker {worker}", at="start", size=12, look="pale")
    return canvas


def copies() -> Canvas:
    canvas = Canvas(
        "An op needs a cut weight whole: a copy is made, used again, and dropped when the weight is written", 185
    )
    titles = ("w is cut", "x @ w gathers it", "again: nothing moves", "w -= 0.1 * w.grad")
    for number, title in enumerate(titles):
        left = 25 + 185 * number
        canvas.write(left + 75, 28, title, mono=number in (1, 3), size=12)
        for worker in (0, 1):
            y = 45 + 62 * worker
            canvas.box(left, y, 45, 46, WORKER_COLORS[worker], "½ w")
            if number in (1, 2):
                canvas.box(left + 55, y, 95, 46, "none", dashed=True)
                canvas.write(left + 102, y + 28, "copy of w", size=12, look="pale")
            if number == 0:
                canvas.write(left + 60, y + 28, f"worker {worker}", at="start", size=12, look="pale")
        words = ("the original", "one all-gather", "the copy is used", "the copies are dropped")[number]
        canvas.write(left + 75, 172, words, look="pale", size=12)
        if number:
            canvas.arrow(left - 30, 98, left - 8, 98)
    return canvas


def exchanges() -> Canvas:
    canvas = Canvas(
        "What two workers hold before and after an all-gather, a reduce-scatter, an all-reduce, an all-to-all", 205
    )
    kinds = (
        ("all-gather", (("A", ""), ("", "B")), (("A", "B"), ("A", "B")), "cut → whole"),
        ("all-reduce", (("a", "b"), ("c", "d")), (("a+c", "b+d"), ("a+c", "b+d")), "partial → whole"),
        ("reduce-scatter", (("a", "b"), ("c", "d")), (("a+c", ""), ("", "b+d")), "partial → cut"),
        ("all-to-all", (("A", "B"), ("C", "D")), (("A", "C"), ("B", "D")), "cut by rows → by columns"),
    )
    for number, (kind, before, after, words) in enumerate(kinds):
        left = 22 + 186 * number
        canvas.write(left + 78, 28, kind, size=14)
        for worker in (0, 1):
            y = 48 + 58 * worker
            for x, held in ((left, before), (left + 86, after)):
                for place, name in enumerate(held[worker]):
                    if name:
                        canvas.box(x + 35 * place, y, 35, 40, WORKER_COLORS[worker], name)
                    else:
                        canvas.box(x + 35 * place, y, 35, 40, "none", dashed=True)
        canvas.arrow(left + 72, 97, left + 84, 97)
        canvas.write(left + 78, 172, words, look="pale", size=12)
    canvas.write(
        380, 194, "upper row: worker 0, lower row: worker 1; each row is what one worker holds", look="pale", size=11
    )
    return canvas


def scopes() -> Canvas:
    canvas = Canvas("A name in the program, what the YAML file says about it, and where its ops then run", 190)
    canvas.box(20, 40, 270, 100, PLAIN)
    for number, line in enumerate(
        ('with gt.signal.context("forward"):', "    loss = model(x).mean()", "loss.backward()")
    ):
        canvas.write(32, 68 + 26 * number, line, at="start", mono=True, size=11, look="dark")
    canvas.write(155, 165, "train.py: a name", look="pale", size=12)
    canvas.arrow(290, 76, 330, 76)
    canvas.box(330, 40, 210, 100, PLAIN)
    for number, line in enumerate(("forward:", "  shard:", "    axis: 0", "    workers: [0, 1]")):
        canvas.write(342, 62 + 22 * number, line, at="start", mono=True, size=11, look="dark")
    canvas.write(435, 165, "plan.yaml: what it means", look="pale", size=12)
    for worker in (0, 1):
        y = 40 + 54 * worker
        canvas.arrow(540, 90, 588, y + 23)
        canvas.box(590, y, 150, 46, WORKER_COLORS[worker], f"rows of half {worker}")
    canvas.write(665, 165, "backward runs there too", look="pale", size=12)
    return canvas


def segments() -> Canvas:
    canvas = Canvas("The first steps are sent op by op; later the same ops are one message, with their numbers", 150)
    for number, title in enumerate(("step 1", "step 2", "step 3", "step 4")):
        left = 25 + 185 * number
        canvas.write(left + 75, 28, title)
        if number < 2:
            for op, name in enumerate(("mm", "relu", "mm", "mean", "…", "add_")):
                canvas.box(left + 52 * (op % 3), 42 + 34 * (op // 3), 46, 28, PLAIN, name, mono=True, size=11)
        else:
            canvas.box(left, 42, 150, 62, ORANGE, "segment 1: run again")
        words = ("op by op", "op by op: the same ops", "one message, one plan", "one message")[number]
        canvas.write(left + 75, 130, words, look="pale", size=12)
    return canvas


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    each.__name__: each for each in (roles, stream, layouts, mesh, uneven, copies, exchanges, scopes, segments)
}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())
