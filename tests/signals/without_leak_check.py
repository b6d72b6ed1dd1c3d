"""Overrides the leak check after each test, for modules whose hundreds of tests only make records."""

import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind():
    return
