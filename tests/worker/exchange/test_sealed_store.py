"""Values that workers write to their store, and the proofs of members of a new group."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from gt.worker.exchange.distributed_private import make_gloo_group
from gt.worker.exchange.group_backends import GlooGroup
from gt.worker.exchange.sealed_store import SealedStore, hidden_prefix

SHORT = timedelta(seconds=20)


def test_a_value_is_read_only_if_a_worker_with_the_token_wrote_it_under_its_key():
    raw = dist.HashStore()
    store, stranger = SealedStore(raw, "token", "x"), SealedStore(raw, "guess", "x")
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"])
    assert not stranger.check(["key"])
    stranger.set("key", "false")
    raw.set(store._name("key"), raw.get(stranger._name("key")))
    with pytest.raises(RuntimeError, match="'key' in the store of the workers was not written by one of them"):
        store.get("key")
    store.set("key", "value")
    raw.set(store._name("other"), raw.get(store._name("key")))  # a true value under another key
    with pytest.raises(RuntimeError, match="was not written"):
        store.get("other")
    raw.set(store._name("short"), b"")
    with pytest.raises(RuntimeError, match="was not written"):
        store.get("short")


def test_who_lists_and_reads_the_store_learns_nothing():
    raw = dist.HashStore()
    store = SealedStore(raw, "token", "x")
    for _ in range(2):
        store.set("failure of worker 1", "a secret text")
        data = raw.get(store._name("failure of worker 1"))
        assert b"secret" not in data and b"text" not in data and "failure" not in store._name("failure of worker 1")
    assert store.get("failure of worker 1") == b"a secret text"
    store.set("empty", b"")
    assert store.get("empty") == b"", "and what has no bytes has none"
    store.set("zeros", bytes(5))
    assert store.get("zeros") == bytes(5)


def test_the_prefix_of_keys_does_not_tell_the_token():
    assert hidden_prefix("token") != hidden_prefix("other")
    assert "token" not in hidden_prefix("token")


@pytest.mark.parametrize(("tokens", "is_group"), [(("t", "t"), True), (("t", "guess"), False)])
def test_a_group_is_made_only_of_members_that_know_the_token(tokens, is_group):
    raw = dist.HashStore()

    def join(rank):
        group = GlooGroup(make_gloo_group(raw, rank, 2, "127.0.0.1", SHORT, SHORT))
        SealedStore(raw, tokens[rank], "x").prove_membership(group, rank, ["a", "b"], SHORT)

    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(join, rank) for rank in (0, 1)]
        for each in joining:
            if is_group:
                each.result(30)
            else:
                with pytest.raises(RuntimeError, match="is not a worker that the dispatcher has introduced"):
                    each.result(30)
