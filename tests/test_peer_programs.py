"""The programs of other libraries on the pages `docs/coming-from-*.md` are those of `examples/peers`.
They print what the pages say, where their library is installed."""

import importlib.util

import pytest

from tests.subprocesses import ROOT, finish, start
from tests.test_docs import PEER_PROGRAMS, prints, snippets

PROGRAMS = ROOT / "examples" / "peers"
PACKAGES = {"dtensor": "torch", "jax": "jax", "dask": "distributed", "ray": "ray", "monarch": "monarch"}


def program_of(peer):
    return PROGRAMS / f"{peer}_program.py"


def on_the_page(peer):
    """Their program and ours, as two snippets."""
    return snippets(ROOT / "docs" / f"coming-from-{peer}.md")


def test_each_peer_has_a_page_and_each_program_a_peer():
    assert sorted(program_of(peer) for peer in PACKAGES) == sorted(PROGRAMS.glob("*.py"))
    assert sorted(PEER_PROGRAMS, key=str) == sorted([next(on_the_page(peer)) for peer in PACKAGES], key=str)


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_page_shows_the_program_of_its_file(peer):
    _, docstring, code = program_of(peer).read_text().split('"""', 2)
    theirs = next(on_the_page(peer))
    assert theirs.code.strip() == code.strip()
    assert f"python examples/peers/{program_of(peer).name}" in docstring


@pytest.mark.parametrize("peer", PACKAGES)
def test_both_programs_of_a_page_print_the_same_values(peer):
    """But for the last line or the first, which show the layouts."""
    theirs, ours = (set(each.output.splitlines()) for each in on_the_page(peer))
    assert len(theirs & ours) >= 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("peer", PACKAGES)
def test_a_program_prints_what_its_page_says(peer):
    if importlib.util.find_spec(PACKAGES[peer]) is None:
        pytest.skip(f"{PACKAGES[peer]} is not installed")
    code, out, err = finish(start(str(program_of(peer))), 240)
    assert code == 0, err
    assert prints(out, next(on_the_page(peer)).output)
