from collections.abc import Iterator

import pytest

import gt
from gt.signals.registry import registry


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    """Each test starts and ends with no signals."""
    registry.clear()
    yield
    registry.clear()


@pytest.fixture
def four_workers() -> Iterator[None]:
    gt.init(workers=4, mode="virtual")
    yield
    gt.shutdown()
