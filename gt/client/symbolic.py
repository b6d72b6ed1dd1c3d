"""Programs start without sympy.

Torch's Python shape functions ask of each size whether it is symbolic, and import sympy (0.4 s) to ask. What they ask
of plain numbers has plain answers: stand-ins give these, until something else is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch._prims_common
import torch.fx.experimental


def keep_sympy_out() -> None:
    _postpone_symbolic_shapes()
    _look_elsewhere_for_sympy(torch._prims_common.elementwise_dtypes)


def _look_elsewhere_for_sympy(function: Any) -> None:
    """The function imports sympy to ask whether something is of its classes. Nothing is before sympy is imported, so it
    gets a module that says so until then. By its code, which others have imported too."""
    stand_in = ModuleType("_gt_sympy")
    stand_in.__getattr__ = _of_sympy  # type: ignore[method-assign]
    sys.modules[stand_in.__name__] = stand_in
    names = [stand_in.__name__ if name == "sympy" else name for name in function.__code__.co_names]
    function.__code__ = function.__code__.replace(co_names=tuple(names))


def _of_sympy(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "Basic" and "sympy" not in sys.modules:
        return _Nothing
    return getattr(importlib.import_module("sympy"), name)


class _Nothing:
    """What nothing is an instance of."""


def _itself(value: int, *_: int) -> int:
    return value


_ANSWERS: dict[str, Callable[..., int]] = {
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
}
_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"
_WALKED = {"__path__", "__warningregistry__", "__wrapped__", "__test__"}  # what those ask for who look at all modules


def _postpone_symbolic_shapes() -> None:
    """Import the module without executing it, until something is asked of it that has no plain answer."""
    if _SYMBOLIC_SHAPES in sys.modules or (spec := importlib.util.find_spec(_SYMBOLIC_SHAPES)) is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Postponed
    assert isinstance(module, _Postponed)
    module.postpone()
    sys.modules[_SYMBOLIC_SHAPES] = torch.fx.experimental.symbolic_shapes = module


class _Postponed(ModuleType):
    """A module that is executed, in its place, when something is asked of it that it does not have yet. Other threads
    wait until that is done; what it imports meanwhile finds it half done, as in any import."""

    def postpone(self) -> None:
        self.__dict__.update({name: _Question(self, name) for name in _ANSWERS}, _is_executing=False)

    def __getattr__(self, name: str) -> Any:
        if name not in _WALKED:
            self.execute()
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        self.execute()
        return sorted(vars(self))

    def execute(self) -> None:
        if not _execution.acquire(timeout=_PATIENCE):
            return
        try:
            if type(self) is _Postponed and not self._is_executing:
                self._execute()
        finally:
            _execution.release()

    def _execute(self) -> None:
        self._is_executing = True
        own = {name: value for name, value in vars(self).items() if name in _ANSWERS and type(value) is not _Question}
        for name in _ANSWERS:
            vars(self).pop(name, None)
        try:
            self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        except Exception as error:
            self.postpone()  # the next one tries again
            if isinstance(error, AttributeError):  # which would be taken for a name that the module does not have
                raise ImportError(f"{self.__name__} failed while it was executed: {error}") from error
            raise
        _real.update({name: vars(self).get(name) for name in _ANSWERS})
        vars(self).update(own)  # what somebody has put there meanwhile
        del self._is_executing
        self.__class__ = ModuleType  # type: ignore[assignment]


_execution = threading.RLock()
_PATIENCE = 20.0  # seconds; whoever waits longer holds what the executing thread wants to import
_real: dict[str, Any] = {}


class _Question:
    """Stands in for a function of the module for as long as all that it is given are plain numbers."""

    def __init__(self, module: _Postponed, name: str) -> None:
        self.__name__ = name
        self._module = module
        self._answer = _ANSWERS[name]

    def __call__(self, *values: Any, **options: Any) -> Any:
        if not options and all(map(_is_plain, values)):
            return self._answer(*values)
        if self.__name__ not in _real:
            self._module.execute()
        return _real[self.__name__](*values, **options)


def _is_plain(value: object) -> bool:
    return type(value) in (bool, int) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
