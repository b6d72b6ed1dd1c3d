"""For modules whose tests make records and nothing else: there is nothing to search for after each of hundreds."""

import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind():
    return
