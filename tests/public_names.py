"""The public names of GT, for tests of their documentation."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import gt

_PACKAGE = Path(gt.__file__).parent
_MAIN = 'if __name__ == "__main__":'
INTERNAL = {"gt.worker.compilation"}  # a process that workers start
COMMANDS = sorted(
    {
        ".".join(path.with_suffix("").relative_to(_PACKAGE.parent).parts).removesuffix(".__main__")
        for path in _PACKAGE.rglob("*.py")
        if _MAIN in path.read_text()
    }
    - INTERNAL
)


def public_names() -> list[str]:
    """All names of `gt`, and those of its public modules. What has two names is listed under the first one."""
    names = [f"gt.{name}" for name in gt.__all__]
    modules = [name for name in names if isinstance(value_of(name), ModuleType)]
    names += [f"{module}.{name}" for module in modules for name in _names_of(value_of(module))]
    first = {id(value_of(name)): name for name in reversed(names)}
    return [name for name in names if first[id(value_of(name))] == name]


def _names_of(module: ModuleType) -> list[str]:
    """`__all__` of a module, or else the classes and functions that it defines."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and callable(value)
    ]
    return list(vars(module).get("__all__", defined))  # other names of the module may be torch's


def value_of(name: str) -> Any:
    value: Any = gt
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def docstrings_of(name: str) -> dict[str, str]:
    """The docstring of a public name, and of its own methods and properties if it is a class of GT."""
    value = value_of(name)
    found = {name: inspect.getdoc(value) or ""}
    for member, attribute in vars(value).items() if isinstance(value, type) else ():
        text = getattr(attribute, "__doc__", None)
        if not member.startswith("_") and text and ">>>" in text and _is_of_gt(attribute):
            found[f"{name}.{member}"] = inspect.cleandoc(text)
    return found


def _is_of_gt(attribute: Any) -> bool:
    function = attribute.fget if isinstance(attribute, property) else attribute
    return str(getattr(function, "__module__", "")).startswith("gt.")


def main_module(command: str) -> ModuleType:
    module = importlib.import_module(command)
    return importlib.import_module(f"{command}.__main__") if hasattr(module, "__path__") else module
