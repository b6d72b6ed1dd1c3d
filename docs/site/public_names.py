"""The reference of public names: the directives `names` and `command`, and links to it from `gt.name` in any page."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

_NAME = re.compile(r"(gt(?:\.\w+)+)(?:\((?:(?!\)\.).)*\))?")  # `gt.init` or `gt.init(workers=2)`

_ALIAS = re.compile(r"TypeAliasForwardRef\('(.*?)'\)")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("names", Names)
    app.add_directive("command", Command)
    app.add_post_transform(LinkNames)
    app.connect("autodoc-process-signature", show_aliases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Names(SphinxDirective):
    """The docstrings of the names in its lines."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        text = "\n".join(line for name in self.content for line in _directive(name.strip()))
        return self.parse_text_to_nodes(f"````{{eval-rst}}\n{text}\n````")


class Command(SphinxDirective):
    """A command: the docstring of its module, and its `--help`."""

    required_arguments = 1
    optional_arguments = 9

    def run(self) -> list[nodes.Node]:
        module, *arguments = self.arguments
        description = inspect.cleandoc(_main_of(module).__doc__ or "")
        shown = nodes.literal_block(text := help_of(module, arguments), text, language="text", classes=["output"])
        return [*self.parse_text_to_nodes("" if arguments else description), shown]


def _main_of(module: str) -> ModuleType:
    found = importlib.import_module(module)
    return importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found


def help_of(module: str, arguments: list[str]) -> str:
    """What a command prints with `--help`."""
    environment = {"COLUMNS": "100", "NO_COLOR": "1"}
    with (
        mock.patch.object(sys, "argv", [module, *arguments, "--help"]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(SystemExit),
    ):
        _main_of(module).main()
    return out.getvalue().rstrip()


def _directive(name: str) -> Iterator[str]:
    value = named(name)
    is_of_class = isinstance(named(name.rpartition(".")[0]), type)
    kind = "method" if is_of_class and inspect.isfunction(value) else _kind(value)
    is_tensor = kind == "class" and issubclass(value, torch.Tensor)  # whose arguments and methods are torch's
    yield f".. auto{kind}:: {name}{'(*args)' if is_tensor else ''}"
    if kind == "class" and not is_tensor:
        yield "   :members:"
        if fields := getattr(value, "_fields", ()):
            yield f"   :exclude-members: {', '.join(fields)}"
    yield ""


def named(name: str) -> Any:
    """The value of a public name such as `gt.debug.comm`."""
    value = importlib.import_module("gt")
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def _kind(value: Any) -> str:
    if isinstance(value, ModuleType):
        return "module"
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    if isinstance(value, property):
        return "property"
    return "function" if callable(value) else "data"


def show_aliases(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Shows the names of `autodoc_type_aliases` in signatures, and not the objects that stand for them."""
    return _without_wrapping(signature), _without_wrapping(returned)


def _without_wrapping(text: str | None) -> str | None:
    return None if text is None else _ALIAS.sub(r"\1", text)


class LinkNames(SphinxPostTransform):
    """Links inline code such as `gt.init(workers=2)` to the reference of the name."""

    default_priority = 8

    def run(self, **kwargs: Any) -> None:
        objects = self.env.domains.python_domain.objects
        for code in list(self.document.findall(nodes.literal)):
            found = _NAME.fullmatch(code.astext())
            if found is None or isinstance(code.parent, nodes.reference | nodes.title) or found[1] not in objects:
                continue
            entry = objects[found[1]]
            link = make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, code.deepcopy())
            code.replace_self(link)
