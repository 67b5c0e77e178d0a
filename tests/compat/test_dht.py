"""Values of the DHT, over peers without sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

import dlc.compat.hivemind as hivemind
from dlc.compat.hivemind import DHT, DecentralizedAverager, get_dht_time
from dlc.compat.hivemind.averaging.directory import REFRESH_S, TTL_S, Directory, Entry
from dlc.compat.hivemind.dht.storage import Record, hidden_until, is_plain, newest, notice_key
from dlc.compat.hivemind.optim.progress_tracker import ProgressTracker
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import SwarmClosed, UsageError
from tests.compat.fake_swarm import Town


def two() -> tuple[Town, DHT, DHT]:
    town = Town()
    return town, DHT(start=True, p2p=town.peer()), DHT(start=True, p2p=town.peer())


def test_a_value_is_seen_by_all_with_its_end() -> None:
    _, a, b = two()
    end = get_dht_time() + 60
    assert a.store(("key", 1), [1, "x", (2, 3)], end)
    found = b.get(("key", 1), latest=True)
    assert found == ([1, "x", (2, 3)], end)
    value, until = found
    assert value == found.value == [1, "x", (2, 3)] and until == found.expiration_time == found[1]
    assert found["value"] == value and found["expiration_time"] == until
    assert b.get("another key") is None


def test_arguments_of_hivemind_are_taken_where_they_change_nothing_and_else_refused() -> None:
    dht = DHT(start=True, p2p=Town().peer(), parallel_rpc=4, cache_locally=False, no_listen=False)
    dht.wait_until_ready()
    for name in ("no_listen", "node_id", "authorizer"):
        with pytest.raises(hivemind.NotOffered, match=name):
            DHT(start=False, **{name: 1})
    with pytest.raises(TypeError, match="initial_pears"):
        DHT(start=False, initial_pears=[])
    assert dht.store("k", 1, get_dht_time() + 10, exclude_self=False, await_all_replicas=True)
    assert dht.get("k", latest=True, num_workers=2, beam_size=4, sufficient_expiration_time=0.0).value == 1
    for act in (lambda: dht.get("k", num_wrokers=2), lambda: dht.store("k", 1, get_dht_time() + 20, beam_size=4)):
        with pytest.raises(TypeError, match="has no argument"):
            act()
    with pytest.raises(UsageError, match=r"the value for 'big' takes 7\d{4} bytes"):
        dht.store("big", b"x" * 70_000, get_dht_time() + 10)
    with pytest.raises(UsageError, match="not started"):
        DHT(start=False).wait_until_ready()


def test_of_two_values_the_one_that_ends_later_counts() -> None:
    _, a, b = two()
    now = get_dht_time()
    assert a.store("k", "late", now + 100)
    assert not b.store("k", "early", now + 50), "a value that ends earlier must not replace it"
    assert b.get("k").value == "late"
    assert b.store("k", "later", now + 200) and a.get("k").value == "later"


def test_expired_values_are_neither_stored_nor_found() -> None:
    town, a, b = two()
    assert not a.store("k", 1, get_dht_time() - 1)
    began = time.monotonic()
    assert a.store("k", 1, get_dht_time() + 100)
    assert b.get("k").value == 1
    ((where, (raw, until, writer)),) = town.posted.items()
    assert began + 99 < until <= time.monotonic() + 100, "it ends so much later by every peer's own clock"
    town.posted[where] = (raw, time.monotonic(), writer)
    assert b.get("k") is None


def test_what_is_asked_for_as_a_future_can_be_awaited() -> None:
    _, a, b = two()

    async def act() -> tuple[object, ...]:
        stored = await a.store("k", 1, get_dht_time() + 100, return_future=True)
        found = await b.get("k", return_future=True)
        first, second = (
            DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="mine", min_matchmaking_time=100.0)
            for dht in (a, b)
        )
        _, gathered = await asyncio.gather(first.step(gather=1, wait=False), second.step(gather=2, wait=False))
        loaded = await first.load_state_from_peers(wait=False)
        return stored, found.value, set(gathered.values()), len(loaded)

    assert asyncio.run(act()) == (True, 1, {1, 2}, 2)


def test_subkeys_are_a_dict_of_values() -> None:
    _, a, b = two()
    now = get_dht_time()
    assert a.store("k", 1, now + 100, subkey="a") and b.store("k", 2, now + 50, subkey=b"b")
    found = a.get("k")
    assert found.expiration_time == now + 100
    assert {subkey: item.value for subkey, item in found.value.items()} == {"a": 1, b"b": 2}
    assert not b.store("k", 3, now + 90, subkey="a")
    assert b.store("k", 3, now + 110, subkey="a") and a.get("k").value["a"].value == 3
    assert b.store("k", "whole", now + 500) and a.get("k").value == "whole"


def test_what_would_not_be_seen_beside_subkeys_or_a_plain_value_is_not_stored() -> None:
    """It was told as stored, and `get` gave the other."""
    dht, now = DHT(start=True, p2p=Town().peer()), get_dht_time()
    assert dht.store("k", 1, now + 50)
    assert not dht.store("k", 2, now + 50, subkey="a") and dht.get("k").value == 1
    assert dht.store("k", 2, now + 60, subkey="a")
    assert dht.store("k", 3, now + 40, subkey="b"), "there is a dict now"
    assert not dht.store("k", 4, now + 55) and not dht.store("k", 4, now + 60)
    assert {subkey: value.value for subkey, value in dht.get("k").value.items()} == {"a": 2, "b": 3}
    assert dht.store("k", 4, now + 70) and dht.get("k").value == 4


def test_subkeys_that_a_value_has_replaced_are_not_in_the_dict_that_follows() -> None:
    """They were again, as soon as another subkey ended later than that value."""
    for ends_whole in (0, 1):  # who stores the value without a subkey
        _, *peers = two()
        now = get_dht_time()
        assert peers[0].store("k", 1, now + 100, subkey="old") and peers[0].store("other", 1, now + 100, subkey="old")
        assert peers[ends_whole].store("k", "whole", now + 200)
        assert peers[0].store("k", 2, now + 300, subkey="new") and peers[0].store("k", 3, now + 50, subkey="short")
        assert {subkey: item.value for subkey, item in peers[1].get("k").value.items()} == {"new": 2, "short": 3}
        assert peers[0].store("k", 4, now + 400) and not peers[0].store("k", 5, now + 300, subkey="new")
        assert peers[1].store("k", 6, now + 500, subkey="of another")
        assert set(peers[0].get("k").value) == {"of another"} and set(peers[1].get("other").value) == {"old"}


def test_equal_ends_are_decided_alike_on_all_peers_and_a_value_under_another_key_is_none() -> None:
    plain, one, other = (Record("k", subkey, value, 5.0) for subkey, value in ((None, 1), ("a", 2), ("a", 3)))
    for found in ([plain, one], [one, plain]):
        assert newest(found) == (1, 5.0) and is_plain(found) and hidden_until(found, "a") == 5.0
    assert newest([one, other]) == newest([other, one])
    town, a, b = two()
    assert a.store("other", 1, get_dht_time() + 60)
    ((_, key),) = town.posted
    b.swarm.post(key, MSGPackSerializer.dumps(["wrong", None, MSGPackSerializer.dumps(2), 1e12]), 60)
    assert a.get("other").value == 1


def test_a_value_is_kept_for_seven_days_at_most(caplog: pytest.LogCaptureFixture) -> None:
    town, a, _ = two()
    assert a.store("k", 1, get_dht_time() + 30 * 86400)
    ((_, until, _),) = town.posted.values()
    assert until <= time.monotonic() + 7 * 86400 and "kept for 7 days" in caplog.text


def test_what_can_be_stored_can_be_found() -> None:
    dht, now = DHT(start=True, p2p=Town().peer()), get_dht_time()
    assert dht.store("k", {frozenset((1,)): 2}, now + 50, subkey=frozenset((3, 4)))
    assert dht.get("k").value[frozenset((3, 4))].value == {frozenset((1,)): 2}
    with pytest.raises(TypeError, match="unhashable"):
        dht.store("k", 1, now + 60, subkey=["a"])


def test_a_future_is_given_where_it_is_asked_for() -> None:
    _, a, b = two()
    assert a.store("k", 1, get_dht_time() + 60, return_future=True).result() is True
    assert b.get("k", return_future=True).result().value == 1


def test_what_is_no_record_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    town, a, b = two()
    a.store("k", 1, get_dht_time() + 60)
    (key,) = (key for _, key in town.posted)
    value, nan = MSGPackSerializer.dumps(2), float("nan")
    wrong = [
        ["k", None, 2, 1e12],
        ["k", None, value, "soon"],
        ["k", None, value, "9e12"],
        ["k", None, value, nan],
        ["k", [1], value, 1e12],
        ["k", None, b"\xc1", 1e12],
    ]
    for raw in (b"\xc1", b"\x93\x01\x02\x03", *map(MSGPackSerializer.dumps, wrong)):
        b.swarm.post(key, raw, 60)
        assert a.get("k").value == 1
    assert str(b.peer_id)[:8] in caplog.text


def test_coroutines_and_ipfs_are_refused_by_name() -> None:
    _, a, _ = two()
    with pytest.raises(hivemind.NotOffered, match="run_coroutine"):
        a.run_coroutine(None)  # type: ignore[arg-type]
    with pytest.raises(hivemind.NotOffered, match="use_ipfs"):
        DHT(start=False, use_ipfs=True)
    with pytest.raises(TypeError):
        DHT(start=False, no_such_option=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        DHT("1.2.3.4:1", start=False)
    with pytest.raises(UsageError, match="not started"):
        DHT(start=False).get("k")


def test_shutdown_ends_it_once_and_for_all() -> None:
    town, a, b = two()
    with b:
        assert b.is_alive() and b.get_visible_maddrs()[0].address == "127.0.0.1:4600"
    b.shutdown()
    assert not b.is_alive() and len(town.peers) == 1
    with pytest.raises(SwarmClosed):
        b.store("k", 1, get_dht_time() + 60)


def test_what_is_read_again_and_again_and_is_of_no_use_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A peer of another version would fill the logs of all: notices stay for days."""
    _, a, b = two()
    for key in (notice_key("k", None), "averagers/run/", "progress/run/"):
        a.swarm.post(key, MSGPackSerializer.dumps([1, 2]), 60.0)
    directory = Directory(b.swarm, "run", Entry("", 0, ""))
    tracker = ProgressTracker(b, "run", 100, start=True)
    for _ in range(3):
        assert b.get("k") is None and not directory.others() and not tracker.progress_now().num_peers
    assert len([r for r in caplog.records if r.name.startswith("dlc.compat") and r.args == (a.swarm.id[:8],)]) == 3


def test_an_entry_that_could_not_be_posted_is_posted_by_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a peer has as many notices as it may, it can post no other."""
    _, a, b = two()
    mine, theirs = (Directory(dht.swarm, "run", Entry("", 0, "")) for dht in (a, b))

    def refuse(*args: object) -> None:
        raise UsageError("no room")

    with monkeypatch.context() as full, pytest.raises(UsageError, match="no room"):
        full.setattr(a.swarm, "post", refuse)
        mine.change(round=3)
    mine.change(round=3)
    assert [entry.round for entry in theirs.others().values()] == [3]


def test_an_entry_whose_posting_was_interrupted_is_posted_by_the_change_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had gone out when Ctrl-C came: the peer was one that loads to all others, for good."""
    _, a, b = two()
    mine, theirs = (Directory(dht.swarm, "run", Entry("", 0, "")) for dht in (a, b))
    post = a.swarm.post

    def interrupted(*args: Any) -> None:
        post(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(a.swarm, "post", interrupted)
        mine.change(loading=True)
    assert [entry.loading for entry in theirs.others().values()] == [True]
    mine.change(loading=False)
    assert [entry.loading for entry in theirs.others().values()] == [False]


def test_an_entry_is_posted_again_long_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or who averages without a change for a week would be met by nobody any more."""
    _, a, _ = two()
    mine, posted = Directory(a.swarm, "run", Entry("", 0, "")), list[object]()
    with monkeypatch.context() as patch:
        patch.setattr(a.swarm, "post", lambda *args: posted.append(args))
        mine.refresh()
        assert not posted
        mine._posted -= REFRESH_S
        mine.refresh()
    assert len(posted) == 1 and REFRESH_S < TTL_S / 2


def test_the_eldest_of_two_averagers_is_the_one_that_came_first_whatever_their_ids() -> None:
    _, a, b = two()
    first, second = (Directory(dht.swarm, "run", Entry("", 0, "", priority=0.0)) for dht in (b, a))
    assert a.swarm.id < b.swarm.id and first.is_reference() and not second.is_reference()
