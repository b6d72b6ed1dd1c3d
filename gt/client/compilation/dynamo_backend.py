"""The entry point under which torch finds the backend "gt" in a program that has not used GT before.

Such a program has no tensors on GT, and torch.compile would run its code uncompiled. So this module raises an error
that says so. In a program that uses GT, `torch.compile(model, backend="gt")` is `gt.compile(model)`.
"""

from __future__ import annotations

from typing import NoReturn

from gt.core.errors import CompileError


def __getattr__(name: str) -> NoReturn:
    raise CompileError(
        'torch.compile(backend="gt") is for models on GT, and this program has none yet: `import gt`, move the model '
        "by gt.to(model), and call gt.compile(model)"
    )
