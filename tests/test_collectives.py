"""What peers compute together call by call, beyond the all-reduce, and who is told of whom; over real sockets."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import dlc
from dlc import collectives, handles
from dlc.comm.entries import LogState, SavedLog
from dlc.comm.events import ContributionDropped, MemberUp
from dlc.comm.grid import USUAL_ELEMS_MIN, Grid
from dlc.comm.ids import Voter
from dlc.comm.wire import pack
from dlc.errors import RoundLost, RoundTimeout, SwarmClosed, UsageError
from dlc.exact import Exact
from dlc.gossip import Gossip
from dlc.handles import Announced
from dlc.mesh import Group
from dlc.moshpit import Moshpit
from dlc.peer import MemberChange, Peer
from dlc.report import Missing, RoundReport, Share
from dlc.watching import MemberWatch
from tests.helpers import wait_until
from tests.swarm import JOIN_S, PATIENT, QUICK, ROUND_S, swarm, together

LATE_S = 5.0
"""An owner waits so long for those who were not ready in time; PATIENT ones wait half a minute."""


def awkward(seed: int) -> dict[str, Tensor]:
    """All that an average of fp32 would spoil: integers, doubles, NaN, Inf, -0, other strides, no elements."""
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(3, 5, generator=g).t(),
        "half": torch.randn(7, generator=g).bfloat16(),
        "double": torch.randn(2, generator=g, dtype=torch.float64),
        "count": torch.tensor(2**62 + seed),
        "mask": torch.rand(5, generator=g) > 0.5,
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45 * seed]),
        "none": torch.empty(0, 3),
    }


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def test_a_round_that_the_others_decided_while_this_peer_was_away_is_lost_and_the_next_one_is_not() -> None:
    """It was SwarmClosed, as after a leave, so that callers ended for a cut of a minute."""
    with swarm(2) as peers:
        mine = torch.ones(3)
        call = peers[0].all_reduce(mine, name="x", async_op=True)
        peers[0]._ask(lambda node, now: peers[0]._over(ContributionDropped("x")))
        peers[0]._ask(lambda node, now: node.withdraw("x"))
        with pytest.raises(RoundLost, match="of 'x' while this peer was away.*call again"):
            call.wait(ROUND_S)
        assert mine.tolist() == [1.0] * 3
        both = [torch.full((3,), float(i)) for i in range(2)]
        again = peers[0].all_reduce(both[0], name="x", async_op=True)
        number = peers[0]._ask(lambda node, now: node.exchange.offered["x"].ready.upto)

        def heard(peer: Peer) -> bool:
            offers = peer._ask(lambda node, now: node.coordinator.agenda._ready.get("x", {}))
            return any(ready.upto == number for ready, _ in offers.values())

        wait_until(lambda: any(map(heard, peers)), ROUND_S)  # a round of what was taken back would not have it
        peers[1].all_reduce(both[1], name="x", timeout_s=ROUND_S)
        again.wait(ROUND_S)
        assert [x.tolist() for x in both] == [[0.5] * 3] * 2


def test_a_state_is_the_same_in_bits_after_packing_and_unpacking() -> None:
    given, taken = awkward(1), awkward(2)
    vector = Exact(given).pack()
    assert vector.dtype == torch.float32 and bool(torch.isfinite(vector).all())
    Exact(taken).unpack(vector, "somebody")
    assert bits(taken) == bits(given) and not taken["weight"].is_contiguous()


@pytest.mark.parametrize("other", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.float16)])
def test_a_state_of_as_many_bytes_and_another_dtype_or_shape_is_refused(other: Tensor) -> None:
    """Its bytes would be read as other numbers."""
    vector = Exact({"a": torch.ones(2, 3, dtype=torch.float16)}).pack()
    with pytest.raises(UsageError, match="other names, shapes or dtypes"):
        Exact({"a": other}).unpack(vector, "somebody")
    assert not other.any()


def test_a_state_that_was_changed_on_its_way_or_has_other_names_is_refused() -> None:
    vector, before = Exact(awkward(1)).pack(), bits(awkward(2))
    for change in (0, len(vector) - 1):
        spoilt, taken = vector.clone(), awkward(2)
        spoilt[change] += 1
        with pytest.raises(UsageError, match="nothing was changed"):
            Exact(taken).unpack(spoilt, "somebody")
        assert bits(taken) == before
    renamed = awkward(2)
    renamed["wait"] = renamed.pop("weight")
    with pytest.raises(UsageError, match="other names"):
        Exact(renamed).unpack(vector, "somebody")
    with pytest.raises(UsageError, match="no tensor"):
        Exact({})


def test_what_could_not_be_written_is_refused_before_anything_is() -> None:
    """Tensors before it in the order of names had been written when it raised."""
    with pytest.raises(UsageError, match="'b': an expanded tensor"):
        Exact({"a": torch.ones(3), "b": torch.ones(1).expand(3)})
    with pytest.raises(UsageError, match="'b': a tensor on meta"):
        Exact({"a": torch.ones(3), "b": torch.ones(3, device="meta")})
    with torch.inference_mode():
        made = torch.ones(3)
    with pytest.raises(UsageError, match="'b': a tensor made under torch.inference_mode"):
        Exact({"a": torch.ones(3), "b": made})
    views = {"conj": torch.tensor([1 + 2j, 3j]).conj(), "neg": torch.tensor([1 + 2j, 3j]).conj().imag}
    there = {name: torch.zeros(2, dtype=view.dtype) for name, view in views.items()}
    Exact(there).unpack(Exact(views).pack(), "somebody")
    assert all(torch.equal(there[name], view) for name, view in views.items())


def test_all_hold_the_state_of_the_one_that_was_named() -> None:
    with swarm(3) as peers:
        states, source = [awkward(i) for i in range(3)], peers[1].id

        def act(peer: Peer, i: int) -> RoundReport:
            return peer.broadcast_state(states[i], source, timeout_s=ROUND_S)

        reports = together(peers, act)
        assert all(report.complete and len(report.contributors) == 3 for report in reports)
        assert all(bits(state) == bits(awkward(1)) for state in states)


def test_without_its_source_a_state_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "PATIENCE_SHARE", 0.01)
    with swarm(2) as peers:
        state = awkward(0)
        with pytest.raises(RoundTimeout, match=f"{peers[1].id[:8]} gave no state"):
            peers[0].broadcast_state(state, peers[1].id, timeout_s=ROUND_S)
        with pytest.raises(RoundTimeout, match="no member of the run"):
            peers[0].broadcast_state(state, "nobody", timeout_s=ROUND_S)
        assert bits(state) == bits(awkward(0))


def test_who_comes_fails_and_leaves_is_told_on_a_thread_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    told: list[MemberChange] = []
    later: list[MemberChange] = []
    threads = set[str]()

    def broken(change: MemberChange) -> None:
        raise ValueError("in a callback")

    def callback(change: MemberChange) -> None:
        first.members()  # may use the peer
        threads.add(threading.current_thread().name)
        told.append(change)

    def of(peer: Peer, changes: list[MemberChange]) -> list[str]:
        """A busy machine may find a peer dead in between, and alive again."""
        return [change.kind for change in changes if change.peer == peer.id]

    with Peer.join(timeouts=QUICK) as first, caplog.at_level(logging.ERROR, logger="dlc"):
        first.on_member_change(broken)
        end = first.on_member_change(callback)
        with Peer.join([first.address], join_timeout_s=JOIN_S) as second:
            wait_until(lambda: of(second, told)[:1] == ["up"])
        wait_until(lambda: of(second, told)[-1:] == ["left"])
        end()
        first.on_member_change(later.append)
        third = Peer.join([first.address], join_timeout_s=JOIN_S)
        try:
            wait_until(lambda: of(third, later)[:1] == ["up"])
            third._driver.stop(10.0)  # nothing is announced
            wait_until(lambda: of(third, later)[-1:] == ["down"])
        finally:
            third.leave()
    assert not of(third, told) and threads == {"dlc-members"} and "in a callback" in caplog.text
    wait_until(lambda: not any(thread.name == "dlc-members" for thread in threading.enumerate()))
    with pytest.raises(SwarmClosed):
        first.on_member_change(callback)


def test_a_callback_that_exits_and_one_that_is_there_twice_end_nothing_but_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[MemberChange] = []
    watch = MemberWatch(())
    watch.add(lambda change: sys.exit("in a callback"))
    watch.add(told.append)
    watch.add(told.append)()
    with caplog.at_level(logging.ERROR, logger="dlc"):
        for name in "ab":
            watch.tell(MemberUp(Voter(name, 1)))
        watch.close(JOIN_S)
    assert [change.peer for change in told] == ["a", "b"] and caplog.text.count("in a callback") >= 2


def test_a_forked_child_is_refused_and_its_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the child sees it; real forks are in test_scripts.py."""
    with swarm(2) as peers:
        handle = peers[0].all_reduce(torch.ones(2), timeout_s=ROUND_S, async_op=True)
        group = Group(peers[0], "g", matchmaking_s=ROUND_S).all_reduce(torch.ones(2), async_op=True)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            for call in (peers[0].members, lambda: peers[0].all_reduce(torch.ones(2)), handle.wait, group.wait):
                with pytest.raises(UsageError, match="forked"):
                    call()
            peers[0].leave()
        group.cancel()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(peers[1].all_reduce, torch.zeros(2), timeout_s=ROUND_S)
            assert len(handle.wait(ROUND_S).contributors) == 2 and other.result(ROUND_S).complete


# ------------------------------------------------------------------ announced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in place", "copied"])
def test_an_announced_all_reduce_is_planned_before_its_tensors_are_ready(dtype: torch.dtype) -> None:
    with swarm(2) as peers:
        given = [torch.full((9,), -1.0, dtype=dtype) for _ in peers]
        handles = [
            p.all_reduce(x, timeout_s=ROUND_S, async_op=True, expected_s=ROUND_S)
            for p, x in zip(peers, given, strict=True)
        ]
        with pytest.raises(UsageError, match=r"ready\(\)"):
            handles[0].wait()
        for peer in peers:
            wait_until(lambda peer=peer: peer._ask(lambda node, now: node.slot.plan is not None))  # type: ignore[misc]
        assert not any(handle.done for handle in handles)
        for i, handle in enumerate(handles):
            given[i].copy_(torch.arange(9) + 2.0 * i)
            handle.ready()
            handle.ready()
        assert all(handle.wait(ROUND_S).complete for handle in handles)
    for x in given:
        assert torch.equal(x.float(), torch.arange(9) + 1.0)


def test_who_is_not_ready_in_time_gets_the_mean_of_the_others_and_spoils_nothing() -> None:
    """The mean comes while its caller still writes the tensors: into memory of its own, until `wait`."""
    with swarm(4, timeouts=replace(PATIENT, chunk_s=LATE_S)) as peers:
        dtypes = (torch.float32, torch.float32, torch.float32, torch.bfloat16)
        given = [torch.full((9,), float(i), dtype=dtype) for i, dtype in enumerate(dtypes)]
        handles = [
            p.all_reduce(x, timeout_s=ROUND_S, async_op=True, expected_s=0.1) for p, x in zip(peers, given, strict=True)
        ]
        for handle in handles[:2]:
            handle.ready()
        wait_until(lambda: all(handle.done for handle in handles))
        late = sorted((p.id, "late") for p in peers[2:])
        for i, handle in enumerate(handles):
            if i >= 2:
                assert given[i].eq(i).all()
                given[i].fill_(7.0)
                if i == 2:
                    handle.ready()
            assert sorted((m.peer, m.reason) for m in handle.wait(ROUND_S).missing) == late
    assert all(bool((x == 0.5).all()) for x in given)


@pytest.mark.parametrize("copies", [False, True], ids=["in place", "copied"])
def test_where_nobody_was_ready_in_time_the_tensors_stay(copies: bool) -> None:
    """In these chunks; the means of the others go where they belong."""
    x = torch.arange(9, dtype=torch.bfloat16 if copies else torch.float32)
    announced = Announced(torch.full((9,), -1.0) if copies else x, [x], copies, 1.0)
    out = announced.out
    out.fill_(float("nan"))
    out[4:8] = 5.0
    announced.step(1, iter([(0, 4, None), (4, 8, out[4:8]), (8, 9, None)]))
    announced.ready()
    assert announced.missed and x.eq(torch.arange(9)).all()
    announced.write()
    announced.write()
    assert x.tolist() == [0, 1, 2, 3, 5, 5, 5, 5, 8]


def test_an_announced_all_reduce_can_be_cancelled_and_its_name_used_again() -> None:
    with swarm(2) as peers:
        given = [torch.zeros(9), torch.ones(9)]
        handle = peers[0].all_reduce(given[0], async_op=True, expected_s=0.1)
        assert handle.cancel()
        handle.ready()
        reports = together(peers, lambda peer, i: peer.all_reduce(given[i], timeout_s=ROUND_S))
        if not all(r.complete for r in reports):
            given = [torch.zeros(9), torch.ones(9)]
            together(peers, lambda peer, i: peer.all_reduce(given[i], timeout_s=ROUND_S))
    assert all(bool((x == 0.5).all()) for x in given)


def test_a_name_is_of_use_again_once_the_round_of_a_call_that_was_given_up_is_over() -> None:
    """It cannot be taken back when a plan names it: what it sent may be in the mean of the others."""
    with swarm(2) as peers:
        given = [torch.zeros(9), torch.ones(9)]
        handles = together(peers, lambda peer, i: peer.all_reduce(given[i], async_op=True, expected_s=20.0))
        wait_until(lambda: peers[0]._ask(lambda node, now: node.slot.plan is not None), what="the plan")
        assert handles[0].cancel()
        with pytest.raises(RoundTimeout, match="an earlier call of 'default'"):
            peers[0].all_reduce(given[0], timeout_s=0.05)
        with pytest.raises(RoundTimeout, match="call again later"):
            peers[0].all_reduce(given[0], async_op=True)
        handles[1].ready()
        again = [given[0], torch.ones(9)]

        def average(peer: Peer, i: int) -> RoundReport:
            if i == 1:
                handles[1].wait(ROUND_S)
            return peer.all_reduce(again[i], timeout_s=ROUND_S)

        reports = together(peers, average)
    assert all(report.complete for report in reports) and bool((given[1] == 1.0).all())
    assert all(bool((x == 0.5).all()) for x in again)


def _diloco(peer: Peer, timeout_s: Any) -> object:
    model = torch.nn.Linear(2, 2)
    return dlc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: p.all_reduce(torch.ones(2), timeout_s=None), "timeout_s is None"),
        (lambda p: p.all_reduce(torch.ones(2), patience_s="1"), "patience_s is '1'"),
        (lambda p: p.all_reduce(torch.ones(2), weight="2"), "weight is '2'"),
        (lambda p: p.all_reduce(torch.ones(2), weight=torch.ones(2)), r"weight is tensor\(\[1., 1.\]\)"),
        (lambda p: p.all_reduce(3.0), "must be torch tensors, not float"),
        (lambda p: p.barrier(timeout_s=float("nan")), "timeout_s is nan"),
        (lambda p: p.broadcast_state({"a": 5}, p.id), "'a' is a int"),
        (lambda p: Gossip(p, "g").step([]), "no element"),
        (lambda p: Gossip(p, "g").step(torch.ones(2), wait_s="1"), "wait_s is '1'"),
        (lambda p: Gossip(p, "g", weight="2"), r"weight is '2': it must be a number from 2\^-20"),
        (lambda p: Moshpit(p, group_size="2"), "group_size is '2': it must be 2 to 64, and a whole number"),
        (lambda p: Moshpit(p, dims=0.5), "dims is 0.5: it must be at least 1, and a whole number"),
        (lambda p: Moshpit(p, matchmaking_s=None), "matchmaking_s is None"),
        (lambda p: Group(p, "g", matchmaking_s="5"), "matchmaking_s is '5'"),
        (lambda p: Group(p, "g", matchmaking_s=math.inf), "matchmaking_s is inf: .* above 0, and at most 604785"),
        (lambda p: Moshpit(p, matchmaking_s=1e9), r"matchmaking_s is 1e\+09: it must be above 0, and at most 604785"),
        (lambda p: Group(p, "").all_reduce(torch.ones(2)), "a name is a string of at least one character, .* not ''$"),
        (lambda p: _diloco(p, timeout_s="x"), "timeout_s is 'x': it must be a number of seconds"),
        (lambda p: _diloco(p, timeout_s=math.nan), "timeout_s is nan: it must be a number of seconds"),
        (lambda p: Group(p, 3), "name is int: give the string"),
        (lambda p: Group(p, "g").all_reduce(torch.ones(2), weight="2"), r"weight is '2': .* 0 to 2\^53"),
        (lambda p: Group(p, "g").all_reduce(torch.ones(2), timeout_s=None), "timeout_s is None"),
        (lambda p: p.broadcast_state(torch.nn.Linear(2, 2), p.id), r"state is Linear: give .*state_dict\(\)"),
        (lambda p: p.broadcast_state({"a": torch.ones(2)}, p.members()[0]), "source is Member: give the id"),
        (lambda p: p.describe(speed="fast"), "speed and eta_s must be finite numbers, not 'fast'"),
    ],
)
def test_what_is_no_argument_is_named(call: Callable[[Peer], object], said: str) -> None:
    with Peer.join() as peer, pytest.raises(UsageError, match=said):
        call(peer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peers": None}, "peers is None: give addresses"),
        ({"peers": [7700]}, r"peers is \[7700\]"),
        ({"listen": 7700}, "listen is int: give HOST:PORT"),
        ({"advertise": 7700}, "advertise is int"),
        ({"key": 5}, "key is int: give the run key"),
        ({"key": ""}, "the given run key is empty: give the text that `dlc key` printed"),
        ({"key": "\n"}, "the given run key is empty"),
        ({"spec": "RUN.toml"}, r"spec is str: give .*RunSpec.from_toml"),
        ({"resume": {"outer": {}}}, r"resume is dict: give dlc.Resume.of"),
        ({"resume": dlc.Resume(b"x")}, "what is given as resume holds no log of a run"),
        ({"resume": dlc.Resume(pack(SavedLog(LogState(), (bytes(32),), ())))}, "the log of a run and the entries of"),
        ({"timeouts": 3.0}, "timeouts is float"),
        ({"join_timeout_s": "3"}, "join_timeout_s is '3'"),
    ],
)
def test_what_nobody_can_join_with_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Peer.join(**given)


def test_a_call_names_the_seconds_it_was_given_not_what_was_left_when_it_came_to_wait() -> None:
    with swarm(2) as (peer, _), pytest.raises(RoundTimeout, match="'default' was committed within 1e-09 s"):
        peer.all_reduce(torch.ones(2), timeout_s=1e-9, patience_s=ROUND_S)


def test_a_call_that_ends_without_a_round_says_for_whom_it_waited() -> None:
    with swarm(2) as (peer, other):
        wait_until(lambda: "not ready" in peer._held_up(), ROUND_S, "the coordinator has said for whom it waits")
        why = f"within 2 s: no round has begun, and these are not ready for one: {other.id[:8]}"
        with pytest.raises(RoundTimeout, match=why):
            peer.all_reduce(torch.ones(2), timeout_s=2.0, patience_s=ROUND_S)
        handle = peer.all_reduce(torch.ones(2), name="handle", patience_s=ROUND_S, async_op=True)
        with pytest.raises(RoundTimeout, match=f"not ready for one: {other.id[:8]}"):
            handle.wait(0.5)
        assert handle.cancel()


def test_a_group_that_is_waited_for_in_vain_says_how_far_it_is() -> None:
    with Peer.join(log=False) as peer:
        call = Group(peer, "g", matchmaking_s=ROUND_S).all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(RoundTimeout, match=r"not done within 0.05 s: too few have come to form it yet"):
            call.wait(0.05)
        call.members = (peer.id, "another-peer")
        with pytest.raises(RoundTimeout, match="it averages with another-$"):
            call.wait(0.0)
        call.cancel()


def test_who_names_another_source_is_told() -> None:
    with swarm(2) as peers, pytest.raises(UsageError, match="several peers gave their state"):
        together(peers, lambda peer, i: peer.broadcast_state({"a": torch.ones(3)}, peer.id, timeout_s=ROUND_S))


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
def test_tensors_that_are_encoded_where_they_are_get_the_same_means(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GPU are; where nobody's values are finite, each keeps its own."""
    numel, bad = 40_000, 20_000

    def given(i: int) -> list[Tensor]:
        vector = torch.randn(numel, generator=torch.Generator().manual_seed(i))
        vector[bad] = float("nan")
        return [vector[:1000].clone(), vector[1000:].view(100, -1).bfloat16()]

    def averaged() -> list[Tensor]:
        with swarm(2) as peers:
            tensors = [given(i) for i in range(2)]
            for _ in range(2):  # the second time in memory that was kept
                together(peers, lambda p, i: p.all_reduce(tensors[i], codec=codec, timeout_s=ROUND_S))
            return [torch.cat([t.float().flatten() for t in many]) for many in tensors]

    usual = averaged()
    monkeypatch.setattr(collectives, "_encoded_there", lambda grid, device: True)
    encoded = averaged()
    for i, (a, b) in enumerate(zip(usual, encoded, strict=True)):
        assert torch.equal(a.nan_to_num(77.0), b.nan_to_num(77.0))
        own = torch.cat([t.float().flatten() for t in given(i)])
        chunk = slice(bad // USUAL_ELEMS_MIN * USUAL_ELEMS_MIN, (bad // USUAL_ELEMS_MIN + 1) * USUAL_ELEMS_MIN)
        assert torch.equal(a[chunk].nan_to_num(77.0), own[chunk].nan_to_num(77.0))
        assert not torch.equal(a[: chunk.start], own[: chunk.start])
    assert torch.equal(encoded[0][:1000], encoded[1][:1000])


@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_fp16_averages_what_fp16_cannot_say(size: float) -> None:
    """It was 0, and 65504, in a report that said "complete"."""
    values = [torch.full((300,), (rank + 1) * size) for rank in range(2)]
    with swarm(2) as peers:
        reports = together(peers, lambda peer, i: peer.all_reduce(values[i], timeout_s=ROUND_S))
        assert all(report.complete for report in reports)
    for value in values:
        torch.testing.assert_close(value, torch.full((300,), 1.5 * size), rtol=2.0**-11, atol=0.0)


def test_where_nobody_has_weight_tensors_that_were_encoded_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_encoded_there", lambda grid, device: True)
    with swarm(2) as peers:
        given = [[torch.full((30_000,), i + 1.0), torch.full((9,), i + 5.0)] for i in range(2)]
        reports = together(peers, lambda p, i: p.all_reduce(given[i], weight=0.0, timeout_s=ROUND_S))
    assert not any(report.contributors for report in reports)
    assert [[t.unique().tolist() for t in many] for many in given] == [[[1.0], [5.0]], [[2.0], [6.0]]]


def test_only_a_devices_tensors_are_encoded_before_they_are_copied_and_only_where_that_is_less() -> None:
    grid = Grid(100_000, 1 << 14, "fp16")
    assert collectives._encoded_there(grid, torch.device("cuda"))
    assert not collectives._encoded_there(grid, torch.device("cpu"))
    assert not collectives._encoded_there(Grid(100_000, 1 << 14, "fp32"), torch.device("cuda"))


@pytest.mark.parametrize("expected_s", [-1.0, float("nan"), float("inf")])
def test_an_expectation_that_is_none_is_refused(expected_s: float) -> None:
    with Peer.join() as peer:
        with pytest.raises(UsageError, match="expected_s is"):
            peer.all_reduce(torch.ones(2), async_op=True, expected_s=expected_s)
        with pytest.raises(UsageError, match="async_op"):
            peer.all_reduce(torch.ones(2), expected_s=1.0)  # type: ignore[call-overload]


def test_a_ready_that_was_interrupted_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy may fail, too: the tensors may be a GPU's."""
    x = torch.arange(9, dtype=torch.bfloat16)
    announced = Announced(torch.full((9,), -1.0), [x], True, 1.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(handles, "flatten_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            announced.ready()
    assert not announced.given and not announced.filling.complete
    announced.ready()
    assert announced.given and announced.filling.complete
    assert announced.out.eq(torch.arange(9)).all()


def test_a_state_of_which_only_a_part_came_is_not_taken() -> None:
    state, peer = {"a": torch.zeros(3)}, Mock()
    peer.voter.peer = "me"
    missing = (Missing("the source", "late", 0.5),)
    peer._waited_for.return_value = SimpleNamespace(contributors=(Share("the source", 1.0, 0.5),), missing=missing)
    with pytest.raises(RoundTimeout, match=r"only 50\.0% of the state of the sour came \(late\); nothing was changed"):
        collectives.Collectives.broadcast_state(peer, state, "the source")
    assert not state["a"].any()
