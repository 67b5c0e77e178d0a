"""`dlc bench allreduce`: `Peer.all_reduce` again and again, on this host alone or together with others.

    all peers there? ──> for each round: fill the vector, meet, the timed all-reduce, compare the mean

To *meet* is a small all-reduce that is repeated until all N are in it: its report is the same on all of them, so all
leave it after the same round, and start the timed one together.

Every peer's vector follows from its id (`pattern`); so each peer knows the mean of any set of contributors, and a mean
that is off by more than the codec loses ends the benchmark. A round that somebody was missing from is reported, and is
in no figure. Where there can be no more rounds, because somebody is gone for good, the figures are of those before.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlc.bench.limit import Rates, least
from dlc.bench.pattern import Pattern
from dlc.bench.plain import rounded
from dlc.comm import vectors
from dlc.comm.clock import clock
from dlc.comm.codecs import DENSE, get_codec
from dlc.errors import DlcError, RoundTimeout, UsageError
from dlc.peer import Peer
from dlc.report import RoundReport

WARM_UP_ROUNDS = 2
"""Not timed: first connections, page faults, pace estimates."""
MB_MAX = 8000.0
"""The vector, its pattern, what is sent and the results that are held: up to five times this in memory."""
ROUND_TIMEOUT_S = 600.0
"""Others are waited for during half of it."""
GATE_S_MAX = 60.0
"""For all to meet again after a round: by then a peer that has died is known to be dead."""
JOIN_S, JOIN_S_PER_PROCESS = 60.0, 10.0
"""For the next peer to come: by default, and for each process of --local where that is more."""
LOOK_EVERY_S = 0.1
GONE_S = 10.0
"""For a peer that is taken for dead to be there again: a machine may stand still for a while."""


class WrongMean(DlcError):
    """An all-reduce returned something else than the mean."""


@dataclass(frozen=True)
class PeerReport:
    """What one peer saw; times are medians over the timed rounds."""

    peer: str
    address: str
    seconds: tuple[float, ...]
    """Each timed round that was complete, from the call to the mean."""
    waiting_s: float
    """Of a round: before its plan, for others to be ready."""
    reduce_s: float
    """Of a round: from the plan to the last byte of the result."""
    rest_s: float
    """Of a round: votes, commit, and handing the result over."""
    sent_mb: float
    received_mb: float
    incomplete_rounds: int
    """Timed rounds that somebody was missing from, or that did not come about."""
    stopped: str = ""
    """Why there were no more rounds; "" if there were all."""


@dataclass(frozen=True)
class AllReduceReport:
    """The benchmark; a round's time is that of the slowest of `peers` (in a swarm of several hosts: this one only)."""

    n_peers: int
    mb: float
    """10^6 bytes of fp32 per peer."""
    codec: str
    encrypted: bool
    rounds: int
    incomplete_rounds: int
    seconds_median: float
    seconds_min: float
    effective_mbps: float
    """2 (N - 1) / N times the vector on the wire, per median round: what each peer sends, and receives."""
    slowest_link_mbps: float | None
    """Of --links; None without."""
    limit_s: float | None
    """The least time of a round over these links: see limit.py."""
    limited_by: str
    """What takes so long: a path, or all that one host sends or receives; "" without --links."""
    limit_share: float | None
    """limit_s / seconds_median: 1 is perfect."""
    seconds: tuple[float, ...]
    stopped: str
    """Why a peer had no more rounds, or told nothing; "" if all had and did."""
    peers: tuple[PeerReport, ...]
    """In a swarm of several hosts this one only; else those that came to their end."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to what was measured."""
        plain: dict[str, Any] = rounded(dataclasses.asdict(self))
        return plain


@dataclass(frozen=True)
class Work:
    """What is averaged, and how often."""

    n_peers: int
    mb: float
    codec: str
    rounds: int
    pause_s: float = 0.0
    """Between rounds."""

    def __post_init__(self) -> None:
        if get_codec(self.codec, DENSE).sparse:
            raise UsageError(f"{self.codec} is for training only: it leaves most elements for later rounds")
        if not 0 < self.mb <= MB_MAX:
            raise UsageError(f"--mb is {self.mb:g}; choose more than 0, up to {MB_MAX:g} MB")
        if self.n_peers < 2 or self.rounds < 1:
            raise UsageError("an all-reduce needs at least 2 peers and 1 round")

    @property
    def numel(self) -> int:
        return max(int(self.mb * 1e6 / 4), 1)


def join_timeout_s(n_local: int | None) -> float:
    """What is waited for peers by default. Processes of one host load torch side by side, on the same few cores."""
    return max(JOIN_S, JOIN_S_PER_PROCESS * (n_local or 0))


def take_part(
    peer: Peer,
    work: Work,
    say: Callable[[str], None],
    join_timeout_s: float,
    look: Callable[[], None] = lambda: None,
) -> PeerReport:
    """All rounds, as one of `work.n_peers`. Raises WrongMean, UsageError (not everybody came), and what else
    ended it before there was a round to report.

    join_timeout_s: from one peer that comes to the next. look: called while waiting for others; the DlcError that it
    raises ends that.
    """
    _wait_for_all(peer, work.n_peers, say, join_timeout_s, look)
    pattern = Pattern(work.numel, work.codec)
    vector, gate = vectors.empty(work.numel), torch.zeros(1)
    _meet(peer, gate, work.n_peers, join_timeout_s, look)
    seconds: list[float] = []
    reports: list[RoundReport] = []
    gone = _Gone(peer, work.n_peers, look)
    for number in range(-WARM_UP_ROUNDS, work.rounds):
        say("warm-up" if number < 0 else f"round {number + 1} of {work.rounds}")
        pattern.fill(vector, peer.id)
        try:
            if number > -WARM_UP_ROUNDS:
                _pause(work.pause_s, look)
            _meet(peer, gate, work.n_peers, GATE_S_MAX, gone)
            begin = clock()
            report = _reduced(peer, vector, "default", work.codec, ROUND_TIMEOUT_S, look)
        except DlcError as error:
            if not any(_whole(r, work) for r in reports):
                raise
            return _summary(peer, work, seconds, reports, f"after {len(reports)} of {work.rounds} rounds: {error}")
        took_s = clock() - begin
        if report.complete:
            _check(vector, pattern, report)
        if number >= 0:
            seconds.append(took_s)
            reports.append(report)
    return _summary(peer, work, seconds, reports)


def _wait_for_all(
    peer: Peer, n_peers: int, say: Callable[[str], None], timeout_s: float, look: Callable[[], None]
) -> None:
    deadline, told, most = clock() + timeout_s, -1, 0
    while (here := sum(member.alive for member in peer.members())) < n_peers:
        look()
        if here > most:
            deadline, most = clock() + timeout_s, here
        if clock() >= deadline:
            raise UsageError(
                f"only {here} of {n_peers} peers are here, and no other came within {timeout_s:g} s; start the same "
                "command on every host, or give a slow one more --join-timeout"
            )
        if here != told:
            say(f"{here} of {n_peers} peers are here")
            told = here
        threading.Event().wait(LOOK_EVERY_S)


class _Gone:
    """Raises DlcError, where a peer of the benchmark is gone for good, or where `look` raises it."""

    def __init__(self, peer: Peer, n_peers: int, look: Callable[[], None]) -> None:
        self._peer, self._n_peers, self._look = peer, n_peers, look
        self._since: float | None = None

    def __call__(self) -> None:
        self._look()
        here = sum(member.alive for member in self._peer.members())
        if here >= self._n_peers:
            self._since = None
            return
        now = clock()
        self._since = now if self._since is None else self._since
        if now >= self._since + GONE_S:
            raise DlcError(f"only {here} of {self._n_peers} peers are still here")


def _pause(seconds: float, look: Callable[[], None]) -> None:
    until = clock() + seconds
    while (left_s := until - clock()) > 0:
        look()
        threading.Event().wait(min(LOOK_EVERY_S, left_s))


def _meet(peer: Peer, gate: Tensor, n_peers: int, timeout_s: float, look: Callable[[], None]) -> None:
    """A round with everybody in it. Alive is not enough: a newcomer takes part only when it has a seat."""
    deadline, most = clock() + timeout_s, 0
    while len((report := _reduced(peer, gate, "gate", "fp32", GATE_S_MAX, look)).contributors) < n_peers:
        look()
        if (here := len(report.contributors)) > most:
            deadline, most = clock() + timeout_s, here
        if clock() >= deadline:
            raise DlcError(f"not all {n_peers} peers took part within {timeout_s:g} s: {report.summary()}")
        threading.Event().wait(LOOK_EVERY_S)


def _reduced(
    peer: Peer, tensor: Tensor, name: str, codec: str, timeout_s: float, look: Callable[[], None]
) -> RoundReport:
    """An all-reduce that is given up when `look` raises."""
    until = clock() + timeout_s
    reduction = peer.all_reduce(tensor, name=name, codec=codec, timeout_s=timeout_s, async_op=True)
    try:
        while reduction.done or clock() < until:
            try:
                return reduction.wait(LOOK_EVERY_S)
            except RoundTimeout:
                look()
        raise RoundTimeout(f"no round of {name!r} was committed within {timeout_s:g} s")
    except BaseException:
        reduction.cancel()
        raise


def _check(vector: Tensor, pattern: Pattern, report: RoundReport) -> None:
    if wrong := pattern.wrong(vector, [share.peer for share in report.contributors]):
        raise WrongMean(
            f"round {report.t} gave a wrong mean: {wrong}; please report this, with {json.dumps(report.to_dict())}"
        )


def _whole(report: RoundReport, work: Work) -> bool:
    return report.complete and len(report.contributors) == work.n_peers


def _summary(peer: Peer, work: Work, seconds: list[float], reports: list[RoundReport], stopped: str = "") -> PeerReport:
    kept = [(s, r) for s, r in zip(seconds, reports, strict=True) if _whole(r, work)]
    if not kept:
        raise DlcError(f"no round had all {work.n_peers} peers: {reports[-1].summary()}")

    def mid(values: Sequence[float]) -> float:
        return statistics.median(values)

    return PeerReport(
        peer=peer.id,
        address=peer.address,
        seconds=tuple(s for s, _ in kept),
        waiting_s=mid([r.waiting_s for _, r in kept]),
        reduce_s=mid([r.reduce_s for _, r in kept]),
        rest_s=mid([max(s - r.waiting_s - r.reduce_s, 0.0) for s, r in kept]),
        sent_mb=mid([r.bytes_sent for _, r in kept]) / 1e6,
        received_mb=mid([r.bytes_received for _, r in kept]) / 1e6,
        incomplete_rounds=work.rounds - len(kept),
        stopped=stopped,
    )


def combine(
    peers: Sequence[PeerReport], work: Work, encrypted: bool, links: Rates | None, lost: str = ""
) -> AllReduceReport:
    """One report of all. Where rounds were incomplete they no longer pair up, and the slowest peer's times count.

    links: between all hosts that take part. lost: why the report of a peer is not among `peers`.
    """
    incomplete = max(p.incomplete_rounds for p in peers)
    if incomplete:
        seconds = max((p.seconds for p in peers), key=statistics.median)
    else:
        seconds = tuple(max(of_round) for of_round in zip(*(p.seconds for p in peers), strict=True))
    median_s = statistics.median(seconds)
    wire_mbit = get_codec(work.codec).wire_bytes(work.numel) * 8e-6
    each_mbit = 2 * (work.n_peers - 1) / work.n_peers * wire_mbit
    limit = least(links, wire_mbit) if links else None
    return AllReduceReport(
        n_peers=work.n_peers,
        mb=work.mb,
        codec=work.codec,
        encrypted=encrypted,
        rounds=work.rounds,
        incomplete_rounds=incomplete,
        seconds_median=median_s,
        seconds_min=min(seconds),
        effective_mbps=each_mbit / median_s,
        slowest_link_mbps=min(links.values()) if links else None,
        limit_s=limit.seconds if limit is not None else None,
        limited_by=limit.by if limit is not None else "",
        limit_share=limit.seconds / median_s if limit is not None else None,
        seconds=seconds,
        stopped=next((p.stopped for p in peers if p.stopped), lost),
        peers=tuple(peers),
    )
