"""What may go wrong with a peer in the middle of an all-reduce, over real peers and sockets.

Hivemind tests its averaging against peers that fail before they send, while they send, or while they reduce, that send
or reduce slowly, or that cancel. Here are the same faults, alone and in pairs. Whatever happens, the healthy peers
succeed with equal bits, and every single element is the weighted mean of exactly those whom the report names for it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from dlc.comm.clock import clock
from dlc.comm.effects import Effect
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Contrib, Message
from dlc.comm.node import Node
from dlc.comm.timeouts import Timeouts
from dlc.errors import SwarmClosed
from dlc.peer import Peer
from dlc.report import RoundReport
from tests.swarm import PATIENT, ROUND_S, swarm

CHUNK, CHUNKS = 200, 40
NUMEL = CHUNK * (CHUNKS - 1) + 77
SOME = 10
"""Chunks after which a fault strikes: each of four peers sends and gets thirty."""
SLOW_S = 0.06
"""Between two chunks of a slow peer, on each of its links: its round takes a second more."""
TIMEOUTS = Timeouts(slot_settle_s=0.3, chunk_s=6.0)
"""Who is silent is late for a round only after it would have been found dead."""


@pytest.fixture(autouse=True)
def many_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of four chunks, so that contributions and results of different chunks mix."""
    monkeypatch.setattr("dlc.collectives.usual_chunk_elems", lambda numel, codec, most: min(CHUNK, numel))
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 1)


# ------------------------------------------------------------------ the faults


class Crash(Exception):
    """Ends a driver thread as SIGKILL would: nothing is announced, and its sockets close."""


class Victim:
    """Stands between one peer's node and its driver. Everything here runs on the driver thread."""

    def __init__(self, peer: Peer, node: Node) -> None:
        self.peer, self.node = peer, node
        self.sent = self.received = 0
        self._receive, self._tick, self._next_deadline = node.receive, node.tick, node.next_deadline
        self._next_bulk, self._pending_bulk = node.next_bulk, node.pending_bulk
        self._aside: deque[tuple[Voter, Message]] = deque()
        self._send_due: dict[PeerId, float] = {}
        self._reduce_due = 0.0
        self._leaving = False
        self.on_send: Callable[[Bulk], Bulk | None] = lambda bulk: bulk
        self.on_contrib: Callable[[], None] = lambda: None
        self.send_gap_s = self.reduce_gap_s = 0.0
        self.thaw = threading.Event()
        for name in ("receive", "tick", "next_deadline", "next_bulk", "pending_bulk"):
            setattr(node, name, getattr(self, name))

    def next_bulk(self, to: PeerId) -> Bulk | None:
        if not self._may_send(to):
            return None
        bulk = self._next_bulk(to)
        if bulk is None:
            return None
        self.sent += isinstance(bulk, Contrib)
        self._send_due[to] = clock() + self.send_gap_s
        return self.on_send(bulk)

    def pending_bulk(self) -> set[PeerId]:
        return {peer for peer in self._pending_bulk() if self._may_send(peer)}

    def _may_send(self, to: PeerId) -> bool:
        return not self._leaving and clock() >= self._send_due.get(to, 0.0)

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Contrib):
            self.received += 1
            self.on_contrib()
            if self.reduce_gap_s:
                self._aside.append((sender, message))
                return []
        return self._receive(sender, message, now)

    def tick(self, now: float) -> list[Effect]:
        effects = self._tick(now)
        if self._aside and now >= self._reduce_due:
            self._reduce_due = now + self.reduce_gap_s
            effects += self._receive(*self._aside.popleft(), now)
        return effects

    def next_deadline(self) -> float:
        due = [self._next_deadline()] + [self._reduce_due] * bool(self._aside)
        if self.send_gap_s:
            due += [at for peer in self._pending_bulk() if (at := self._send_due.get(peer, 0.0)) > clock()]
        return min(due)

    # What may happen.

    def crash(self) -> None:
        raise Crash

    def leave(self) -> None:
        self._leaving = True  # the round is not to end before that thread gets to run
        threading.Thread(target=self.peer.leave).start()

    def freeze(self) -> None:
        self.thaw.wait(ROUND_S)


def after_some(count: Callable[[], int], act: Callable[[], None]) -> Callable[[], None]:
    def look() -> None:
        if count() == SOME:
            act()

    return look


def dies_before_it_sends(victim: Victim) -> None:
    victim.on_send = lambda bulk: victim.crash()


def _while_it_sends(victim: Victim, act: Callable[[], None]) -> None:
    strike = after_some(lambda: victim.sent, act)

    def on_send(bulk: Bulk) -> Bulk:
        strike()
        return bulk

    victim.on_send = on_send


def _while_it_reduces(victim: Victim, act: Callable[[], None]) -> None:
    victim.on_contrib = after_some(lambda: victim.received, act)


def dies_while_it_sends(victim: Victim) -> None:
    _while_it_sends(victim, victim.crash)


def dies_while_it_reduces(victim: Victim) -> None:
    _while_it_reduces(victim, victim.crash)


def leaves_while_it_sends(victim: Victim) -> None:
    _while_it_sends(victim, victim.leave)


def freezes_while_it_reduces(victim: Victim) -> None:
    _while_it_reduces(victim, victim.freeze)


def sends_slowly(victim: Victim) -> None:
    victim.send_gap_s = SLOW_S


def reduces_slowly(victim: Victim) -> None:
    victim.reduce_gap_s = SLOW_S


def stops_sending(victim: Victim) -> None:
    """It lives, but its contributions get lost."""
    victim.on_send = lambda bulk: None if isinstance(bulk, Contrib) and victim.sent > SOME else bulk


Fault = Callable[[Victim], None]
SLOW: tuple[Fault, ...] = (sends_slowly, reduces_slowly)
DIES: tuple[Fault, ...] = (dies_before_it_sends, dies_while_it_sends, dies_while_it_reduces)
LIVES: tuple[Fault, ...] = (*SLOW, stops_sending, freezes_while_it_reduces)
"""It can learn the result in the end."""
REASONS: dict[Fault, set[str]] = {
    **{fault: {"dead"} for fault in DIES},
    freezes_while_it_reduces: {"dead", "late"},
    leaves_while_it_sends: {"left"},
    stops_sending: {"late"},
}


# ------------------------------------------------------------------ what must hold


def contributors_of_chunks(mean: Tensor, given: Tensor) -> Iterator[tuple[int, frozenset[int]]]:
    """(elements, whose mean they are) for every chunk: found by trying all groups, from the values alone."""
    n = len(given)
    groups = [frozenset(g) for k in range(1, n + 1) for g in itertools.combinations(range(n), k)]
    for start in range(0, NUMEL, CHUNK):
        part, parts = mean[start : start + CHUNK].double(), given[:, start : start + CHUNK].double()
        weights = {g: torch.tensor([float(i + 1) if i in g else 0.0 for i in range(n)]).double() for g in groups}
        fits = [g for g, w in weights.items() if torch.allclose(w @ parts / w.sum(), part, rtol=1e-5, atol=1e-6)]
        assert len(fits) == 1, f"elements from {start} are the mean of no group, or of several: {fits}"
        yield part.numel(), fits[0]


def check(peers: list[Peer], given: Tensor, vectors: list[Tensor], reports: dict[int, RoundReport]) -> RoundReport:
    """All that have a report hold the same bits, and these are the mean of whom the report names."""
    first = reports[0]
    for i, report in reports.items():
        assert torch.equal(vectors[i], vectors[0]), f"peer {i} holds other bits"
        assert (report.contributors, report.missing, report.head) == (first.contributors, first.missing, first.head)
    elements = dict.fromkeys(range(len(peers)), 0)
    for count, group in contributors_of_chunks(vectors[0], given):
        for i in group:
            elements[i] += count
    found = {peers[i].id: count / NUMEL for i, count in elements.items() if count}
    assert {share.peer: share.fraction for share in first.contributors} == pytest.approx(found)
    assert {share.peer: share.weight for share in first.contributors} == {
        peer.id: i + 1.0 for i, peer in enumerate(peers) if elements[i]
    }
    lacking = {peers[i].id: 1 - count / NUMEL for i, count in elements.items() if count < NUMEL}
    assert {missing.peer: missing.fraction for missing in first.missing} == pytest.approx(lacking)
    return first


def run_round(n: int, faults: dict[int, Fault]) -> None:
    """n peers average; those in `faults` (never peer 0) are struck. Where all are only slow, nobody is to be taken for
    dead, nor for late."""
    timeouts = PATIENT if set(faults.values()) <= set(SLOW) else TIMEOUTS
    given = torch.randn(n, NUMEL, generator=torch.Generator().manual_seed(n))
    vectors = list(given.clone())
    with swarm(n, timeouts=timeouts) as peers, ThreadPoolExecutor(n) as pool, ExitStack() as stack:
        for i, fault in faults.items():
            victim = peers[i]._ask(lambda node, now, i=i: Victim(peers[i], node))
            stack.callback(victim.thaw.set)
            fault(victim)
        calls: list[Future[RoundReport]] = [
            pool.submit(p.all_reduce, v, weight=i + 1.0, codec="fp32", timeout_s=ROUND_S)
            for i, (p, v) in enumerate(zip(peers, vectors, strict=True))
        ]
        healthy = {i: calls[i].result() for i in range(n) if i not in faults}
        stack.close()  # thaw
        reports = dict(healthy)
        for i, fault in faults.items():
            if fault in LIVES:
                reports[i] = calls[i].result()
            else:
                with pytest.raises(SwarmClosed):
                    calls[i].result()
        report = check(peers, given, vectors, reports)
        fractions = {share.peer: share.fraction for share in report.contributors}
        assert all(fractions[peers[i].id] == 1.0 for i in healthy), "a healthy peer lost a part of its contribution"
        missing = {m.peer: m.reason for m in report.missing}
        for i, fault in faults.items():
            if fault in REASONS:
                assert missing[peers[i].id] in REASONS[fault]
        if set(faults.values()) <= set(SLOW):
            assert report.complete and report.ballots == 1, report.summary()


@pytest.mark.parametrize("fault", [*DIES, leaves_while_it_sends, *LIVES], ids=lambda fault: fault.__name__)
def test_one_of_four(fault: Fault) -> None:
    run_round(4, {2: fault})


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (dies_before_it_sends, dies_while_it_sends),
        (dies_while_it_sends, sends_slowly),
        (dies_while_it_reduces, dies_while_it_reduces),
        (dies_while_it_reduces, leaves_while_it_sends),
        (leaves_while_it_sends, reduces_slowly),
        (sends_slowly, reduces_slowly),
    ],
    ids=lambda fault: fault.__name__,
)
def test_two_of_five(one: Fault, two: Fault) -> None:
    run_round(5, {1: one, 3: two})
