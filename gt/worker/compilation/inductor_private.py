"""Private parts of torch that the compile server uses. tests/worker/compilation/test_inductor_private.py tries them.

Importing this module imports torch's compiler, which takes seconds: workers do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch._inductor.config
import torch._inductor.cpu_vec_isa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def fake_mode() -> AbstractContextManager[Any]:
    """Tensors that are made in this context have no memory."""
    return FakeTensorMode()


def trace_function(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The aten ops that a function runs on tensors without memory, as a graph."""
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[no-any-return]


def find_vector_instructions() -> None:
    """Let Inductor try which vector instructions compiler and CPU have. It remembers them; processes that are forked
    afterwards do not try again."""
    torch._inductor.cpu_vec_isa.pick_vec_isa()


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int, directory: Path) -> Path:
    """Compile a graph to a shared library in a directory (AOTInductor)."""
    options: dict[str, Any] = {
        "aot_inductor.output_path": str(directory / "unit.so"),
        "compile_threads": 1,
        "cpp.threads": threads,
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,  # torch runs it for a checksum
        "emulate_precision_casts": True,
    }
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):  # not in torch 2.10
        options["aot_inductor.enable_line_tables"] = False
    with torch.no_grad():
        return Path(torch._inductor.aot_compile(graph, tuple(inputs), options=options))  # type: ignore[arg-type]
