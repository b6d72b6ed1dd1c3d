"""Random generators of this process that a function may use: their types and states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


def state_of(generator: Any) -> Any:
    """The state of a generator of Python or NumPy, to be compared."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _comparable(generator.get_state(legacy=False))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return _comparable(bits.state)


def host_random() -> tuple[Any, ...]:
    """The states of the generators of the modules `random` and `numpy.random`."""
    return random.getstate(), _comparable(np.random.get_state(legacy=False))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
