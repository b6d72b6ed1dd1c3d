import pytest


@pytest.fixture(autouse=True)
def _no_signals(no_signals: None) -> None:
    """For every test of this package."""
