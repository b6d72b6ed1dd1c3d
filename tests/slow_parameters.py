"""Parameters of tests of which a part runs in `make test`, and all in `make test-slow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some_of(values: Sequence[Any], every: int) -> list[Any]:
    """Parameters of a test, all slow but the first of `every` so many."""
    return [
        value if place % every == 0 else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]
