"""The memory of the machine, or of the container."""

import psutil
import pytest

from gt.worker.engines import host_memory_size as subject
from gt.worker.engines.numpy_engine import NumPyEngine
from gt.worker.engines.pytorch_engine import PyTorchEngine


@pytest.mark.parametrize(
    ("text", "expected"), [("4096\n", 4096), ("max\n", None), ("9" * 30, None), (None, None)], ids=str
)
def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch, text, expected):
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(subject, "_CONTAINER_LIMITS", (file,))
    assert subject.host_memory() == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize("engine", [PyTorchEngine("cpu"), NumPyEngine()], ids=lambda engine: type(engine).__name__)
def test_engines_of_the_cpu_have_the_memory_of_the_machine(engine):
    assert engine.memory() == subject.host_memory() > 1 << 20
