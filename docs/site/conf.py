"""Settings of Sphinx for the docs site, which `make docs` builds.

The pages are the Markdown files of the repository, at their paths: the address of a page is its path, and a link that
works in the repository works in the site.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[1]))

from gt.version import __version__  # noqa: E402

project = "GT"
release = __version__
language = "en"
root_doc = "docs/index"
html_title = f"GT {__version__}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "page_tree",
    "page_sources",
    "repository_files",
    "public_names",
]
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/*.md",
    "examples/*.ipynb",
    "gt/**/README.md",
]
exclude_patterns = [".*", "build", "dist", "tests", "*.egg-info", "**/__pycache__"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}

nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!gt\.).*"),  # types of torch, NumPy and Python
    ("py:.*", r"gt\.(client|core|dispatcher|launch|monitor|sharding|signals)\..*"),  # types that are not public names
]
suppress_warnings = ["misc.highlighting_failure"]  # an error message of a worker is no Python, though it begins so

myst_heading_anchors = 3
myst_links_external_new_tab = True
default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"Placements": "Placements", "MeshArgument": "Mapping[str, int]", "DimsArgument": "Sequence"}
python_maximum_signature_line_length = 90
add_module_names = True

html_theme = "furo"
html_static_path = [str(HERE / "static")]
templates_path = [str(HERE / "templates")]
html_css_files = ["site.css"]
html_favicon = str(HERE / "static" / "favicon.svg")
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5394", "color-brand-content": "#0b5394"},
    "dark_css_variables": {"color-brand-primary": "#7db8f0", "color-brand-content": "#7db8f0"},
    "navigation_with_keys": True,
}
