"""`python -m gt.scripts.visualize`: pictures of logs, as files and web pages."""

import struct
import sys
from xml.etree import ElementTree

import pytest

import gt
from gt.scripts import visualize
from tests.monitor.timeline_logs import op, write_log
from tests.subprocesses import finish, start

SVG = "{http://www.w3.org/2000/svg}"
WITHOUT_MATPLOTLIB = (
    "import sys; sys.modules['matplotlib'] = None; from gt.scripts.visualize import main; sys.exit(main())"
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visualize", *map(str, arguments)])
        code = visualize.main()
        return code, *capsys.readouterr()

    return run


def size_of(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_a_program_becomes_a_picture(tmp_path, run):
    gt.init(workers=2, mode="virtual")
    x = gt.ones(64, 64, mesh=gt.mesh(2, ("x",)), placements="x, -")
    with gt.debug.trace(tmp_path / "run.log"):
        (x @ x).sum().item()
    gt.shutdown()
    code, out, err = run(tmp_path / "run.log", "--output", tmp_path / "timeline.png")
    assert (code, out, err) == (0, f"{tmp_path / 'timeline.png'}\n", "")
    assert size_of(tmp_path / "timeline.png") == (1500, 400)


def test_the_size_can_be_chosen(tmp_path, run):
    log = write_log(tmp_path / "run.log")
    assert run(log, "-o", tmp_path / "a.png", "--width", 8, "--height", 5, "--dpi", 50)[0] == 0
    assert size_of(tmp_path / "a.png") == (400, 250)


@pytest.mark.parametrize("sizes", [("--width", "3"), ("--height", "0"), ("--dpi", "nan"), ("--dpi", "1e6")])
def test_a_size_that_is_not_possible_is_refused(tmp_path, run, sizes):
    with pytest.raises(SystemExit) as refused:
        run(write_log(tmp_path / "run.log"), *sizes)
    assert refused.value.code == 2


def test_several_logs_are_several_pictures(tmp_path, run):
    logs = [write_log(tmp_path / name) for name in ("a.log", "b.log")]
    code, out, _ = run(*logs, "-o", tmp_path / "all.png")
    assert code == 0 and out.splitlines() == [str(tmp_path / "all_a.png"), str(tmp_path / "all_b.png")]
    code, out, _ = run(*logs, "--html")
    assert code == 0 and out.splitlines() == [str(tmp_path / "a.html"), str(tmp_path / "b.html")]


def test_a_directory_gets_a_file_with_the_name_of_the_log(tmp_path, run):
    log = write_log(tmp_path / "run.log")
    (tmp_path / "pictures").mkdir()
    assert run(log, "--html", "-o", tmp_path / "pictures")[:2] == (0, f"{tmp_path / 'pictures' / 'run.html'}\n")


def test_a_page_escapes_the_names_of_the_program(tmp_path, run):
    bad = "<script>alert('x')</script>&\"$\\frac$"
    records = [op(0, f"my.{bad}", 0, 9, scope=bad, site=f"{bad}.py:1"), op(1, "aten.mm.default", 0, 9)]
    log = write_log(tmp_path / "a&b<i>.log", records)
    assert run(log, "--html", "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    tree = ElementTree.fromstring(page.partition("\n")[2])  # but for its doctype the page is XML
    assert tree.find("head/title").text == "a&b<i>.log"
    titles = [title.text for title in tree.iter(f"{SVG}title")]
    assert f"scope {bad}" in titles and any(bad in title and "9 ms" in title for title in titles)
    assert run(log, "-o", tmp_path / "page.png")[0] == 0  # a dollar begins no formula


def test_the_code_of_a_line_is_shown_if_it_is_that_of_the_run(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import gt\n  y = x @ w  \n")
    changed = program.stat().st_mtime
    assert visualize.code_at(f"{program}:2", changed + 1) == "y = x @ w"
    assert visualize.code_at(f"{program}:2", changed - 1) == ""
    assert [visualize.code_at(site, changed + 1) for site in ("", "?:0", "/etc/hosts:1", "no.py:3")] == [""] * 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [("hello\n", "log:1: this is no instruction log"), ("", "is empty"), (None, "cannot be read as a log")],
)
def test_a_bad_file_is_an_error_with_its_name(tmp_path, run, text, problem):
    if text is not None:
        (tmp_path / "log").write_text(text)
    code, out, err = run(tmp_path / "log", "-o", tmp_path / "a.png")
    assert (code, out) == (1, "") and err.startswith("gt.scripts.visualize: ") and problem in err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("output", ["a.jpg", "/proc/nothing/a.png", "/proc/nothing/a.html"])
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, run, output):
    code, _, err = run(write_log(tmp_path / "run.log"), "-o", output)
    assert code == 1 and output in err


def test_without_matplotlib_it_says_what_to_install_and_draws_pages(tmp_path):
    log = write_log(tmp_path / "run.log")
    code, _, err = finish(start("-c", WITHOUT_MATPLOTLIB, str(log)), 60)
    assert code == 1 and "pip install 'gt-tensor[pictures]'" in err
    code, out, err = finish(start("-c", WITHOUT_MATPLOTLIB, str(log), "--html"), 60)
    assert (code, out) == (0, f"{tmp_path / 'run.html'}\n"), err
