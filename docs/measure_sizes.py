"""Measures the size of `gt/`, so that growth is seen: `make sizes` prints it with the change since docs/sizes.md was
written, and `python docs/measure_sizes.py --write` writes that page."""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "sizes.md"
HEAD = """# How large is GT?

Files and lines of Python in `gt/`, written by `python docs/measure_sizes.py --write`; `make sizes` prints what they are
now, with the change. A fragment is a file that one other file of its package uses, and nobody else.

| what | size |
|---|---|
"""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    return module.rpartition(".")[0]


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """The modules of GT that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from modules & {node.module, *names}


def measure() -> dict[str, int]:
    """All figures, by their names."""
    paths = {module_of(path): path for path in sorted((ROOT / "gt").rglob("*.py"))}
    texts = {module: path.read_text() for module, path in paths.items()}
    lines = {module: text.count("\n") for module, text in texts.items()}
    trees = {module: ast.parse(text) for module, text in texts.items()}
    users = defaultdict(set)
    for module, tree in trees.items():
        for used in imported(tree, set(paths)):
            users[used].add(module)
    named = [module for module, path in paths.items() if not path.name.startswith("__")]
    fragments = [m for m in named if len(users[m]) == 1 and package_of(next(iter(users[m]))) == package_of(m)]
    twice = [name for name, count in Counter(paths[module].name for module in named).items() if count > 1]
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    packages: Counter[str] = Counter()
    for module, count in lines.items():
        folder = paths[module].parent.relative_to(ROOT / "gt").parts
        packages[folder[0] if folder else ""] += count
    return {
        "files": len(paths),
        "lines": sum(lines.values()),
        "lines of a file, median": round(median(lines.values())),
        "lines of a file, nine of ten": round(quantiles(lines.values(), n=10)[-1]),
        "lines of a function, median": round(median(functions)),
        "lines of a function, most": max(functions),
        "fragments": len(fragments),
        "names of files used twice": len(twice),
        **{f"lines of gt/{name}": count for name, count in sorted(packages.items())},
    }


def stored() -> dict[str, int]:
    """The figures of the page, by their names."""
    text = PAGE.read_text() if PAGE.exists() else ""
    return {name: int(size.replace(",", "")) for name, size in re.findall(r"^\| (.+?) \| ([0-9,]+) \|$", text, re.M)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/sizes.md")
    sizes, before = measure(), stored()
    if parser.parse_args().write:
        PAGE.write_text(HEAD + "".join(f"| {name} | {size:,} |\n" for name, size in sizes.items()))
    for name, size in sizes.items():
        change = size - before.get(name, size)
        sys.stdout.write(f"{name:32} {size:8,}" + (f"  {change:+,}" if change else "") + "\n")


if __name__ == "__main__":
    main()
