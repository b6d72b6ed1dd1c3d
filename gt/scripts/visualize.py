"""`python -m gt.scripts.visualize traces/trace_*.log --output timeline.png`: draws what workers did, and when.

It takes the log of a trace, or an instruction log, which knows only when commands were sent.
"""

from __future__ import annotations

import argparse
import linecache
import sys
from pathlib import Path

from gt.core.errors import SettingsError
from gt.core.output_files import make_parents, open_text
from gt.monitor.timeline_model import read_timeline
from gt.monitor.timeline_picture import UNITS, print_html, save_picture
from gt.monitor.timeline_scene import draw_scene
from gt.scripts.command_line import positive_number, run_tool

WIDTH, DPI = 15.0, 100.0
LEAST_WIDTH, LEAST_HEIGHT, MOST_PIXELS = 7.0, 3.0, 30_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gt.scripts.visualize",
        description="Draw a timeline of the log of a trace, or an instruction log.",
    )
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="traces/trace_*.log, or GT_INSTRUCTION_LOG")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the picture or its directory (default: beside the log); several logs add their names",
    )
    parser.add_argument("--width", type=positive_number, default=WIDTH, help=f"in inches (default: {WIDTH:g})")
    parser.add_argument("--height", type=positive_number, help="in inches (default: by the number of workers)")
    parser.add_argument("--dpi", type=positive_number, default=DPI, help=f"pixels of an inch (default: {DPI:g})")
    parser.add_argument("--html", action="store_true", help="write a web page with titles under the pointer")
    options = parser.parse_args()
    if options.width < LEAST_WIDTH or (options.height or LEAST_HEIGHT) < LEAST_HEIGHT:
        parser.error(f"a picture has at least {LEAST_WIDTH:g} by {LEAST_HEIGHT:g} inches")
    if max(options.width, options.height or 0) * options.dpi > MOST_PIXELS:
        parser.error(f"a picture has at most {MOST_PIXELS} pixels each way; choose a smaller --dpi")
    return run_tool("gt.scripts.visualize", lambda: _visualize(options))


def _visualize(options: argparse.Namespace) -> int:
    for log in options.logs:
        path = _output(log, options.output, len(options.logs) > 1, options.html)
        draw_log(log, path, options.width, options.height, options.dpi)
        print(path)
    return 0


def draw_log(log: Path, path: Path, width: float = WIDTH, height: float | None = None, dpi: float = DPI) -> None:
    """Draw a log to a web page if the name of the picture ends with `.html`, or else to a PNG file. Raises
    SettingsError if the log cannot be read or the picture cannot be drawn."""
    timeline = read_timeline(log)
    written = log.stat().st_mtime
    scene = draw_scene(
        timeline, log.name, width * UNITS, height and height * UNITS, lambda site: code_at(site, written)
    )
    try:
        make_parents(path)
        if path.suffix == ".html":
            with open_text(path) as file:
                file.write(print_html(scene))
        else:
            save_picture(scene, path, dpi)
    except OSError as error:
        raise SettingsError(f"the picture cannot be written to {path}: {error}") from None


def code_at(site: str, before: float) -> str:
    """The text of a line of a Python file; empty if there is no such file on this machine, or if it was changed after
    the time `before`."""
    file, _, line = site.rpartition(":")
    try:
        is_the_same = file.endswith(".py") and line.isdecimal() and Path(file).stat().st_mtime < before
    except OSError:
        return ""
    return linecache.getline(file, int(line)).strip() if is_the_same else ""


def _output(log: Path, output: Path | None, is_one_of_several: bool, html: bool) -> Path:
    """The file of a log's picture. A directory gets a file with the name of the log."""
    if output is not None and output.is_dir():
        return output / log.with_suffix(".html" if html else ".png").name
    path = output or log
    if output is not None and is_one_of_several:
        path = output.with_name(f"{output.stem}_{log.stem}{output.suffix}")
    suffix = ".html" if html else ".png"
    if html or output is None or not output.suffix:
        path = path.with_suffix(suffix)
    if path.suffix not in (".png", ".html"):
        raise SettingsError(f"{path}: a picture is a .png or .html file")
    return path


if __name__ == "__main__":
    sys.exit(main())
