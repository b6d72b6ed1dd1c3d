"""The packages of the design and the directions of their imports, read from the source."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gt

ROOT = Path(gt.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
SENDERS = "core sharding signals wire version"

# What a package may import of gt, itself aside. A file of gt/ itself is a package of its own.
ALLOWED = {
    "version": "",
    "core": "",
    "sharding": "core",
    "signals": "core sharding",
    "wire": "core version",
    "client": f"{SENDERS} garbage_collection lazy_launch",
    "nn": "client core optim",
    "optim": "client nn",
    "distributed": "client core sharding",
    "data": "client core sharding",
    "debug": "client core monitor sharding",
    "signal": "client core",
    "ttnn": "client core debug distributed sharding",
    "garbage_collection": "",
    "lazy_launch": "",
    "keys": "core wire",
    "dispatcher": SENDERS,
    "worker": "core sharding wire version",
    "monitor": "core sharding wire",
    "web_dashboard": "core monitor sharding version wire",
    "scripts": "__init__ core monitor version wire",
}
SEE_ALL = {"launch", "server"}
WITHOUT_TORCH = (
    "core",
    "sharding",
    "signals",
    "wire",
    "dispatcher",
    "monitor",
    "web_dashboard",
    "server",
    "version",
    "garbage_collection",
    "lazy_launch",
    "keys",
    "__init__",
)

COMMANDS = ["gt/sharding/coverage.py"]  # run by a person to compare the rules with torch; nothing imports it

# Decisions are made without sockets, clocks or threads; acting is the business of the servers.
PURE = (
    "core", "sharding",
    "signals/checks.py", "signals/config.py", "signals/document.py", "signals/parser.py", "signals/policy.py",
    "signals/resolution.py", "signals/schema.py",
    "dispatcher/reports.py", "dispatcher/dispatcher.py", "dispatcher/instruction_errors.py", "dispatcher/fair_queue.py",
    "dispatcher/gradient_buckets.py",
    "dispatcher/group_store.py", "dispatcher/instructions.py", "dispatcher/membership.py",
    "dispatcher/op_definitions.py", "dispatcher/op_instructions.py", "dispatcher/step_coordinator.py",
    "dispatcher/message_descriptions.py", "dispatcher/message_queue.py",
    "core/message_fields.py", "dispatcher/plan_cache.py", "dispatcher/planner.py", "dispatcher/rejection.py",
    "dispatcher/state_records.py",
    "dispatcher/redistribution.py", "dispatcher/reports.py", "dispatcher/requests.py", "dispatcher/state.py",
    "dispatcher/state_records.py", "dispatcher/tensor_losses.py",
    "dispatcher/tensor_records.py", "dispatcher/tensor_tables.py", "dispatcher/state_records.py",
    "dispatcher/transactions.py", "dispatcher/undo_log.py",
    "worker/executor.py", "worker/op_runner.py", "worker/bound_op_programs.py", "worker/moves.py",
    "worker/scope_table.py", "worker/status_reports.py", "worker/tensor_transfers.py",
)  # fmt: skip
IMPURE = {"zmq", "socket", "time", "datetime", "threading", "subprocess", "asyncio", "select", "signal"}


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), str(path))


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path):
    return str(path.relative_to(ROOT.parent))


def files_of(place):
    return [path for path in FILES if name_of(path).removesuffix(".py").startswith(f"gt/{place.removesuffix('.py')}")]


def imported(tree):
    """Dotted names of what is imported anywhere in a tree; a name taken from a module counts as a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def gt_packages_imported(path):
    """`import gt` counts as its `__init__`, which imports everything on demand."""
    return {[*name.split("."), "__init__"][1] for name in imported(parse(path)) if f"{name}.".startswith("gt.")}


def packages_imported(path):
    """Those that are imported when the file runs."""
    body = [node for node in parse(path).body if not is_type_checking(node)]
    return {name.split(".")[0] for name in imported(ast.Module(body, []))}


def names_in(path):
    return {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def gt_packages():
    return sorted({package_of(path) for path in FILES} - {"__init__"})


@pytest.mark.parametrize("package", [package for package in gt_packages() if package not in SEE_ALL])
def test_a_package_imports_what_the_design_allows(package):
    allowed = {package, *ALLOWED[package].split()}
    wrong = {name_of(path): gt_packages_imported(path) - allowed for path in FILES if package_of(path) == package}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_gt_imports_its_packages_lazily():
    body = [node for node in parse(ROOT / "__init__.py").body if not is_type_checking(node)]
    names = {name for name in imported(ast.Module(body, [])) if name.startswith("gt")}
    assert names == {
        "gt.garbage_collection.paused_collection",
        "gt.lazy_launch.load_launcher",
        "gt.version.__version__",
    }


def test_type_checkers_see_the_public_names():
    (block,) = [node for node in parse(ROOT / "__init__.py").body if is_type_checking(node)]
    names = {name.split(".")[-1] for name in imported(block) if name.startswith("gt.")} - {"*"}
    assert names | {"__version__"} == set(gt.__all__)


def test_every_public_name_can_be_read():
    assert [name for name in gt.__all__ if not hasattr(gt, name)] == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_package_does_without_torch(package):
    assert files_of(package)
    users = [name_of(path) for path in files_of(package) if "torch" in packages_imported(path)]
    assert users in ([], COMMANDS)


@pytest.mark.parametrize("place", PURE)
def test_decisions_are_made_without_sockets_clocks_and_threads(place):
    found = {name_of(path): packages_imported(path) & IMPURE for path in files_of(place)}
    assert found and not any(found.values()), found


def test_imports_are_at_the_top():
    """A late import means that the layer is wrong. What only a type checker reads may be imported for it alone."""
    late = []
    for path in FILES:
        body = parse(path).body
        top = [child for node in body for child in (node.body if is_type_checking(node) else [node])]
        everywhere = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        late += [f"{name_of(path)}:{node.lineno}" for node in everywhere if node not in top]
    assert late == []


def test_imports_are_absolute():
    nodes = [(path, node) for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom)]
    assert [f"{name_of(path)}:{node.lineno}" for path, node in nodes if node.level] == []


def test_only_the_entry_imports_by_name():
    users = {
        name_of(path) for path in FILES if "importlib" in packages_imported(path) or "__import__" in names_in(path)
    }
    assert users == {"gt/__init__.py", "gt/launch/__init__.py", "gt/lazy_launch.py", "gt/core/environment.py"}


TORCH_PATCHES = ROOT / "client" / "torch_patches"
OUTSIDE_PATCHES = [path for path in FILES if package_of(path) == "client" and TORCH_PATCHES not in path.parents]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_defined(tree):
    """Functions, classes, variables, attributes and slots of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_client_reaches_into_torch_only_in_torch_patches():
    """A private name that the client does not define itself is torch's. Names of ops in `torch.ops.aten` are not."""
    own = {name for path in OUTSIDE_PATCHES for name in names_defined(parse(path))}
    found = []
    for path in OUTSIDE_PATCHES:
        modules = [name for name in imported(parse(path)) if name.startswith("torch.")]
        found += [f"{name_of(path)}: {name}" for name in modules if any(map(is_private, name.split(".")))]
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                text = dotted(node)
                if not text.startswith(("aten.", "torch.ops.aten.", "sys.", "_thread.")):
                    found.append(f"{name_of(path)}:{node.lineno}: {text}")
    assert found == []


@pytest.mark.parametrize("path", sorted(TORCH_PATCHES.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_torch_patch_has_a_test_of_its_name(path):
    assert (ROOT.parent / "tests" / "client" / "torch_patches" / f"test_{path.name}").is_file()


def private_names_of_torch(path):
    """Uses of `torch._x`, `torch.x._y` and `from torch.x import _y`, by line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            dotted = ast.unparse(node)
            if dotted.startswith(("torch.", "dist.")) and dotted.replace(".", "").replace("_", "").isalnum():
                yield f"{name_of(path)}:{node.lineno}: {dotted}"
    for name in imported(parse(path)):
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            yield f"{name_of(path)}: {name}"


def test_workers_use_private_names_of_torch_in_one_place():
    """Each of them has a test that says what breaks where torch changes it."""
    users = [path for path in files_of("worker/") if not path.name.endswith("_private.py")]
    assert [use for path in users for use in private_names_of_torch(path)] == []


def test_no_module_unpickles_or_evaluates_data():
    forbidden = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "eval", "exec"}
    found = {name_of(path): (packages_imported(path) | names_in(path)) & forbidden for path in FILES}
    found.pop(name_of(ROOT / "client" / "compilation" / "object_state.py"))  # pickles, to hash the bytes
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
def test_a_package_has_a_readme_of_one_screen(package):
    readme = ROOT / package / "README.md"
    assert readme.is_file()
    assert 3 <= len(readme.read_text().splitlines()) <= 60


def loaded_by(statement):
    """The modules that a new process has loaded after a statement."""
    run = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("gt", "torch numpy matplotlib"),
        ("gt.server.__main__", "torch uvicorn starlette prometheus_client"),
        ("gt.web_dashboard.http_server", "torch matplotlib"),
        ("gt.dispatcher.server", "torch"),
        ("gt.sharding.lowering", "torch"),
        ("gt.signals.registry", "torch numpy"),
        ("gt.signals.__main__", "torch"),
        ("gt.monitor.log_rows", "torch numpy"),
        ("gt.scripts.trace", "torch matplotlib"),
        ("gt.scripts.visualize", "torch matplotlib"),
        ("gt.wire.socket_channel", "torch numpy"),
        ("gt.launch.ray_actors", "torch numpy ray"),
        ("gt.launch.launched_process", "torch numpy"),
        ("gt.launch.slurm_job", "torch numpy"),
        ("gt.launch.kubernetes", "torch numpy"),
        ("gt.launch.sessions", "ray dask distributed"),
        ("gt.launch.ray_cluster", "ray"),
        ("gt.launch.dask_cluster", "dask distributed"),
    ],
)
def test_a_dispatcher_runs_on_a_machine_without_torch(module, without):
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not {*without.split()} & loaded


def test_importing_gt_loads_no_package_of_gt():
    loaded = {name for name in loaded_by("import gt") if name.startswith("gt")}
    assert loaded == {"gt", "gt.garbage_collection", "gt.lazy_launch", "gt.version"}


@pytest.mark.parametrize("package", sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("README.md")))
def test_a_packages_readme_names_its_files(package):
    """Those of folders within that have no README of their own too."""
    text = (ROOT / package / "README.md").read_text()
    folders = [ROOT / package, *[path for path in (ROOT / package).iterdir() if not (path / "README.md").is_file()]]
    files = [path.name for folder in folders for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in files if f"`{name}`" not in text] == []
