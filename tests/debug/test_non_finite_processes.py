"""`gt.debug.find_nan` on worker processes: of this program, and of a server."""

from tests.debug.test_non_finite import check_shards


def test_parts_and_exchanges_are_searched(two_processes):
    check_shards()
