"""Habits of torch that cost GT something, and how it avoids them."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch._compile
import torch._decomp.decompositions
import torch._meta_registrations
import torch._refs.fft
import torch._refs.linalg
import torch._refs.nn.functional
import torch._refs.special
import torch.fx.experimental

_MODULES = (
    torch._refs,
    torch._refs.fft,
    torch._refs.linalg,
    torch._refs.nn.functional,
    torch._refs.special,
    torch._decomp.decompositions,
    torch._meta_registrations,
)
_PLAIN = compile("", "", "exec")  # the code of something that is not a function
_LIBRARY = torch.library.Library("aten", "FRAGMENT")  # the rules in it end with it


def keep_dynamo_out() -> None:
    """Torch hides its Python shape functions from dynamo, and the first call of one imports dynamo (0.7 s) to ask for
    the function that hides it. Where nothing has imported dynamo there is nobody to hide from: each function is noted
    as its own hidden version."""
    if "torch._dynamo" in sys.modules:
        return
    tables = [vars(module) for module in _MODULES] + list(torch._decomp.global_decomposition_table.values())
    for function in [function for table in tables for function in table.values()]:
        while (wrapped := _wrapped(function)) is not None:
            if function.__code__.co_filename == torch._compile.__file__:
                wrapped.__dynamo_disable = wrapped  # where torch._compile looks
            function = wrapped


def _wrapped(function: Any) -> Any:
    """The function that one of torch's wrappers wraps, which they all call `fn`; None for any other function."""
    cells = zip(
        getattr(function, "__code__", _PLAIN).co_freevars, getattr(function, "__closure__", None) or (), strict=True
    )
    return next((cell.cell_contents for name, cell in cells if name == "fn"), None)


def keep_dtensor_out(handle: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
    """Before an op reaches the `__torch_dispatch__` of a tensor's class, torch asks whether the tensor is a DTensor,
    and the first such question imports `torch.distributed.tensor` (1 s). It does not ask where the class has a rule for
    the op. Ops that are rare (with `out=`, or of a library) get no rule: they take the longer way to the same place."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.endswith("out") and not _is_made_of_others(name):
            torch.library.register_torch_dispatch(name, handle, dispatch, lib=_LIBRARY)


def _is_made_of_others(name: str) -> bool:
    """Torch takes these ops apart before they come to a tensor's class."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def keep_sympy_out() -> None:
    """Torch's Python shape functions ask of each size whether it is symbolic, and import sympy (0.4 s) to ask. What
    they ask of plain numbers has plain answers, and where sympy is not there nothing is of its classes."""
    _postpone("sympy", {"Basic": type("Basic", (), {})})
    _postpone(
        "torch.fx.experimental.symbolic_shapes",
        {
            "expect_true": _itself,
            "guard_int": _itself,
            "guard_or_false": _itself,
            "guard_or_true": _itself,
            "guard_size_oblivious": _itself,
            "guarding_hint_or_throw": _itself,
            "has_guarding_hint": lambda size: True,
            "is_nested_int": lambda size: False,
            "statically_known_true": _itself,
            "sym_and": lambda *truths: all(truths),
            "sym_eq": lambda left, right: left == right if isinstance(left, int) else tuple(left) == tuple(right),
            "sym_or": lambda *truths: any(truths),
        },
    )


def _itself(value: int, *_: int) -> int:
    return value


def _postpone(name: str, stand_ins: dict[str, Any]) -> None:
    """Import a module without executing it, as importlib's LazyLoader does; but what has a stand-in does not count as
    using it. A function stands in for as long as all that it is given are plain numbers."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    module = _Postponed(name)
    module.__spec__, module.__file__ = spec, spec.origin
    for key, value in stand_ins.items():
        setattr(module, key, value if isinstance(value, type) else _asked(module, key, value))
    module._stand_ins = set(stand_ins)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


class _Postponed(ModuleType):
    """A module that is executed, in its place, when something is asked of it that it does not have yet."""

    _stand_ins: set[str] | None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") or (name == "__path__" and _is_package(self)):
            _execute(self)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _is_package(module: ModuleType) -> bool:
    """Whether importlib looks in it for submodules, which needs it executed."""
    return module.__spec__ is not None and module.__spec__.submodule_search_locations is not None


_execution = threading.RLock()
_PATIENCE = 20.0  # seconds; whoever waits longer holds what the executing thread wants to import


def _execute(module: _Postponed) -> None:
    """Other threads wait until it is done; what the module itself imports finds it half done, as in any import."""
    if not _execution.acquire(timeout=_PATIENCE):
        return
    try:
        stand_ins, spec = module._stand_ins, module.__spec__
        if stand_ins is None or spec is None or spec.loader is None:
            return
        module._stand_ins = None
        for name in stand_ins:
            delattr(module, name)
        if _is_package(module):
            module.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(module)
        module.__class__ = ModuleType  # type: ignore[assignment]
    except BaseException:
        sys.modules.pop(module.__name__, None)  # as after any import that fails: the next one tries again
        raise
    finally:
        _execution.release()


def _asked(module: _Postponed, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*values: Any, **options: Any) -> Any:
        if not options and all(map(_is_plain, values)):
            return answer(*values)
        _execute(module)
        return getattr(module, name)(*values, **options)

    return ask


def _is_plain(value: object) -> bool:
    return type(value) in (bool, int) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
