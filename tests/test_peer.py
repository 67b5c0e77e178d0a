"""Real peers over real sockets on loopback: joining, all-reduce, leaving, and the mistakes that people make."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dlc import collectives, drivercalls, joining, survey
from dlc import peer as peer_module
from dlc.addresses import outbound_host
from dlc.comm import dispatch, entries, links, waiting
from dlc.comm.addresses import parse_address
from dlc.comm.clock import clock
from dlc.comm.driver import SWITCH_NEAR_S, Driver, Reply
from dlc.comm.effects import Effect
from dlc.comm.events import HistoryLost, MemberDown, RoundDone, Waiting
from dlc.comm.filling import Filling
from dlc.comm.grid import LOOPBACK_CHUNK_ELEMS
from dlc.comm.ids import Voter
from dlc.comm.lanes import Incoming
from dlc.comm.lobby import Lobby
from dlc.comm.messages import PROTOCOL_VERSION, Welcome
from dlc.comm.node import Node, NodeConfig
from dlc.comm.security import generate_run_key
from dlc.comm.transport import Transport
from dlc.errors import (
    DlcError,
    JoinError,
    RoundTimeout,
    SpecMismatch,
    SwarmClosed,
    UnreachableError,
    UsageError,
    WrongKeyError,
)
from dlc.handles import Flag
from dlc.mesh import Group
from dlc.peer import Member, Peer, Pending, Reduction, status
from dlc.report import RoundReport
from dlc.runspec import RunSpec, TimeoutsSpec
from dlc.sim.toy import ToyState
from tests.helpers import TICK_S, wait_until
from tests.swarm import (
    JOIN_S,
    PATIENT,
    QUICK,
    ROUND_S,
    free_addresses,
    lines_interrupted,
    of_another_version,
    swarm,
    together,
)

KEY = generate_run_key()
WAIT_S = 30.0
"""For a connection that somebody is about to make."""


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16])
def test_weighted_mean_equals_float64_for_every_codec_and_awkward_shapes(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    with swarm(n) as peers:
        for codec, tolerance in (("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2), ("int8", 0.03), ("int4", 0.5)):
            shapes = [(1,), (3, 7), (0,), (2, 1, 5), (513,)]
            given = [[torch.randn(s, generator=generator) for s in shapes] for _ in peers]
            weights = [float(i + 1) for i in range(n)]
            expected = [
                sum(w * g[k].double() for w, g in zip(weights, given, strict=True)) / sum(weights)
                for k in range(len(shapes))
            ]

            def act(peer: Peer, i: int, codec: str = codec, given: list[list[torch.Tensor]] = given) -> RoundReport:
                return peer.all_reduce(given[i], weight=float(i + 1), name=codec, codec=codec, timeout_s=ROUND_S)

            reports = together(peers, act)
            for i, report in enumerate(reports):
                assert report.complete and len(report.contributors) == n
                assert report.weight == sum(weights)
                for mean, exact in zip(given[i], expected, strict=True):
                    torch.testing.assert_close(mean.double(), torch.as_tensor(exact), rtol=tolerance, atol=tolerance)
            for other in given[1:]:
                assert all(torch.equal(a, b) for a, b in zip(given[0], other, strict=True)), "bits differ"


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_mixed_dtypes_keep_their_own(codec: str) -> None:
    with swarm(2) as peers:
        given = [
            [torch.full((4,), float(i), dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16)]
            for i in (0, 2)
        ]
        together(peers, lambda peer, i: peer.all_reduce(given[i], codec=codec, timeout_s=ROUND_S))
        for tensors in given:
            assert [t.dtype for t in tensors] == [torch.float32, torch.bfloat16, torch.float16]
            assert all(torch.allclose(t.float(), torch.ones(4), rtol=1e-6) for t in tensors)
        assert all(torch.equal(a, b) for a, b in zip(*given, strict=True))


def test_several_rounds_over_many_chunks_with_a_key() -> None:
    with swarm(3, key=generate_run_key()) as peers:
        for k in range(3):
            vectors = [torch.arange(1_000_003, dtype=torch.float32) * (i + k) for i in range(3)]
            expected = vectors[0].double().add(vectors[1].double()).add(vectors[2].double()) / 3
            reports = together(peers, lambda p, i, v=vectors: p.all_reduce(v[i], codec="fp32", timeout_s=ROUND_S))
            assert [r.t for r in reports] == [k + 1] * 3
            assert all(torch.equal(v, vectors[0]) for v in vectors)
            torch.testing.assert_close(vectors[0].double(), expected, rtol=1e-6, atol=1e-3)


def test_python_changes_threads_often_while_bulk_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a main thread that computes in Python would hold the driver up at each of its steps."""
    before_s = sys.getswitchinterval()
    monkeypatch.setattr("dlc.comm.dispatch.SAMPLE_TAIL_S", 1e6)
    with swarm(2) as peers:
        together(peers, lambda peer, i: peer.all_reduce(torch.ones(100_000), timeout_s=ROUND_S))
        assert sys.getswitchinterval() < SWITCH_NEAR_S < before_s
        monkeypatch.setattr("dlc.comm.dispatch.SAMPLE_TAIL_S", 0.0)
        wait_until(lambda: sys.getswitchinterval() == before_s)


def test_sender_of_nan_is_refused_and_named() -> None:
    with swarm(3) as peers:
        vectors = [torch.full((10,), 1.0), torch.full((10,), 3.0), torch.full((10,), float("nan"))]
        reports = together(peers, lambda p, i: p.all_reduce(vectors[i], timeout_s=ROUND_S))
        for report, vector in zip(reports, vectors, strict=True):
            assert [(m.peer, m.reason) for m in report.missing] == [(peers[2].id, "refused: not finite")]
            assert torch.equal(vector, torch.full((10,), 2.0))


def test_peer_with_another_shape_is_left_out_and_named() -> None:
    with swarm(3) as peers:
        vectors = [torch.full((10,), 1.0), torch.full((10,), 3.0), torch.full((11,), 9.0)]
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(p.all_reduce, v, timeout_s=ROUND_S) for p, v in zip(peers, vectors, strict=True)]
            reports = [f.result() for f in futures[:2]]
            for report in reports:
                assert {s.peer for s in report.contributors} == {peers[0].id, peers[1].id}
                assert [(m.peer, m.reason) for m in report.missing] == [(peers[2].id, "not ready")]
            with pytest.raises(UsageError, match="11 elements"):
                futures[2].result()
        assert torch.equal(vectors[0], torch.full((10,), 2.0))
        assert torch.equal(vectors[2], torch.full((11,), 9.0)), "an unusable mean must not touch the tensor"


def test_peer_with_another_codec_gets_an_error_and_not_its_own_values() -> None:
    with swarm(3) as peers, ThreadPoolExecutor(3) as pool:
        codecs = ("fp16", "fp16", "fp32")
        futures = [
            pool.submit(p.all_reduce, torch.ones(4), codec=c, timeout_s=ROUND_S)
            for p, c in zip(peers, codecs, strict=True)
        ]
        assert all(len(f.result().contributors) == 2 for f in futures[:2])
        with pytest.raises(UsageError, match="fp16"):
            futures[2].result()


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_round_committed_at_the_last_moment_is_no_timeout(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    wait = Pending.wait

    def late(self: Pending, timeout_s: float | None = None) -> RoundReport | None:
        report = wait(self, ROUND_S if timeout_s else timeout_s)
        if timeout_s:
            raise RoundTimeout("too late by a hair")
        return report

    monkeypatch.setattr(Pending, "wait", late)
    with swarm(2) as peers:
        vectors = [[torch.full(shape, 1.0)], [torch.full(shape, 3.0)]]
        reports = together(peers, lambda p, i: p.all_reduce(vectors[i], timeout_s=ROUND_S))
        assert all(len(r.contributors) == 2 for r in reports)
        assert all(torch.equal(v[0], torch.full(shape, 2.0)) for v in vectors)


def test_an_offer_for_a_round_that_is_past_is_not_made() -> None:
    with Peer.join() as peer:
        peer.open("train", ToyState(8, 0), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
        first = peer.contribute("train", torch.ones(8), weight=1.0, after=0)
        assert first.wait(JOIN_S) is not None and not first.overtaken and first.included == (True, True)
        late = peer.contribute("train", torch.ones(8), weight=1.0, after=0)
        assert late.wait(0.0) is None and late.overtaken and not late.counted and not late.included
        last = peer.contribute("train", torch.ones(8), weight=1.0, after=1).wait(JOIN_S)
        assert last is not None and last.t == 2 and peer.position("train").t == 2


def test_absent_peer_is_named_after_its_patience() -> None:
    with swarm(2) as peers:
        vector = torch.ones(5)
        report = peers[0].all_reduce(vector, timeout_s=ROUND_S, patience_s=2.0)
        assert [s.peer for s in report.contributors] == [peers[0].id]
        assert [(m.peer, m.reason) for m in report.missing] == [(peers[1].id, "not ready")]


def test_the_deadlines_of_a_run_are_those_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[NodeConfig] = []

    def kept(*args: Any, **named: Any) -> NodeConfig:
        configs.append(NodeConfig(*args, **named))
        return configs[-1]

    monkeypatch.setattr(peer_module, "NodeConfig", kept)
    run = RunSpec(timeouts=TimeoutsSpec(probe_s=0.5, chunk_s=7.0, evict_s=90.0))
    with Peer.join(spec=run):
        assert [config.timeouts for config in configs] == [run.timeouts.floors()]


def test_four_starters_with_the_same_list_form_one_group_of_four() -> None:
    addresses = free_addresses(4)
    with ThreadPoolExecutor(4) as pool:
        join = partial(Peer.join, addresses, timeouts=PATIENT, join_timeout_s=JOIN_S)
        peers = list(pool.map(lambda a: join(listen=a), addresses))
    try:
        views = [{m.id for m in p.members()} for p in peers]
        assert views == [{p.id for p in peers}] * 4
        vectors = [torch.full((7,), float(i)) for i in range(4)]
        reports = together(peers, lambda p, i: p.all_reduce(vectors[i], timeout_s=ROUND_S))
        assert all(len(r.contributors) == 4 for r in reports)
    finally:
        for peer in peers:
            peer.leave()


def test_who_may_found_does_so_without_those_of_its_list_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It asked them for ever."""
    monkeypatch.setattr("dlc.joining.FOUND_AFTER_S", 0.1)
    first, second, gone = free_addresses(3)
    join = partial(Peer.join, found=True, timeouts=PATIENT, join_timeout_s=JOIN_S)
    with join([second, gone], listen=first) as founder:
        (said,) = [r.getMessage() for r in caplog.records if r.name == "dlc.joining"]
        assert f"going on without {second} " in said and "the longer history is the run" in said
        monkeypatch.setattr("dlc.joining.FOUND_AFTER_S", JOIN_S)  # who is there is heard of, however slowly
        with join([first, gone], listen=second) as other:
            assert {m.id for m in other.members()} == {founder.id, other.id}
            founds = [peer._ask(lambda node, now: node.slot.founder) for peer in (founder, other)]
            assert founds == [True, False], "on a busy machine the second began a run of its own"
            both = [founder, other]
            reports = together(both, lambda peer, i: peer.all_reduce(torch.ones(2), timeout_s=ROUND_S))
            assert all({share.peer for share in report.contributors} == {p.id for p in both} for report in reports)


def test_no_bootstrap_peer_has_to_stay_alive() -> None:
    with swarm(3) as peers:
        peers[0].leave()
        with Peer.join([peers[1].address], timeouts=PATIENT, join_timeout_s=JOIN_S) as newcomer:
            rest = [peers[1], peers[2], newcomer]
            vectors = [torch.full((3,), float(i)) for i in range(3)]
            reports = together(rest, lambda p, i: p.all_reduce(vectors[i], timeout_s=ROUND_S))
            assert all({s.peer for s in r.contributors} == {p.id for p in rest} for r in reports)


def test_who_leaves_sees_first_to_those_who_lack_the_last_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their last bytes may be nowhere else. But it stays no longer than it was told to."""
    with swarm(2) as (first, second):
        acts: list[str] = []
        for peer, looks in ((first, 3), (second, 1000)):
            node = peer._node
            assert node is not None
            leave = node.leave

            def behind(node: Node = node, looks: int = looks) -> list[Voter]:
                acts.append("looks")
                return [node.me] if acts.count("looks") < looks else []

            def left(now: float, leave: Callable[[float], list[Effect]] = leave) -> list[Effect]:
                acts.append("leaves")
                return leave(now)

            monkeypatch.setattr(node, "left_behind", behind)
            monkeypatch.setattr(node, "leave", left)
        first.leave(JOIN_S)
        assert acts == ["looks", "looks", "looks", "leaves"]
        assert "may still lack" not in caplog.text
        second.leave(0.0)
        assert acts[4:] == ["looks", "leaves"]
        assert "leaves after 0 s: others may still lack their part" in caplog.text


def test_who_starts_again_with_a_list_of_peers_that_are_gone_finds_those_it_knew(tmp_path: Path) -> None:
    """The same command line after a restart, when the one peer that it names has left for good."""
    spec, join = RunSpec(), partial(Peer.join, timeouts=QUICK, join_timeout_s=JOIN_S)
    with join(spec=spec) as first, join([first.address]) as second:
        gone = first.address
        with join([gone], spec=spec, state_dir=tmp_path) as third:
            before = third.id
            wait_until(lambda: {m.id for m in third.members()} >= {first.id, second.id}, JOIN_S)
        first.leave()
        wait_until(lambda: len(second._ask(lambda node, now: node.log.state.electorate)) == 1, JOIN_S)
        with join([gone], spec=spec, state_dir=tmp_path) as again:
            assert again.id == before
            assert second.id in {v.peer for v in again._ask(lambda node, now: node.log.state.electorate)}


def test_without_a_log_too_who_starts_again_finds_those_it_knew(tmp_path: Path) -> None:
    spec = RunSpec(strategy="gossip")
    with Peer.join(spec=spec) as first, Peer.join([first.address], join_timeout_s=JOIN_S) as second:
        gone = first.address
        with Peer.join([gone], spec=spec, state_dir=tmp_path, join_timeout_s=JOIN_S) as third:
            wait_until(lambda: {m.id for m in third.members()} >= {first.id, second.id}, JOIN_S)
        first.leave()
        with Peer.join([gone], spec=spec, state_dir=tmp_path, join_timeout_s=JOIN_S) as again:
            wait_until(lambda: second.id in {m.id for m in again.members() if m.alive}, JOIN_S)


def test_starters_of_a_run_without_a_log_wait_for_all_of_their_list_and_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a run with one. The first two trained on, without the third, and said nothing."""
    monkeypatch.setattr(joining, "SAY_AFTER_S", 1.0)
    spec, addresses = RunSpec(strategy="gossip"), free_addresses(3)
    join = partial(Peer.join, addresses, timeouts=PATIENT, join_timeout_s=JOIN_S)
    with ThreadPoolExecutor(3) as pool:
        first, second = (pool.submit(join, listen=a, spec=spec) for a in addresses[:2])
        lacks = f"still trying {addresses[2]} "
        wait_until(lambda: first.done() or second.done() or caplog.text.count(lacks) >= 2, JOIN_S)
        begun = first.done() or second.done()
        peers = [joined.result() for joined in (first, second, pool.submit(join, listen=addresses[2]))]
    for peer in peers:
        peer.leave()
    assert not begun and all(peer.spec == spec for peer in peers)


def test_entries_of_an_address_book_that_are_not_ours_are_left_out(tmp_path: Path) -> None:
    book = {"a": 1, "b": {"addresses": []}, "c": {"addresses": [7]}, "d": {"addresses": ["no address"]}, "e": None}
    (tmp_path / "peers.json").write_text(json.dumps(book))
    join = partial(Peer.join, timeouts=QUICK, join_timeout_s=JOIN_S)
    with join() as first, join([first.address], spec=first.spec, state_dir=tmp_path):
        pass


def test_a_timeout_says_whom_an_opening_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "OPENING_S", 0.5)
    with swarm(3) as peers:

        def later() -> float:
            """The time is up once both others are known to lack such a wish."""
            known = peers[2]._ask(lambda node, now: node.waits.now)
            return clock() + (ROUND_S if known is not None and len(known.peers) == 2 else 0.0)

        monkeypatch.setattr("dlc.drivercalls.clock", later)
        with pytest.raises(RoundTimeout, match="training cannot begin.*can join as an observer") as error:
            peers[2].open("train", ToyState(8, 0), codec="fp32", chunk_elems=8, timeout_s=ROUND_S)
        assert all(peer.id[:8] in str(error.value) for peer in peers[:2])
        assert peers[2].id[:8] not in str(error.value)


def test_ipv6_and_host_names() -> None:
    join = partial(Peer.join, timeouts=QUICK, join_timeout_s=JOIN_S)
    try:
        first = join(listen="[::1]:0")
    except UsageError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with first, join([first.address], listen="[::1]:0") as second:
        assert first.address.startswith("[::1]:")
        wait_until(lambda: len(second.members()) == 2)
    with join() as first, join([f"localhost:{first.address.split(':')[1]}"]) as second:
        wait_until(lambda: len(second.members()) == 2)


def test_unreachable_address_says_what_was_tried() -> None:
    (address,) = free_addresses(1)
    with pytest.raises(UnreachableError, match=address):
        Peer.join([address], join_timeout_s=1)


def test_who_has_failed_to_join_may_try_again_at_the_same_port() -> None:
    """The first try had let go of it only a second later: what it had to say to one that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (own,) = free_addresses(1)
        for _ in range(2):
            with pytest.raises(UnreachableError):
                Peer.join([f"127.0.0.1:{silent.getsockname()[1]}"], listen=own, join_timeout_s=0.5)


def test_who_is_in_its_own_list_is_not_among_those_who_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over, received = threading.Event(), Lobby.receive

    def heard(self: Lobby, *event: Any) -> list[Effect]:
        effects = received(self, *event)
        if self.own():
            over.set()  # the time is up once it knows itself
        return effects

    monkeypatch.setattr(Lobby, "receive", heard)
    monkeypatch.setattr(joining, "clock", lambda: clock() + JOIN_S * over.is_set())
    own, silent = free_addresses(2)
    with pytest.raises(UnreachableError, match=f"no answer within {JOIN_S:g} s from {silent} "):
        Peer.join([own, silent], listen=own, join_timeout_s=JOIN_S)


def asked(address: str) -> Transport:
    """It listens there, was connected to and asked for the run, and says nothing."""
    listens = Transport(address, security=None, ident=b"silent")
    wait_until(lambda: any(isinstance(event, Incoming) for event in listens.poll(0.01)))
    return listens


@pytest.mark.parametrize("ends", [False, True])
def test_a_connection_on_which_no_answer_comes_is_not_called_one_that_could_not_be_made(
    ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where large packets were lost on the way, it was said to the end that nobody listened there."""
    over = threading.Event()
    monkeypatch.setattr(joining, "clock", lambda: clock() + JOIN_S * over.is_set())
    monkeypatch.setattr(joining, "SAY_AFTER_S", 0.05)
    (address,) = free_addresses(1)
    why = f"{address} (connected, but no answer has come"
    why += ", as on one before, which ended: packets of full size" if ends else ", as from another version of dlc"
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(Peer.join, [address], join_timeout_s=JOIN_S)
        silent = asked(address)
        if ends:
            silent.close(0.0)
            silent = asked(address)
        wait_until(lambda: why in caplog.text, JOIN_S)
        over.set()
        with pytest.raises(UnreachableError) as error:
            asks.result()
        silent.close(0.0)
    assert why in str(error.value)
    assert ("as on one before" in str(error.value)) == ends


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_who_finds_only_another_version_of_dlc_is_told_which_one_and_ends(
    protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for ever, for an answer that could not come."""
    said = f"protocol version {protocol}, and this dlc {PROTOCOL_VERSION}"
    with of_another_version(protocol) as address:
        with pytest.raises(JoinError, match=f"is at {address} .it speaks {said}"):
            Peer.join([address], join_timeout_s=JOIN_S)
        assert said not in caplog.text, "told twice"
        with pytest.raises(UnreachableError, match=f"{address} answered: it speaks {said}"):
            status([address], timeout_s=JOIN_S)
        caplog.clear()
        with Peer.join() as first, Peer.join([address, first.address], join_timeout_s=JOIN_S):
            assert [m.id for m in status([address, first.address])]
            wait_until(lambda: said in caplog.text)
        (line,) = (r.getMessage() for r in caplog.records if said in r.getMessage())
        assert line.startswith((f"going on without {address} (it", f"dropped a frame from {address}: it"))


def test_a_peer_whose_bulk_port_is_closed_is_told_and_so_are_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newcomer of whose two ports a firewall let one in said nothing, and the others not which port."""
    monkeypatch.setattr(dispatch, "BARRED_S", 0.5)
    monkeypatch.setattr(dispatch, "UNENTERED_MAX", 1)
    closed = parse_address(free_addresses(1)[0])[1]

    class Closed(Transport):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.bulk_port = closed

    with Peer.join(timeouts=QUICK) as first:
        with monkeypatch.context() as patch:
            patch.setattr(peer_module, "Transport", Closed)
            second = Peer.join([first.address], join_timeout_s=JOIN_S)
        with second:
            whom = f"{second.id[:8]} answers pings, but takes no bulk connection from here (127.0.0.1:{closed}: "
            wait_until(lambda: whom in caplog.text)
            wait_until(lambda: f"nobody has come in by TCP port {closed}" in caplog.text)
            wait_until(lambda: first._driver.transport.bulk_entered, what="the way that is open is used")


def test_who_waits_for_an_answer_says_so_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "clock", partial(next, itertools.count(0.0, 2.0)))
    with pytest.raises(UnreachableError):
        Peer.join(free_addresses(1), join_timeout_s=100.0)
    said = [r for r in caplog.records if r.name == "dlc.joining" and "still trying" in r.getMessage()]
    assert len(said) == 4, "after 5, 15, 35 and 75 s; then after 155"


def test_who_could_begin_the_run_itself_is_told_how_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others may have come to the end of it. A mere joiner would begin another run than it looks for."""
    monkeypatch.setattr(joining, "SAY_AFTER_S", 0.05)
    own, silent = free_addresses(2)
    for listed, last in (([silent], "still trying"), ([own, silent], "--found begins the run")):
        caplog.clear()
        monkeypatch.setattr(joining, "clock", lambda last=last: clock() + JOIN_S * (caplog.text.count(last) >= 2))
        with pytest.raises(UnreachableError):
            Peer.join(listed, spec=RunSpec(), listen=own, join_timeout_s=JOIN_S)
        assert "still trying" in caplog.text and ("--found begins the run" in caplog.text) == (own in listed)


def test_who_would_take_no_part_in_the_rounds_of_the_others_is_told() -> None:
    with Peer.join() as peer, pytest.raises(SpecMismatch, match="leave log=False away"):
        Peer.join([peer.address], log=False, join_timeout_s=JOIN_S)


def test_wrong_key_and_missing_key_are_told_apart_from_silence() -> None:
    with Peer.join(key=generate_run_key(), listen="127.0.0.1:0") as peer:
        with pytest.raises(WrongKeyError, match="refused our run key"):
            Peer.join([peer.address], key=generate_run_key(), join_timeout_s=JOIN_S)
        with pytest.raises(WrongKeyError, match="wants a run key: .*; or it is something else than dlc that listens"):
            Peer.join([peer.address], join_timeout_s=JOIN_S)
        (own,) = free_addresses(1)  # all of a list, but for itself
        with pytest.raises(WrongKeyError, match=f"^{peer.address} answered, but refused our run key"):
            Peer.join([own, peer.address], listen=own, key=generate_run_key(), join_timeout_s=JOIN_S, found=True)


def test_a_host_that_takes_connections_and_says_nothing_is_not_called_one_with_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it was suspended, all who wanted to join by it meanwhile ended: their key was said to be wrong."""
    over = threading.Event()
    monkeypatch.setattr(joining, "clock", lambda: clock() + JOIN_S * over.is_set())
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as calls:
        door.settimeout(WAIT_S)
        joins = pool.submit(Peer.join, [f"127.0.0.1:{door.getsockname()[1]}"], key=KEY, join_timeout_s=JOIN_S)
        for _ in range(joining.REFUSALS_MIN + 1):
            calls.enter_context(door.accept()[0])
        over.set()
        with pytest.raises(UnreachableError, match="it takes connections, and says nothing"):
            joins.result()


def test_a_peer_that_dies_in_a_handshake_is_not_called_one_with_another_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        door.settimeout(WAIT_S)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        joins = pool.submit(Peer.join, [address], key=KEY, join_timeout_s=JOIN_S)
        for _ in range(joining.REFUSALS_MIN - 1):
            door.accept()[0].close()
        door.close()
        with Peer.join(key=KEY, listen=address) as first, joins.result() as second:
            assert {m.address for m in second.members()} == {first.address, second.address}


def test_what_hangs_up_at_once_may_be_something_else_than_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        door.settimeout(WAIT_S)
        joins = pool.submit(Peer.join, [f"127.0.0.1:{door.getsockname()[1]}"], key=KEY, join_timeout_s=JOIN_S)
        for _ in range(joining.REFUSALS_MIN):
            door.accept()[0].close()
        with pytest.raises(WrongKeyError, match="or it is something else than dlc that listens there"):
            joins.result()


def test_another_runspec_is_refused_with_the_fields_that_differ() -> None:
    with Peer.join(spec=RunSpec(sync_every=10), timeouts=QUICK) as peer:
        with pytest.raises(SpecMismatch, match="sync_every"):
            Peer.join([peer.address], spec=RunSpec(sync_every=20), join_timeout_s=JOIN_S)
        with Peer.join([peer.address], join_timeout_s=JOIN_S) as newcomer:
            assert newcomer.spec == RunSpec(sync_every=10), "a joiner without a RunSpec takes the swarm's"
    with Peer.join(run="here") as peer:
        assert peer.spec == RunSpec(run="here", chunk_elems=LOOPBACK_CHUNK_ELEMS), "founded on loopback without one"
        with pytest.raises(SpecMismatch, match=f"chunk_elems: 0 here, {LOOPBACK_CHUNK_ELEMS} there"):
            Peer.join([peer.address], spec=RunSpec(run="here"), join_timeout_s=JOIN_S)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"state_dir": 5}, "state_dir is int: give the path of a folder"),
        ({"state_dir": []}, "state_dir is list"),
        ({"state_dir": ""}, "the state directory is an empty path"),
        ({"on_event": "print"}, "on_event is str: it must be a function"),
        ({"history_bytes": -1}, "history_bytes is -1: it must be at least 0, and a whole number"),
        ({"history_bytes": "1GiB"}, "history_bytes is '1GiB'"),
    ],
)
def test_what_a_peer_cannot_be_made_of_is_refused(options: dict[str, Any], why: str) -> None:
    """An empty state_dir, mostly a variable that is not set, was the folder where the program ran."""
    with pytest.raises(UsageError, match=why):
        Peer.join(**options)


def test_a_role_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="role is 'worker': it must be one of trainer, helper, observer"):
        Peer.join(role="worker")


def test_an_observer_founds_nothing_and_waits_for_those_who_join_by_its_address() -> None:
    with pytest.raises(UsageError, match="no vote and founds no run"):
        Peer.join(role="observer", found=True)
    with pytest.raises(UnreachableError, match="nobody has begun a run by this observer's address"):
        Peer.join(role="observer", join_timeout_s=0.1)
    (address,) = free_addresses(1)
    with ThreadPoolExecutor(3) as pool:
        options = {"join_timeout_s": JOIN_S, "timeouts": PATIENT}
        joins = [pool.submit(Peer.join, role="observer", listen=address, **options)]  # type: ignore[arg-type]
        joins += [pool.submit(Peer.join, address, **options) for _ in range(2)]  # type: ignore[arg-type]
        observer, *trainers = peers = [join.result(2 * JOIN_S) for join in joins]
        try:
            assert {m.role for m in observer.members() if not m.me} == {"trainer"}
            reports = together(trainers, lambda peer, i: peer.all_reduce(torch.ones(2), timeout_s=JOIN_S))
            assert all(len(report.contributors) == 2 for report in reports)
        finally:
            for peer in peers:
                peer.leave()


def test_an_observer_joins_without_a_seat_looks_on_and_is_in_no_round() -> None:
    with Peer.join() as trainer, Peer.join([trainer.address], role="observer", join_timeout_s=JOIN_S) as observer:
        assert {member.id: member.role for member in observer.members()}[observer.id] == "observer"
        values = torch.ones(2)
        report = trainer.all_reduce(values, timeout_s=JOIN_S)
        assert [share.peer for share in report.contributors] == [trainer.id] and not report.missing
        with pytest.raises(UsageError, match="an observer takes part in no rounds"):
            observer.all_reduce(values)


def test_what_holds_a_peer_can_be_neither_pickled_nor_copied_and_says_so() -> None:
    with Peer.join() as peer:
        group = Group(peer, "any", min_size=1)
        held = (peer, group, peer.all_reduce(torch.ones(2), name="a", async_op=True))
        held = (*held, group.all_reduce(torch.ones(2), async_op=True))
        for thing, name in zip(held, ("Peer", "Peer", "Reduction", "GroupCall"), strict=True):
            with pytest.raises(TypeError, match=f"a {name} can be neither pickled nor copied.*join with a peer"):
                copy.deepcopy(thing)  # which asks the same methods as pickle does
        report = held[2].wait(JOIN_S)
        assert copy.deepcopy(report) == report


def test_a_peer_with_a_key_can_be_reached_from_other_hosts_unless_all_are_on_this_one() -> None:
    """It told everybody to dial 127.0.0.1, and whoever joined from elsewhere waited for ever."""
    key = generate_run_key()
    with Peer.join(key=key) as first:
        bound = parse_address(first.address)[0]
        assert bound == outbound_host("0.0.0.0")
        with Peer.join([f"127.0.0.1:{parse_address(first.address)[1]}"], key=key, join_timeout_s=JOIN_S) as local:
            assert parse_address(local.address)[0] == "127.0.0.1"
    with Peer.join() as alone:
        assert parse_address(alone.address)[0] == "127.0.0.1"
    with pytest.raises(UsageError, match="beyond this machine: give the run key"):
        Peer.join(["192.0.2.1:4600"])


def test_a_join_that_was_refused_lets_go_of_the_state_directory(tmp_path: Path) -> None:
    """As long as somebody kept the exception, as a notebook does, each try said that another process used it."""
    with Peer.join() as peer:
        with pytest.raises(UsageError, match="taken") as kept:
            Peer.join(listen=peer.address, state_dir=tmp_path)
        Peer.join(state_dir=tmp_path).leave()
    assert kept.traceback


def test_taken_port_and_open_listening_without_key() -> None:
    with Peer.join() as peer:
        with pytest.raises(UsageError, match="taken"):
            Peer.join(listen=peer.address)
    with pytest.raises(UsageError, match="run key"):
        Peer.join(listen="0.0.0.0:0")


def test_a_join_that_fails_before_its_thread_has_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = free_addresses(1)
    kept: list[Peer] = []

    def fails(*arguments: object) -> Lobby:
        kept.append(sys._getframe(1).f_locals["peer"])  # else its end would close them
        raise OSError("no room")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="no room"):
        broken.setattr("dlc.peer.Lobby", fails)
        Peer.join(listen=address)
    assert kept
    with Peer.join(listen=address) as peer:
        assert peer.address == address


def test_status_sees_everyone_without_joining() -> None:
    with swarm(2) as peers:
        peers[0].describe(status={"t": 3})
        seen: list[Member] = []

        def told() -> bool:
            seen[:] = status([peers[1].address], timeout_s=JOIN_S)
            return any(m.status == {"t": 3} for m in seen)

        wait_until(told)
        assert {m.id for m in seen} == {p.id for p in peers} and all(m.alive for m in seen)
        assert len(peers[0].members()) == 2, "who asks for the status is no member"


def test_status_takes_addresses_as_join_does() -> None:
    """A single one was read letter by letter: "h" was no address."""
    with Peer.join() as peer, Peer.join() as other:
        assert [m.id for m in status(peer.address, timeout_s=JOIN_S)] == [peer.id]
        listed = f"{peer.address}, {other.address}"
        assert {m.id for m in status(listed, timeout_s=JOIN_S)} == {peer.id, other.id}
    for given, said in ((7700, "peers is 7700: give addresses"), ((), "nobody to ask"), ("host:0", "port 0")):
        with pytest.raises(UsageError, match=said):
            status(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s is None"):
        status("127.0.0.1:1", timeout_s=None)  # type: ignore[arg-type]


def test_status_of_one_that_is_reached_and_gives_no_answer_names_another_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "reached at 127.0.0.1", it said, and to check the address and the port."""
    over = threading.Event()
    monkeypatch.setattr(survey, "clock", lambda: clock() + JOIN_S * over.is_set())
    (address,) = free_addresses(1)
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(status, [address], timeout_s=JOIN_S)
        with contextlib.closing(asked(address)):
            over.set()
            with pytest.raises(
                UnreachableError, match="no answer has come, as from another version of dlc, or `dlc bench serve`"
            ):
                asks.result()


def test_status_of_one_run_leaves_out_the_others() -> None:
    with Peer.join(run="mine") as mine, Peer.join(run="other") as other:
        both = [mine.address, other.address]
        assert [m.id for m in status(both, run="mine", timeout_s=JOIN_S)] == [mine.id]
        assert {m.id for m in status(both, timeout_s=JOIN_S)} == {mine.id, other.id}
        with pytest.raises(UnreachableError, match=f"{other.address} answered, but its run is 'other', not 'third'"):
            status(both, run="third", timeout_s=JOIN_S)


def test_status_of_one_run_tells_of_who_waits_for_others_and_asks_it_again() -> None:
    here, other = free_addresses(2)

    def told() -> str:
        try:
            return ", ".join(m.id for m in status([here], run="mine", timeout_s=1.0))
        except UnreachableError as error:
            return str(error)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Peer.join, [other], listen=here, join_timeout_s=JOIN_S)
        wait_until(lambda: told().startswith(f"{here} answered, but knows of no run yet"), JOIN_S)
        with Peer.join(listen=other, run="mine") as first, joining.result(JOIN_S) as second:
            wait_until(lambda: set(told().split(", ")) == {first.id, second.id}, JOIN_S)


def test_leaving_frees_thread_and_ports_and_ends_waiting_calls() -> None:
    before = threading.active_count()
    (address,) = free_addresses(1)  # both of its ports, which no outgoing connection is given meanwhile
    with Peer.join(listen=address) as peer, Peer.join([address], join_timeout_s=JOIN_S):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(peer.all_reduce, torch.ones(3), timeout_s=ROUND_S)
            wait_until(lambda: peer._ask(lambda node, now: bool(node.exchange.offered)))
            peer.leave()
            with pytest.raises(SwarmClosed):
                waiting.result(JOIN_S)
        with pytest.raises(SwarmClosed):
            peer.members()
        with Peer.join(listen=address):
            pass
    wait_until(lambda: threading.active_count() <= before, what="threads of peers that left")


def test_the_drivers_one_torch_thread_is_its_own_affair() -> None:
    """The caller's own number stays, and so does that of threads which are made later."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Peer.join() as peer, ThreadPoolExecutor(1) as pool:
            assert peer._ask(lambda node, now: torch.get_num_threads()) == 1
            assert torch.get_num_threads() == 2
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_all_reduces_of_two_names_are_on_their_way_at_once() -> None:
    with swarm(2) as peers:
        a = [[torch.full((3,), float(i)), torch.full((2, 2), float(i), dtype=torch.bfloat16)] for i in (1, 3)]
        b = [torch.full((5,), float(i)) for i in (0, 10)]
        handles = [[p.all_reduce(v, name=name, timeout_s=ROUND_S, async_op=True) for name, v in (("a", x), ("b", y))]
                   for p, x, y in zip(peers, a, b, strict=True)]  # fmt: skip
        for one, other in handles:
            assert other.wait(ROUND_S).complete
            report = one.wait(ROUND_S)
            assert report.complete and one.done and one.report is report is one.wait() and not one.cancel()
    assert all(bool((t == 2).all()) for tensors in a for t in tensors) and all(bool((t == 5).all()) for t in b)


def test_a_weight_may_be_an_int() -> None:
    with swarm(2) as peers:
        for _ in range(3):  # the second one is where two histories would part
            given = [torch.zeros(9), torch.ones(9)]

            def act(peer: Peer, i: int, given: list[torch.Tensor] = given) -> RoundReport:
                return peer.all_reduce(given[i], weight=(30, 90)[i], codec="fp32", timeout_s=ROUND_S)

            assert all(report.complete for report in together(peers, act))
            assert all(bool((t == 0.75).all()) for t in given)


def test_a_cancelled_all_reduce_leaves_the_tensors_and_its_name_is_free_again() -> None:
    with swarm(2) as peers:
        given = [torch.ones(3, dtype=torch.float16), torch.full((3,), 3.0, dtype=torch.float16)]
        handle = peers[0].all_reduce(given[0], async_op=True)
        with pytest.raises(RoundTimeout):
            handle.wait(0)
        with pytest.raises(DlcError, match="in flight"):
            peers[0].all_reduce(torch.zeros(3), async_op=True)
        assert not handle.done and handle.cancel() and handle.done and given[0].eq(1).all()
        with pytest.raises(UsageError, match="cancelled"):
            handle.wait()
        reports = together(peers, lambda peer, i: peer.all_reduce(given[i], timeout_s=ROUND_S))
        if not reports[0].complete:  # the round was planned with what was cancelled, before the next wish was heard
            assert all([m.peer for m in report.missing] == [peers[0].id] for report in reports)
            assert all(bool((t == 3).all()) for t in given), "the mean of the other one"
            given = [torch.full((3,), float(i)) for i in (1, 3)]
            together(peers, lambda peer, i: peer.all_reduce(given[i], timeout_s=ROUND_S))
    assert all(bool((t == 2).all()) for t in given)


def test_a_barrier_waits_for_all_and_names_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(3) as peers, ThreadPoolExecutor(3) as pool:
        first = [pool.submit(peer.barrier, "start", timeout_s=ROUND_S) for peer in peers[:2]]
        wait_until(lambda: all("barrier/start" in peer._pending for peer in peers[:2]))
        assert not any(f.done() for f in first)
        peers[2].barrier("start", timeout_s=ROUND_S)
        for f in first:
            f.result(ROUND_S)
        monkeypatch.setattr(collectives, "BARRIER_SHARE", 0.01)
        with pytest.raises(RoundTimeout, match=peers[2].id[:8]):
            pool.submit(peers[1].barrier, "end", timeout_s=ROUND_S)
            peers[0].barrier("end", timeout_s=ROUND_S)


def test_a_second_state_on_a_channel_is_refused_at_once() -> None:
    with swarm(1) as (peer,):
        peer.open("train", ToyState(8, 0), codec="fp32", chunk_elems=8, timeout_s=ROUND_S)
        for _ in range(2):  # who was refused has abandoned its own state, and not the one that is there
            with pytest.raises(UsageError, match="another channel"):
                peer.open("train", ToyState(8, 0), codec="fp32", chunk_elems=8, timeout_s=ROUND_S)
        with pytest.raises(UsageError, match="lease_len is -1"):
            peer.open("other", ToyState(8, 0), codec="fp32", chunk_elems=8, lease_len=-1, timeout_s=ROUND_S)


def test_peers_without_a_log_find_each_other_and_one_alone_need_not_wait() -> None:
    with Peer.join(log=False) as first:
        with pytest.raises(UsageError, match="without the replicated log"):
            first.all_reduce(torch.zeros(4))
        with Peer.join([first.address], join_timeout_s=JOIN_S, log=False) as second:
            wait_until(lambda: all(sum(m.alive for m in p.members()) == 2 for p in (first, second)))
        wait_until(lambda: all(m.id == first.id for m in first.members() if m.alive))


def nested(levels: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"status": {"notes": "x" * 2000}}, "2013 bytes of JSON, at most 1024"),
        ({"status": {"model": object()}}, "what JSON can hold"),
        ({"status": {"nested": nested(100_000)}}, "what JSON can hold"),
        ({"eta_s": float("nan")}, "finite"),
        ({"speed": float("inf")}, "finite"),
    ],
)
def test_what_others_would_not_take_is_refused_where_it_is_said(said: dict[str, Any], why: str) -> None:
    """Else this peer's record would go stale with everybody, and rounds would wait for it."""
    with swarm(2) as peers:
        with pytest.raises(UsageError, match=why):
            peers[0].describe(**said)
        peers[0].describe(speed=3.0, status={"notes": "x" * 1000})
        other = peers[1]
        wait_until(lambda: [m.speed for m in other.members() if m.id == peers[0].id] == [3.0])


MISUSE: list[tuple[str, Callable[[Peer], object]]] = [
    ("1 to 128 bytes", lambda p: p.all_reduce(torch.ones(4), name="n" * 300_000)),
    ("1 to 128 bytes", lambda p: p.all_reduce(torch.ones(4), name="")),
    ("1 to 128 bytes", lambda p: p.all_reduce(torch.ones(4), name="\ud800")),
    ("1 to 128 bytes", lambda p: p.all_reduce(torch.ones(4), name=7)),  # type: ignore[call-overload]
    ("it must be a number from 0 to 2", lambda p: p.all_reduce(torch.ones(4), weight=1e300)),
    ("must be a number of seconds", lambda p: p.all_reduce(torch.ones(4), patience_s=float("nan"))),
    ("must be a number of seconds", lambda p: p.all_reduce(torch.ones(4), timeout_s=float("nan"))),
    ("must be a number of seconds", lambda p: p.barrier(timeout_s=float("nan"))),
    ("torch tensors, not ndarray", lambda p: p.all_reduce([torch.ones(4).numpy()])),  # type: ignore[call-overload]
    (r"not ndarray: torch.from_numpy\(x\)", lambda p: p.all_reduce(torch.ones(4).numpy())),  # type: ignore[call-overload]
    ("must be dense", lambda p: p.all_reduce(torch.ones(4).to_sparse())),
    ("on meta has no values", lambda p: p.all_reduce(torch.ones(4, device="meta"))),
    (r"clone\(\) it", lambda p: p.all_reduce(torch.ones(1).expand(4))),
    (r"unknown codec \['fp16'\]", lambda p: p.all_reduce(torch.ones(4), codec=["fp16"])),  # type: ignore[call-overload]
    ("channel is NoneType: give its name", lambda p: p.position(None)),  # type: ignore[arg-type]
    ("must be a number of seconds", lambda p: p.take_seat("5")),  # type: ignore[arg-type]
    ("must be a number of seconds", lambda p: p.leave(None)),  # type: ignore[arg-type]
    ("callback is int: it must be a function", lambda p: p.on_member_change(5)),  # type: ignore[arg-type]
]


def test_a_call_that_cannot_be_is_refused_and_the_next_one_is_not_the_worse_for_it() -> None:
    """A name that fitted no message, offered once, ended all rounds of the run."""
    with swarm(2) as peers:
        for message, call in MISUSE:
            for peer in peers:
                with pytest.raises(UsageError, match=message):
                    call(peer)
        vectors = [torch.full((4,), float(i)) for i in (1, 3)]
        together(peers, lambda p, i: p.all_reduce(vectors[i], name="é" * 64, timeout_s=float("inf")))
        assert all(torch.equal(v, torch.full((4,), 2.0)) for v in vectors)


def test_a_run_has_a_limited_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the log's state, which must fit a message for as long as the run lasts."""
    monkeypatch.setattr(entries, "CHANNELS_MAX", 3)
    with swarm(2) as peers:
        for name in ("a", "b", "c", "a"):
            together(peers, lambda p, i, name=name: p.all_reduce(torch.ones(4), name=name, timeout_s=ROUND_S))
        for peer in peers:
            with pytest.raises(UsageError, match="without a step number"):
                peer.all_reduce(torch.ones(4), name="d")
        together(peers, lambda p, i: p.all_reduce(torch.ones(4), name="c", timeout_s=ROUND_S))


def test_a_contribution_is_averaged_as_far_as_it_is_final_and_without_what_never_is() -> None:
    """Two peers: one fills its vector from the last chunk to the first while the other's is there; then one stops."""
    numel, chunk = 32, 4
    with swarm(2) as peers:
        states = [ToyState(numel, 0) for _ in peers]
        together(peers, lambda p, i: p.open("train", states[i], codec="fp32", chunk_elems=chunk, timeout_s=JOIN_S))
        for t, ends in ((0, 0), (1, 2 * chunk)):
            filling, vector = Filling(numel, 60.0), torch.full((numel,), 1e6)
            offers = [
                peers[0].contribute("train", vector, weight=1.0, after=t, patience_s=ROUND_S, filling=filling),
                peers[1].contribute("train", torch.full((numel,), 3.0), weight=3.0, after=t, patience_s=ROUND_S),
            ]
            for front in range(numel - chunk, ends - chunk, -chunk):
                vector[front:] = 1.0
                filling.reached(front)
                _until_held(peers, (numel - front) // chunk, offers[0])
            filling.stop()
            reports = [offer.wait(JOIN_S) for offer in offers]
            share = (numel - ends) / numel
            for report in reports:
                assert report is not None and report.t == t + 1
                fractions = {s.peer: s.fraction for s in report.contributors}
                assert fractions == {peers[0].id: share, peers[1].id: 1.0}
                assert [m.reason for m in report.missing] == (["late"] if ends else [])
            assert offers[0].included == tuple(c * chunk >= ends for c in range(numel // chunk))
        # ToyState: m <- m / 2 + mean; theta <- theta + m.
        start, means = torch.arange(numel) * 0.01, [torch.full((numel,), 2.5), torch.full((numel,), 2.5)]
        means[1][: 2 * chunk] = 3.0
        expected = start + means[0] + (means[0] / 2 + means[1])
        for peer, state in zip(peers, states, strict=True):
            assert torch.allclose(peer._ask(lambda node, now, state=state: state.theta.clone()), expected)


def _until_held(peers: Sequence[Peer], chunks: int, offer: Pending) -> None:
    """The means of so many chunks are back, and of no other."""

    def held() -> list[int]:
        return [peer._ask(lambda node, now: len(node.exchange.held)) for peer in peers]

    wait_until(lambda: offer.done or min(held()) >= chunks, JOIN_S, f"{chunks} means are back")
    assert offer.done or max(held()) <= chunks


def test_a_filling_of_another_size_is_refused() -> None:
    with Peer.join() as peer:
        peer.open("train", ToyState(8, 0), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
        with pytest.raises(UsageError, match="a filling of 7 elements"):
            peer.contribute("train", torch.ones(8), weight=1.0, filling=Filling(7, 1.0))


@pytest.mark.parametrize("slow", [False, True], ids=["", "whose caller's thread is slow"])
def test_an_error_behind_a_call_that_nobody_waits_for_ends_the_peer(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """It is an error of the machine as any other: who is in doubt must not vote. It did, where its turn was due."""
    call = Driver.call

    def called(driver: Driver, fn: Callable[[float], Any], look: bool = False) -> Any:
        future = call(driver, fn, look)
        wait_until(lambda: future.done() and (not driver.running or pending.done), what="the driver went on")
        return future

    def filled(node: Node, now: float) -> float:
        monkeypatch.setattr(Node, "next_deadline", lambda self: now)
        return 1 / 0

    with Peer.join() as peer:
        peer.open("train", ToyState(8, 0), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
        monkeypatch.setattr(Node, "filled", filled)
        filling = Filling(8, 60.0)
        pending = peer.contribute("train", torch.ones(8), weight=1.0, filling=filling)
        if slow:
            monkeypatch.setattr(Driver, "call", called)
        filling.reached(0)
        with pytest.raises(SwarmClosed, match="division by zero"):
            pending.wait(JOIN_S)


def test_a_step_that_fails_in_a_call_of_ones_own_ends_the_peer() -> None:
    """A lone peer's round is decided within the call that offers to it. The log was a round ahead of the state then,
    and was saved so."""
    with Peer.join() as peer:
        state = ToyState(8, 0)
        peer.open("train", state, codec="fp32", chunk_elems=4, timeout_s=JOIN_S)

        def step(t: int, means: object) -> None:
            raise MemoryError("no memory for the outer step")

        state.step = step  # type: ignore[method-assign, assignment]
        with pytest.raises(MemoryError):
            peer.contribute("train", torch.ones(8), weight=1.0)
        with pytest.raises(SwarmClosed, match="stopped on an error: no memory for the outer step"):
            peer.checkpoint("train")


def test_what_a_healed_split_has_set_aside_is_in_the_log_of_who_listens_to_no_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = queue.SimpleQueue[object]()
    lost = HistoryLost(2, 200.0)
    for on_event in (None, heard.put):
        with Peer.join(on_event=on_event) as peer:
            peer._driver.ask(lambda now, peer=peer: peer._event(lost))  # type: ignore[misc]
    assert lost in [heard.get() for _ in range(heard.qsize())]
    (line,) = [m for m in caplog.messages if "another history" in m]
    assert "2 rounds of ours, of weight 200 in all, are set aside" in line


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_callback_that_raises_stops_nothing(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """One that called sys.exit() ended the driver without a word, and who waited for it waited for ever."""

    def raising(event: object) -> None:
        raise kind("of the user's own")

    with Peer.join(on_event=raising) as peer:
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).complete
        assert "of the user's own" in caplog.text


def test_a_callback_on_the_drivers_thread_that_would_wait_for_others_is_refused() -> None:
    """It kept the peer from talking to anybody until its time was over, and others took it for dead."""
    peers, said = list[Peer](), queue.SimpleQueue[str]()

    def call(event: object) -> None:
        if peers and isinstance(event, RoundDone) and event.report.channel == "default":
            (peer,) = peers
            for wait in (
                lambda: peer.all_reduce(torch.ones(4), name="inside", timeout_s=2.0),
                lambda: peer.barrier("inside", timeout_s=2.0),
                lambda: peer.broadcast_state({"a": torch.ones(4)}, peer.id, timeout_s=2.0),
            ):
                with pytest.raises(UsageError, match="cannot wait for the other peers.*use on_member_change"):
                    wait()
            said.put(peer.members()[0].id)

    with Peer.join(on_event=call) as peer:
        peers.append(peer)
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).complete
        assert said.get(timeout=ROUND_S) == peer.id
        assert peer.all_reduce(torch.ones(4), name="inside", timeout_s=ROUND_S).complete, "nothing was offered"


def test_a_callback_on_the_drivers_thread_cannot_wait_for_a_handle_either() -> None:
    """Without a time limit that was for ever, for everybody who used the peer."""
    handles, said = list[Reduction](), queue.SimpleQueue[object]()

    def call(event: object) -> None:
        if handles and isinstance(event, RoundDone) and event.report.channel == "other":
            try:
                said.put(handles[0].wait(0.1))
            except (UsageError, RoundTimeout) as error:
                said.put(error)

    join = partial(Peer.join, timeouts=PATIENT)
    with join(on_event=call) as peer, join([peer.address]) as other:
        handles.append(peer.all_reduce(torch.ones(4), async_op=True, timeout_s=2 * JOIN_S))
        together([peer, other], lambda p, i: p.all_reduce(torch.ones(4), name="other", timeout_s=JOIN_S))
        refused = said.get(timeout=JOIN_S)
        assert isinstance(refused, UsageError) and "use on_member_change" in str(refused)
        assert other.all_reduce(torch.ones(4), timeout_s=JOIN_S).complete
        assert handles[0].wait(JOIN_S).complete


def test_a_channel_that_was_not_opened_is_named() -> None:
    with Peer.join() as peer:
        calls: tuple[Callable[[], object], ...] = (
            lambda: peer.contribute("train", torch.ones(8), weight=1.0),
            lambda: peer.pull("train", torch.ones(8)),
            lambda: peer.checkpoint("train"),
        )
        for call in calls:
            with pytest.raises(UsageError, match="no state on channel 'train'"):
                call()


@pytest.mark.parametrize("where", ["waiting", "handing over"])
def test_what_interrupts_a_call_takes_it_back(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm's handler raised in the wait, or Ctrl-C came while the driver was busy: the caller's tensor was averaged
    afterwards, with what it held by then, and written."""

    class Alarm(Exception):
        pass

    given, other = torch.ones(1000), torch.zeros(1000)
    busy = threading.Event()

    def interrupted(*args: object) -> None:
        busy.set()
        monkeypatch.undo()
        raise Alarm

    with swarm(2) as peers:
        if where == "waiting":
            monkeypatch.setattr(Pending, "wait", interrupted)
        else:
            peers[0]._driver.call(lambda now: busy.wait(JOIN_S))
            monkeypatch.setattr(Reply, "result", interrupted)
        with pytest.raises(Alarm):
            peers[0].all_reduce(given, codec="fp32", timeout_s=JOIN_S, patience_s=JOIN_S)
        given.fill_(5.0)
        report = peers[1].all_reduce(other, codec="fp32", timeout_s=ROUND_S, patience_s=1.0)
        assert [share.peer for share in report.contributors] == [peers[1].id]
        assert torch.equal(other, torch.zeros(1000))
        wait_until(lambda: peers[0]._ask(lambda node, now: node.log.head.hex()) == report.head, JOIN_S)
        assert torch.equal(given, torch.full((1000,), 5.0))


def test_ctrl_c_in_a_wait_does_not_end_the_thread_that_ends_the_wait() -> None:
    """Where it came as a round ended, the waiting thread let go of the lock that the driver had, and the peer was gone.

    At each line of the wait, while the other thread is at each of its own.
    """
    cases, pause, paused = 0, 0, True
    while paused:
        pause, at, paused, interrupted = pause + 1, 0, False, True
        while interrupted:
            at += 1
            came, interrupted = _interrupted(at, pause)
            paused, cases = paused or came, cases + interrupted
    assert cases > 20, "as each thread has some lines"


def _interrupted(at: int, pause: int) -> tuple[bool, bool]:
    """Whether the setter came to its `pause`-th line, and the waiter to its `at`-th, where it is interrupted."""
    pending = Pending("train", lambda: None)
    waits, goes_on, lines = threading.Event(), threading.Event(), [0, 0]
    failed: list[BaseException] = []
    paused = False

    def setter_at(frame: FrameType, event: str, arg: object) -> object:
        nonlocal paused
        lines[0] += 1
        if lines[0] == pause:
            paused = True
            waits.set()
            goes_on.wait(JOIN_S)
        return setter_at

    def end() -> None:
        sys.settrace(setter_at)
        try:
            pending.finish(None, False)
        except BaseException as error:
            failed.append(error)
        finally:
            sys.settrace(None)
            waits.set()

    setter = threading.Thread(target=end, daemon=True)

    def waiter_at(frame: FrameType, event: str, arg: object) -> object:
        lines[1] += 1
        if lines[1] == at:
            setter.start()
            waits.wait(10 * TICK_S)  # it may wait for this thread
            raise KeyboardInterrupt
        return waiter_at

    interrupted = False
    before = sys.gettrace()
    sys.settrace(waiter_at)
    try:
        pending.wait(TICK_S)
    except KeyboardInterrupt:
        interrupted = True
    except RoundTimeout:
        pass
    finally:
        sys.settrace(before)
    goes_on.set()
    if setter.ident:
        setter.join(JOIN_S)
        assert not failed and not setter.is_alive(), (at, pause, failed)
        assert pending.done and pending.wait(0.0) is None
    return paused, interrupted


def test_ctrl_c_in_a_wait_that_is_over_keeps_nobody_else_waiting() -> None:
    flag, passed = Flag(), threading.Event()
    others = [threading.Thread(target=flag.wait, daemon=True) for _ in range(4)]

    def come_later() -> None:
        for other in others:
            other.start()
        threading.Timer(TICK_S, flag.set).start()

    def at_the_gate(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is Flag._open.__code__:
            passed.set()
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(at_the_gate)
    try:
        threading.Timer(TICK_S, come_later).start()
        with pytest.raises(KeyboardInterrupt):
            flag.wait(JOIN_S)
    finally:
        sys.settrace(before)
    for other in others:
        other.join(JOIN_S)
    assert passed.is_set() and not any(other.is_alive() for other in others)


@pytest.mark.parametrize("call", ["wait", "ask"])
def test_ctrl_c_at_any_line_of_a_call_leaves_the_driver_nothing_to_wait_for(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller kept the lock by which it was to be told: the driver waited for that for ever, and `leave` for it."""
    monkeypatch.setattr(drivercalls, "LOOK_S", TICK_S / 10)
    peer = Peer.join()

    def wait() -> None:
        looks = iter((False, True))
        peer._wait(lambda: next(looks), None, "")

    interrupted = wait if call == "wait" else lambda: peer._ask(lambda node, now: None)
    assert lines_interrupted(peer, interrupted, lambda: peer._event(object())) > 20, "as a call has some lines"


def test_a_driver_that_ends_while_a_call_waits_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(2) as peers, ThreadPoolExecutor(1) as pool:
        call = pool.submit(peers[0].all_reduce, torch.ones(4), timeout_s=JOIN_S, patience_s=JOIN_S)
        wait_until(lambda: peers[0]._ask(lambda node, now: bool(node.exchange.offered)), JOIN_S)
        monkeypatch.setattr(peers[0]._node, "tick", lambda now: 1 / 0)
        with pytest.raises(SwarmClosed, match="division by zero"):
            call.result(JOIN_S)


def test_what_a_machine_beside_the_log_raises_is_its_callers_affair() -> None:
    with Peer.join() as peer:
        with pytest.raises(ZeroDivisionError):
            peer._ask(lambda node, now: node.serve(lambda: 1 // 0, now))  # type: ignore[arg-type, return-value]
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).complete


def test_where_nobody_has_weight_nothing_is_averaged_and_nothing_is_complete() -> None:
    given = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    with swarm(2) as peers:
        reports = together(peers, lambda p, i: p.all_reduce(given[i], weight=0.0, timeout_s=ROUND_S))
    for i, report in enumerate(reports):
        assert not report.complete and not report.contributors and report.weight == 0.0
        assert torch.equal(given[i], torch.full((4,), i + 1.0))


def test_a_reduction_is_over_when_its_peer_has_left() -> None:
    with swarm(2) as peers:
        reduction = peers[0].all_reduce(torch.ones(4), patience_s=JOIN_S, async_op=True)
        peers[0].leave()
        assert not reduction.cancel()
        with pytest.raises(SwarmClosed):
            reduction.wait(JOIN_S)


def test_who_begin_without_a_runspec_begin_with_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A founder was asked for the RunSpec before it had one: the other began with another, and was never heard."""
    asked = threading.Event()
    started = Driver.start

    def slowly(self: Driver) -> None:
        started(self)
        if not asked.is_set():
            asked.wait(JOIN_S)  # still in the lobby, with nobody to ask

    monkeypatch.setattr(Driver, "start", slowly)
    received = Lobby.receive

    def heard(self: Lobby, *event: Any) -> list[Effect]:
        effects = received(self, *event)
        if self.tries and isinstance(event[1], Welcome):
            asked.set()
        return effects

    monkeypatch.setattr(Lobby, "receive", heard)
    address = free_addresses(1)[0]
    with ThreadPoolExecutor(2) as pool:
        founder = pool.submit(Peer.join, run="both", listen=address)
        wait_until(lambda: founder.done() or any(t.name == "dlc-driver" for t in threading.enumerate()), JOIN_S)
        other = pool.submit(Peer.join, [address], join_timeout_s=JOIN_S)
        peers = [founder.result(), other.result()]
    try:
        assert peers[0].spec == peers[1].spec and peers[1].run == "both"
        together(peers, lambda p, i: p.all_reduce(torch.ones(4), timeout_s=ROUND_S))
    finally:
        for peer in peers:
            peer.leave()


def test_who_begins_with_another_name_than_the_founder_is_told() -> None:
    with Peer.join() as first, pytest.raises(SpecMismatch, match="mine"):
        Peer.join([first.address], run="mine", join_timeout_s=JOIN_S)


def test_who_begins_with_another_name_than_one_of_many_is_told_that_name() -> None:
    """It was told its own, as what the others begin and as what they do not."""
    tries = {name: SimpleNamespace(answer=SimpleNamespace(run=name)) for name in ("first", "second")}
    lobby = cast(Lobby, SimpleNamespace(record=SimpleNamespace(control=["127.0.0.1:1"]), tries=tries))
    with pytest.raises(SpecMismatch, match="run 'second', not 'first'"):
        joining._usual(lobby, "first")
    with pytest.raises(SpecMismatch, match="run 'first', not 'second'"):
        joining._usual(lobby, None)


def test_who_joins_by_a_list_of_which_one_is_gone_is_not_told_to_start_that_one() -> None:
    """It was, as if the run were still to be founded, before the member that had answered had proved that it lives."""
    heard: list[object] = []
    with Peer.join(timeouts=PATIENT) as first:
        listed = [first.address, *free_addresses(1)]
        with Peer.join(listed, timeouts=PATIENT, on_event=heard.append, join_timeout_s=JOIN_S):
            assert heard and not [event for event in heard if isinstance(event, Waiting)]


def somebody_is_lost_meanwhile(node: Node, now: float) -> None:
    """Whenever a mean is written."""
    at_length = node.log.at_length

    def meanwhile(work: Callable[[], None], size_bytes: int) -> None:
        at_length(work, size_bytes)
        node.ctx.notify(MemberDown(Voter("0" * 64, 1)))

    node.log.at_length = meanwhile


def test_who_leaves_in_a_callback_as_a_round_ends_is_told_of_the_round() -> None:
    """Somebody was found dead while the mean was written: whoever waited heard that this peer had left, which says that
    the tensors are unchanged."""
    peers, given = list[Peer](), torch.full((4,), 0.1)

    def call(event: object) -> None:
        if peers and isinstance(event, MemberDown):
            peers[0].leave()

    with Peer.join(on_event=call) as peer:
        peer._ask(somebody_is_lost_meanwhile)
        peers.append(peer)
        assert peer.all_reduce(given, timeout_s=ROUND_S).complete
        assert float(given[0]) == float(torch.tensor(0.1).half()), "the mean"
        with pytest.raises(SwarmClosed):
            peer.all_reduce(given, timeout_s=ROUND_S)


def test_a_call_that_a_callback_cancels_once_its_mean_is_written_is_over() -> None:
    """As above: it said that the tensors were unchanged."""
    calls, said, given = list[Reduction](), list[bool](), torch.full((4,), 0.1)

    def call(event: object) -> None:
        if isinstance(event, MemberDown):
            said.extend(reduction.cancel() for reduction in calls)

    with Peer.join(on_event=call) as peer:
        peer._ask(somebody_is_lost_meanwhile)
        calls.append(peer.all_reduce(given, timeout_s=ROUND_S, async_op=True, expected_s=60.0))
        calls[0].ready()
        assert calls[0].wait(ROUND_S).complete and said == [False]
        assert float(given[0]) == float(torch.tensor(0.1).half()), "the mean"


def test_a_callback_offers_nothing_before_the_end_of_the_offer_before_it_is_told() -> None:
    """Its own call was told of the round that it was not in, and whoever waited for that one was told of nothing."""
    peers, said = list[Peer](), list[object]()

    def call(event: object) -> None:
        if peers and isinstance(event, MemberDown):
            try:
                said.append(peers.pop().all_reduce(torch.ones(4), async_op=True))
            except UsageError as error:
                said.append(str(error))

    with Peer.join(on_event=call) as peer:
        peer._ask(somebody_is_lost_meanwhile)
        peers.append(peer)
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).t == 1
        (refused,) = said
        assert isinstance(refused, str) and "in flight already" in refused
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).t == 2


def test_who_offers_again_as_one_of_several_rounds_is_told_is_not_told_of_the_next_of_them() -> None:
    """Of who catches up by two rounds at once: the second was taken for that of the new offer, which is in neither."""
    told, calls, given = list[RoundDone](), list[Reduction](), torch.full((4,), 0.1)

    def call(event: object) -> None:
        if isinstance(event, RoundDone) and not told:
            told.append(event)
            calls.append(peer.all_reduce(given, timeout_s=ROUND_S, async_op=True, expected_s=60.0))
            peer._over(event)  # in place of the next one

    with Peer.join(on_event=call) as peer:
        assert peer.all_reduce(torch.ones(4), timeout_s=ROUND_S).t == 1
        calls[0].ready()
        assert calls[0].wait(ROUND_S).t == 2
        assert float(given[0]) == float(torch.tensor(0.1).half()), "the mean"


def test_two_threads_may_tell_of_the_end_at_once() -> None:
    """The one that leaves does not wait for the driver's for ever; it failed where that took the last handle."""

    class Taken(dict[str, Pending]):
        """The other thread takes what is left right after this one has looked."""

        def __len__(self) -> int:
            n = super().__len__()
            self.clear()
            return n

    with Peer.join() as peer:
        peer._pending = Taken(default=Pending("default", lambda: None))
        peer._all_over(SwarmClosed("the peer has left"))


def test_ctrl_c_while_a_peer_leaves_keeps_its_folder_from_nobody(tmp_path: Path) -> None:
    """In a notebook, say: until its process had ended, no other could have that identity."""
    peer = Peer.join(state_dir=tmp_path)
    stop = peer._driver.stop

    def interrupted(timeout_s: float, reason: BaseException | None = None) -> None:
        stop(timeout_s, reason)
        raise KeyboardInterrupt

    peer._driver.stop = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        peer.leave()
    with Peer.join(state_dir=tmp_path) as again:
        assert again.id == peer.id


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_is_told_of_the_end_also_where_the_sockets_fail_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(2) as peers:
        transport = peers[0]._driver.transport
        close = transport.close

        def fails(*linger_s: float) -> None:
            close(*linger_s)
            raise OSError("a socket is gone")

        monkeypatch.setattr(transport, "close", fails)
        waits = peers[0].all_reduce(torch.ones(8), timeout_s=10 * ROUND_S, async_op=True)
        peers[0]._driver.stop(ROUND_S)
        with pytest.raises(SwarmClosed):
            waits.wait(ROUND_S)


@pytest.mark.parametrize(("strategy", "probes"), [("diloco", True), ("parameter-server", False)])
def test_what_a_peer_is_joined_with_reaches_its_node(
    monkeypatch: pytest.MonkeyPatch, strategy: str, probes: bool
) -> None:
    """An argument that is lost on the way is missed by nobody: there is a default for each."""
    made, make = list[NodeConfig](), NodeConfig

    def keep(*args: Any, **options: Any) -> NodeConfig:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(peer_module, "NodeConfig", keep)
    spec = RunSpec(strategy=strategy, timeouts=TimeoutsSpec(evict_s=90.0))
    for options in ({"history_bytes": 123, "probe_links": False, "timeouts": QUICK}, {}):
        Peer.join(spec=spec, hold=True, **options).leave()  # type: ignore[arg-type]
    given, usual = made
    assert (given.history_bytes_max, given.probe_links, given.timeouts) == (123, False, QUICK)
    assert (usual.probe_links, usual.timeouts) == (probes, spec.timeouts.floors())
    assert usual.log == (strategy == "diloco") and usual.founder
