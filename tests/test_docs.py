"""The documentation is true: its programs run, its links lead somewhere, and every public name is in it.

A fence ```python is a program and runs as `train.py`; ```python slow runs in the slow tests, where a C++ compiler is
there; ```python no-run is only compiled; ```python peer is a program of another library, see test_peer_programs.py.
A fence ```text output after a program is what it prints, where `...` stands for anything.
"""

import contextlib
import doctest
import importlib
import importlib.util
import io
import itertools
import linecache
import re
from dataclasses import dataclass

import pytest
import torch

import gt
from gt.core.settings import _VARIABLES, Settings
from gt.signals.parser import parse_config
from gt.signals.registry import registry
from tests.subprocesses import ROOT, finish, start
from tests.worker.compilation.recorded_units import needs_compiler

INDEX = ROOT / "docs" / "index.md"
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
PAGES = [*GUIDES, *REFERENCE, *sorted((ROOT / "examples").glob("*.md")), *sorted((ROOT / "gt").rglob("README.md"))]
DEMO = ROOT / "examples" / "train_transformer.py"

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
_STARTS_GT = re.compile(r"gt\.(init|connect|gpu_workers)\(")
_ANSI = "\x1b["


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    code: str
    info: str
    output: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"


def snippets(path):
    fences = list(_FENCE.finditer(text := path.read_text()))
    for fence, following in itertools.pairwise([*fences, None]):
        if fence["info"].startswith("python"):
            printed = following["body"] if following is not None and following["info"] == "text output" else None
            line = text.count("\n", 0, fence.start()) + 1
            yield Snippet(str(path.relative_to(ROOT)), line, fence["body"], fence["info"], printed)


SNIPPETS = [snippet for path in PAGES for snippet in snippets(path)]
PROGRAMS = [snippet for snippet in SNIPPETS if snippet.info == "python"]
SLOW_PROGRAMS = [snippet for snippet in SNIPPETS if snippet.info == "python slow"]
CLUSTER_PROGRAMS = [snippet for snippet in SNIPPETS if snippet.info == "python cluster"]  # tests/cluster runs them
LAUNCHED_PROGRAMS = [snippet for snippet in SNIPPETS if snippet.info in ("python ray", "python dask")]  # tests/launch
PEER_PROGRAMS = [snippet for snippet in SNIPPETS if snippet.info == "python peer"]


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Programs write their files to a directory of their own, and find the examples there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    yield
    gt.shutdown()
    registry.clear()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_snippet_compiles(snippet):
    compile(snippet.code, str(snippet), "exec")


@pytest.mark.parametrize("snippet", PROGRAMS, ids=str)
def test_a_program_runs_and_prints_what_the_page_says(snippet, ended, monkeypatch):
    monkeypatch.setitem(linecache.cache, "train.py", (1, None, snippet.code.splitlines(keepends=True), "train.py"))
    if not _STARTS_GT.search(snippet.code):
        gt.init()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(snippet.code, "train.py", "exec"), {"__name__": "__main__"})
    if snippet.output is not None:
        assert prints(out.getvalue(), snippet.output) or not IS_DOCUMENTED_TORCH, out.getvalue()


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("snippet", SLOW_PROGRAMS, ids=str)
def test_a_slow_program_runs_and_prints_what_the_page_says(snippet, ended, monkeypatch):
    monkeypatch.setenv("GT_CHECK_GEOMETRY", "0")
    test_a_program_runs_and_prints_what_the_page_says(snippet, ended, monkeypatch)


# Other versions of torch have other error texts, and other ops in a tape.
IS_DOCUMENTED_TORCH = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()


def prints(got, wanted):
    """Compared but for the lines of a tape that free tensors: these come when they come."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    got, wanted = (re.sub(r"^free %.*\n", "", text, flags=re.MULTILINE) for text in (got, wanted))
    return doctest.OutputChecker().check_output(wanted, got, flags)


def test_an_output_that_differs_from_the_page_is_found():
    assert prints("a\nfree %1\nb 1\n", "a\nb ...\n")
    assert not prints("a\nc\n", "a\nb\n")


def test_most_snippets_run():
    assert len(PROGRAMS) >= 15
    elsewhere = len(SLOW_PROGRAMS) + len(PEER_PROGRAMS) + len(CLUSTER_PROGRAMS) + len(LAUNCHED_PROGRAMS)
    assert len(SNIPPETS) - len(PROGRAMS) - elsewhere <= 3


CONFIGURATIONS = [
    (f"{path.relative_to(ROOT)}:{path.read_text().count(chr(10), 0, fence.start()) + 1}", fence["body"])
    for path in PAGES
    for fence in _FENCE.finditer(path.read_text())
    if fence["info"] == "yaml"
]


@pytest.mark.parametrize(("where", "text"), CONFIGURATIONS, ids=[where for where, _ in CONFIGURATIONS])
def test_a_yaml_snippet_is_a_valid_configuration(where, text):
    parse_config(text, where)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = _LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_links_are_found_at_all():
    assert _LINK.findall("[a](docs/a.md) [b](../b.md#part) [c](https://c.org) [d](#here)") == ["docs/a.md", "../b.md"]


def test_every_page_is_linked_from_the_readme_or_the_index():
    fronts = [ROOT / "README.md", INDEX, ROOT / "docs" / "api.md"]
    linked = {(front.parent / link).resolve() for front in fronts for link in _LINK.findall(front.read_text())}
    assert [str(path.relative_to(ROOT)) for path in PAGES[1:] if path not in linked] == []


def test_every_environment_variable_is_described_with_its_default():
    table = (ROOT / "docs" / "workers.md").read_text()
    rows = dict(re.findall(r"^\| `(GT_\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert rows.keys() == _VARIABLES.keys()
    defaults = {name: getattr(Settings(), field) for name, (field, _) in _VARIABLES.items()}
    said = {
        name: "not set" if not default and default is not False else shown(default)
        for name, default in defaults.items()
    }
    assert {name: text for name, text in rows.items() if not text.startswith(said[name])} == {}


def shown(default):
    return f"`{int(default)}`" if isinstance(default, bool | float) else f"`{default}`"


@pytest.mark.parametrize("name", gt.__all__)
def test_every_public_name_is_mentioned(name):
    assert any(re.search(rf"\bgt\.{name}\b", path.read_text()) for path in GUIDES)


def test_pages_name_no_paths_of_a_machine():
    private = re.compile(r"(?<![\w.])/(home|root|work|tmp|Users)/")
    assert [str(path.relative_to(ROOT)) for path in PAGES if private.search(path.read_text())] == []


@pytest.mark.timeout(200)
def test_the_demo_runs_and_agrees():
    code, out, err = finish(start(str(DEMO), "--quick"), 180)
    assert code == 0, err
    assert "The losses of 3 steps agree to 0.0001" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│")] == ["1", "2", "3"]
    assert all(name in err for name in ("torch", "embedded", "2 workers"))
    assert _ANSI not in out + err


def test_the_demo_refuses_no_steps():
    code, out, err = finish(start(str(DEMO), "--steps", "0"))
    assert (code, out) == (2, "")
    assert "at least 1, not 0" in err


@pytest.mark.parametrize(("wrong", "code"), [(0.0, 0), (1e-3, 1), (float("nan"), 1)])
def test_the_demo_fails_where_losses_disagree(wrong, code, capsys):
    spec = importlib.util.spec_from_file_location("train_transformer", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    right = torch.ones(40, dtype=torch.float64)
    assert demo.report({"torch": right, "embedded": right, "2 workers": right + wrong * (right.cumsum(0) == 7)}) == code
    assert ("DISAGREE" in capsys.readouterr().out) == bool(code)


def test_the_picture_of_the_architecture_is_drawn_from_todays_messages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = importlib.import_module("draw_architecture")
    assert drawing.PICTURE.read_text() == drawing.draw(), "run: python docs/draw_architecture.py"


def test_each_program_of_the_timelines_has_a_small_picture_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = importlib.import_module("draw_timelines")
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert re.findall(r"\(timelines/(\w+)\.png\)", page) == list(drawing.PROGRAMS)
    assert all((drawing.PICTURES / f"{name}.png").stat().st_size < 150_000 for name in drawing.PROGRAMS)


def test_the_pictures_of_the_concepts_are_drawn_by_their_program_and_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = importlib.import_module("draw_concepts")
    pictures = {path.stem: path.read_text() for path in drawing.PICTURES.glob("*.svg")}
    assert pictures == {name: draw().svg() for name, draw in drawing.DRAWINGS.items()}, (
        "run: python docs/draw_concepts.py"
    )
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert sorted(re.findall(r"\(concepts/(\w+)\.svg\)", page)) == sorted(pictures)


FILE_NAMES = re.compile(r"`((?:gt|tests|docs|examples|benchmarks)/[\w/]+\.\w+|\w+/[\w/]+\.py)`")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page):
    names = FILE_NAMES.findall((ROOT / page).read_text())
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists() and not (ROOT / "gt" / name).exists()] == []
