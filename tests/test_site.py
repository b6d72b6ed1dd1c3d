"""The docs site builds without a warning, is whole, and needs nothing from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile

from tests.browser import browsing
from tests.public_names import COMMANDS, public_names
from tests.subprocesses import ROOT, finish, start_interpreter

pytestmark = pytest.mark.timeout(300)

GUIDES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. Warnings of Sphinx fail the build: links to nowhere, pages in no table of contents, names without
    a docstring."""
    folder = tmp_path_factory.mktemp("site")
    build = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(folder / "cache"), "-c", "docs/site"]
    code, _, err = finish(start_interpreter("-m", "sphinx", *build, ".", str(folder / "site")), 240)
    assert code == 0, err
    return folder / "site"


class Page(HTMLParser):
    """The ids, links and loaded files of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(_LOADS.get(tag)):
            self.loaded.append(found[_LOADS[tag]])


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def is_dead(path, link, pages):
    parts = urlsplit(link)
    if parts.scheme:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return True
    return bool(parts.fragment) and target in pages and unquote(parts.fragment) not in pages[target].ids


def test_links_inside_the_site_lead_somewhere(pages):
    assert len(pages) > 50
    dead = [f"{path.name}: {link}" for path, page in pages.items() for link in page.links if is_dead(path, link, pages)]
    assert dead == []


def test_a_dead_link_is_found(site, pages):
    index = site / "docs" / "index.html"
    assert is_dead(index, "nowhere.html", pages)
    assert is_dead(index, "signals.html#nowhere", pages)
    assert not is_dead(index, "signals.html", pages)


def test_pages_load_nothing_from_elsewhere(pages):
    assert {file for page in pages.values() for file in page.loaded if re.match("(https?:)?//", file)} == set()


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide != "index"])
def test_a_guide_is_in_the_sidebar(guide, site):
    sidebar = (site / "docs" / "index.html").read_text().partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert f'href="{guide}.html"' in sidebar


def test_every_public_name_is_in_the_reference(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    described = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    assert [name for name in public_names() if name not in described] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_has_what_a_command_prints_as_help(command, site):
    assert f"usage: python -m {command}" in (site / "docs" / "api" / "commands.html").read_text()


def test_signatures_show_no_private_names_and_no_objects_of_sphinx(site):
    pages = [path.read_text() for path in (site / "docs" / "api").glob("*.html")]
    signatures = re.findall(r'<dt class="sig .*?</dt>', "".join(pages), re.DOTALL)
    assert len(signatures) > 100
    shown = [re.sub("<[^>]*>", "", signature) for signature in signatures]
    assert [text for text in shown if "ForwardRef" in text or re.search(r"[( ]_[a-z]", text)] == []


def test_a_file_of_the_repository_is_a_page_with_its_text(site):
    page = (site / "source" / "gt" / "core" / "messages.py.html").read_text()
    assert "RunOp" in page and "page-toc" not in page


def test_a_folder_of_the_repository_is_a_page_with_links_to_its_files(site):
    assert 'href="site/conf.py.html"' in (site / "source" / "docs" / "site.html").read_text()
    assert (site / "source" / "docs" / "site" / "conf.py.html").is_file()


def test_names_in_guides_link_to_the_reference(site):
    assert 'href="api/sessions.html#gt.init"' in (site / "docs" / "workers.html").read_text()


def test_output_of_programs_and_of_notebooks_is_marked(site):
    for page in ("docs/debugging.html", "examples/first_steps.html"):
        assert re.search(r'class="output [^"]*highlight-text', (site / page).read_text()), page


@pytest.mark.browser
@pytest.mark.parametrize("width", [1366, 390])
@pytest.mark.parametrize("page", ["index.html", "docs/signals.html", "docs/api/tensors.html"])
def test_a_page_fits_the_window(page, width, site):
    with browsing(width, 768) as tab:
        tab.goto(Path(site / page).as_uri())
        tab.wait_for_selector("article h1")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
