"""Functions of the standard library and of torch: those whose results depend on their arguments only, and the others.

A function that is not known to be of the first kind may read the state of the process, such as the time or the current
folder, and a function of `gt.compile` that uses it is not skipped. Functions of other libraries are trusted.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from gt.client.compilation.names_in_code import SHOWING
from gt.client.compilation.static_reads import is_instance, module_of

# Modules of the standard library, C versions included (`_operator`). Objects that they make are visited by themselves.
_PURE_MODULES = frozenset((
    "abc", "array", "ast", "base64", "binascii", "bisect", "builtins", "calendar", "cmath", "codecs", "collections",
    "colorsys", "contextlib", "contextvars", "copy", "copyreg", "dataclasses", "datetime", "decimal", "difflib", "enum",
    "fnmatch", "fractions", "functools", "genericpath", "graphlib", "hashlib", "heapq", "html", "inspect", "itertools",
    "json", "keyword", "logging", "math", "numbers", "operator", "pickle", "posixpath", "ntpath", "pprint", "random",
    "re", "reprlib", "sre_compile", "statistics", "string", "struct", "textwrap", "token", "traceback", "types",
    "typing", "unicodedata", "warnings", "weakref", "zlib",
))  # fmt: skip
_IMPURE_FUNCTIONS = frozenset((
    "builtins.open", "builtins.input", "builtins.breakpoint", "datetime.date.today", "datetime.datetime.now",
    "datetime.datetime.today", "datetime.datetime.utcnow", "decimal.getcontext", "inspect.currentframe",
    "inspect.stack", "inspect.trace", "genericpath.exists", "genericpath.getsize", "genericpath.isfile",
    "genericpath.isdir", "genericpath.getmtime", "genericpath.getatime", "genericpath.getctime", "genericpath.samefile",
    "posixpath.abspath", "posixpath.realpath", "posixpath.relpath", "posixpath.exists", "posixpath.lexists",
    "posixpath.islink", "posixpath.ismount", "traceback.extract_stack", "traceback.format_stack",
    "traceback.print_stack", "contextvars.copy_context", "weakref.getweakrefcount", "weakref.getweakrefs",
))  # fmt: skip
# Functions of other modules that depend on their arguments, or on something that never changes in a process.
_PURE_FUNCTIONS = frozenset((
    "gc.collect", "gc.disable", "gc.enable", "os.fspath", "os.fsdecode", "os.fsencode",
    "os.cpu_count", "os.getpid", "posix.fspath", "posix.cpu_count", "posix.getpid", "os.getenv", "os.getenvb",
    "sys.exc_info", "sys.exit", "sys.getsizeof", "sys.intern", "sys.audit", "torch._C._get_tracing_state",
    "torch._C._log_api_usage_once", "torch.cuda.current_device", "torch.cuda.device_count", "torch.cuda.empty_cache",
    "torch.cuda.is_available", "torch.cuda.is_bf16_supported", "torch.cuda.synchronize", "torch.random.manual_seed",
    "torch.random.seed", "torch.random.set_rng_state", "torch.random.fork_rng",
))  # fmt: skip
# Settings that `ambient_state` compares, as functions of torch._C.
_AMBIENT_FUNCTIONS = frozenset((
    "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "is_autocast_enabled",
    "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
    "is_autocast_cache_enabled", "is_anomaly_enabled", "_set_grad_enabled", "set_autocast_enabled",
    "set_autocast_dtype", "set_autocast_cache_enabled", "clear_autocast_cache", "autocast_increment_nesting",
    "autocast_decrement_nesting", "_get_float32_matmul_precision", "_get_deterministic_algorithms",
    "_is_any_autocast_enabled",
))  # fmt: skip
_IMPURE_TORCH = (
    "torch._C.", "torch.accelerator.", "torch.backends.", "torch.cpu.", "torch.cuda.", "torch.distributed.",
    "torch.hub.", "torch.mps.", "torch.mtia.", "torch.multiprocessing.", "torch.random.", "torch.serialization.",
    "torch.storage.", "torch.utils.data.", "torch.xpu.",
)  # fmt: skip
_PURE_TORCH = (
    "torch._C._nn.", "torch._C._linalg.", "torch._C._fft.", "torch._C._special.", "torch._C._VariableFunctions.",
    "torch.cuda.amp.",
)  # fmt: skip
# Functions without arguments whose results are compared at each call.
_COMPARED: tuple[Callable[[], Any], ...] = (
    torch.get_num_threads, torch.get_num_interop_threads, torch.initial_seed, torch.get_default_device,
    torch.get_deterministic_debug_mode, torch.is_warn_always_enabled, sys.getrecursionlimit, sys.getswitchinterval,
    os.getcwd,
)  # fmt: skip
_ENVIRONMENT = (os.getenv, os.getenvb, os.path.expandvars, os.path.expanduser)
# Functions that read attributes which the code does not name.
_READ_ALL = (
    getattr, setattr, hasattr, delattr, vars, dir, copy.copy, copy.deepcopy, dataclasses.asdict, dataclasses.astuple,
    dataclasses.replace, inspect.getmembers, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
_NAMED_IN_CODE = (getattr, setattr, hasattr, delattr)  # by these names, `names_in` looks at their arguments
_UNBOUNDED = (
    "builtins.globals", "builtins.eval", "builtins.exec", "builtins.__import__", "importlib.import_module",
)  # fmt: skip
_PICKLING = ("_pickle.dumps", "_pickle.dump", "pickle._dumps", "pickle._dump")
# Special methods that functions call, and that are not called otherwise.
_COPYING = frozenset(
    ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
)
_CALLED: tuple[tuple[tuple[Any, ...], frozenset[str]], ...] = (
    ((str, repr, ascii, format), SHOWING),
    ((copy.copy, copy.deepcopy, dataclasses.replace), _COPYING),
)


def called_methods(value: object) -> frozenset[str]:
    """The special methods of its arguments that a function or a class calls, besides those of operators."""
    if is_instance(value, types.BuiltinFunctionType) and type(value.__self__) is str:  # type: ignore[attr-defined]
        return SHOWING  # a method of a text, such as `format`
    if _is_pickling(value):
        return _COPYING
    return next((methods for callers, methods in _CALLED if _is_among(value, callers)), frozenset())


def reads_environment(function: object) -> bool:
    return _is_among(function, _ENVIRONMENT)


def reads_all_attributes(name: str, function: object) -> bool:
    """Whether a function that the code calls by `name` reads attributes that the code does not name."""
    if _is_among(function, _NAMED_IN_CODE) and name == function.__name__:  # type: ignore[attr-defined]
        return False
    return _is_among(function, _READ_ALL) or _is_pickling(function)


def is_unbounded(function: object) -> bool:
    """Whether a function reaches variables which the code does not name."""
    return home_of(function) in _UNBOUNDED


def is_compared(function: object) -> bool:
    """Whether a function has no arguments, and a result that can be compared at each call."""
    return _is_among(function, _COMPARED)


def is_distributed(function: object) -> bool:
    return home_of(function).startswith("torch.distributed.")


def is_pure(function: object) -> bool:
    """Whether the result of a function depends on its arguments only, or on state that GT compares."""
    home = home_of(function)
    if home in _PURE_FUNCTIONS:
        return True
    package = home.partition(".")[0]
    if package == "torch":
        return _is_pure_torch(home)
    if package not in sys.stdlib_module_names and package not in sys.builtin_module_names:
        return True
    return package.removeprefix("_") in _PURE_MODULES and home not in _IMPURE_FUNCTIONS


def _is_pure_torch(home: str) -> bool:
    parent, _, name = home.rpartition(".")
    if home.startswith(_PURE_TORCH):
        return name != "from_file"
    return (parent == "torch._C" and name in _AMBIENT_FUNCTIONS) or not home.startswith(_IMPURE_TORCH)


def home_of(function: Any) -> str:
    """The module and name of a function of a library. Empty for a method of an object, which is visited itself."""
    if is_instance(function, types.FunctionType):
        return f"{function.__globals__.get('__name__')}.{function.__qualname__}"
    owner = function.__self__
    if owner is None:  # torch's functions on tensors
        return f"torch._C._VariableFunctions.{function.__name__}"
    if is_instance(owner, types.ModuleType):
        module = "builtins" if owner.__name__ == "_io" else owner.__name__
        return f"{module}.{function.__name__}"
    return f"{module_of(owner)}.{owner.__qualname__}.{function.__name__}" if is_instance(owner, type) else ""


def _is_pickling(function: object) -> bool:
    return is_instance(function, (types.FunctionType, types.BuiltinFunctionType)) and home_of(function) in _PICKLING


def _is_among(function: object, functions: tuple[Any, ...]) -> bool:
    return any(function is each for each in functions)
