"""`dlc bench allreduce`: its arithmetic, that it notices a wrong mean, and that peers stay in step."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlc.bench import allreduce
from dlc.bench.allreduce import (
    GONE_S,
    WARM_UP_ROUNDS,
    PeerReport,
    Work,
    WrongMean,
    combine,
    join_timeout_s,
    take_part,
)
from dlc.bench.pattern import Pattern
from dlc.errors import DlcError, RoundTimeout, UsageError
from dlc.peer import Peer
from dlc.report import Missing, RoundReport, Share
from tests.swarm import swarm

WORK = Work(n_peers=3, mb=2.0, codec="fp16", rounds=3)


def test_three_peers_measure_and_agree() -> None:
    with swarm(3) as peers, ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda peer: take_part(peer, WORK, lambda text: None, 180.0), peers))
    links = dict.fromkeys(permutations("abc", 2), 100.0)
    whole = combine(reports, WORK, False, links)
    assert whole.incomplete_rounds == 0 and len(whole.seconds) == 3
    for report in reports:
        assert len(report.seconds) == 3 and report.waiting_s + report.reduce_s + report.rest_s > 0
    assert sum(r.sent_mb for r in reports) == pytest.approx(3 * 2 * 2 / 3 * 1.0, rel=0.02), "2 (N - 1) / N each"
    assert whole.limit_s == pytest.approx(4 / 3 * (8e6 + 16) / 100e6)
    assert whole.slowest_link_mbps == 100.0 and whole.limited_by.startswith("all that")
    assert whole.limit_share == pytest.approx(whole.limit_s / whole.seconds_median)
    assert json.loads(json.dumps(whole.to_dict()))["peers"][0]["peer"] == reports[0].peer


def peer_report(seconds: tuple[float, ...], incomplete: int = 0) -> PeerReport:
    return PeerReport("p", "a:1", seconds, 0.1, 0.2, 0.3, 1.0, 1.0, incomplete)


def test_a_round_takes_as_long_as_its_slowest_peer() -> None:
    whole = combine([peer_report((1.0, 5.0, 2.0)), peer_report((2.0, 1.0, 3.0))], WORK, False, None)
    assert whole.seconds == (2.0, 5.0, 3.0) and (whole.seconds_median, whole.seconds_min) == (3.0, 2.0)
    assert whole.effective_mbps == pytest.approx(4 / 3 * 8.000016 / 3.0) and whole.limit_share is None
    lossy = combine([peer_report((1.0, 1.5), 1), peer_report((2.0, 2.5, 3.0))], WORK, False, None)
    assert lossy.incomplete_rounds == 1 and lossy.seconds == (2.0, 2.5, 3.0)


class FakePeer:
    """One whose all-reduce returns what it is told to. From round `dies_at` on the other one is gone for good."""

    def __init__(self, wrong: float = 0.0, missing: bool = False, dies_at: int = 10**6) -> None:
        self.id, self.address = "x" * 32, "h:1"
        self.wrong, self.missing, self.dies_at, self.round = wrong, missing, dies_at, 0

    def members(self) -> list[Any]:
        return [SimpleNamespace(alive=True)] * 2

    def all_reduce(self, tensor: torch.Tensor, *, name: str, codec: str, timeout_s: float, async_op: bool) -> Any:
        report = self._report(tensor, name, codec)
        return SimpleNamespace(wait=lambda timeout_s: report, done=True, cancel=lambda: False)

    def _report(self, tensor: torch.Tensor, name: str, codec: str) -> RoundReport:
        other = "y" * 32
        gone = self.missing and name == "default"
        if name == "default":
            self.round += 1
            if self.round >= self.dies_at:
                raise RoundTimeout("the other one is gone")
            theirs = torch.empty_like(tensor)
            Pattern(tensor.numel(), codec).fill(theirs, other)
            tensor.add_(theirs).div_(2).add_(self.wrong)
        shares = (Share(self.id, 1.0, 1.0),) if gone else (Share(self.id, 1.0, 1.0), Share(other, 1.0, 1.0))
        missing = (Missing(other, "late", 1.0),) if gone else ()
        return RoundReport("c", 1, "", shares, missing, 2.0, 10, 10, 0.1, 0.0, 0.1, 1)


def run(fake: FakePeer, rounds: int = 2) -> PeerReport:
    work = Work(n_peers=2, mb=0.4, codec="fp16", rounds=rounds)
    return take_part(fake, work, lambda text: None, 5.0)  # type: ignore[arg-type]


def test_a_wrong_mean_is_never_a_figure() -> None:
    assert run(FakePeer()).incomplete_rounds == 0
    with pytest.raises(WrongMean, match="wrong mean"):
        run(FakePeer(wrong=0.05))
    with pytest.raises(WrongMean):
        run(FakePeer(wrong=float("nan")))
    with pytest.raises(DlcError, match="no round had all 2 peers"):
        run(FakePeer(missing=True))


def test_what_was_measured_until_somebody_was_gone_for_good_is_told() -> None:
    report = run(FakePeer(dies_at=WARM_UP_ROUNDS + 3), rounds=5)
    assert len(report.seconds) == 2 and report.incomplete_rounds == 3
    assert report.stopped == "after 2 of 5 rounds: the other one is gone"
    whole = combine([report, peer_report((1.0, 1.0, 1.0, 1.0, 1.0))], WORK, False, None)
    assert whole.stopped == report.stopped and whole.incomplete_rounds == 3
    with pytest.raises(RoundTimeout, match="gone"):
        run(FakePeer(dies_at=WARM_UP_ROUNDS + 1))


def test_who_does_not_come_is_told() -> None:
    with Peer.join() as peer, pytest.raises(UsageError, match="only 1 of 3 peers are here"):
        take_part(peer, WORK, lambda text: None, 0.2)


def test_who_is_gone_for_a_while_ends_it_and_who_stood_still_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, other = [0.0], SimpleNamespace(alive=True)
    monkeypatch.setattr(allreduce, "clock", lambda: now[0])
    peer = SimpleNamespace(members=lambda: [SimpleNamespace(alive=True), other])
    gone = allreduce._Gone(peer, 2, lambda: None)  # type: ignore[arg-type]
    for at, alive in ((0.0, True), (1.0, False), (GONE_S, False), (GONE_S + 2, True), (GONE_S + 3, False)):
        now[0], other.alive = at, alive
        gone()
    now[0] = 2 * GONE_S + 3
    with pytest.raises(DlcError, match="only 1 of 2 peers are still here"):
        gone()


@pytest.mark.parametrize("at", ["gate", "default"])
def test_what_is_looked_for_ends_a_round_in_the_middle(at: str) -> None:
    """Its call is given up, and the figures are of the rounds before."""
    given_up: list[str] = []

    class Stuck(FakePeer):
        def all_reduce(self, tensor: torch.Tensor, *, name: str, codec: str, timeout_s: float, async_op: bool) -> Any:
            if self.round < WARM_UP_ROUNDS + 2 or name != at:
                return super().all_reduce(tensor, name=name, codec=codec, timeout_s=timeout_s, async_op=async_op)

            def wait(timeout_s: float) -> RoundReport:
                raise RoundTimeout("not yet")

            return SimpleNamespace(wait=wait, done=False, cancel=lambda: given_up.append(name))

    stuck = Stuck()

    def look() -> None:
        if stuck.round == WARM_UP_ROUNDS + 2:
            raise DlcError("a peer has died")

    work = Work(n_peers=2, mb=0.4, codec="fp16", rounds=5)
    report = take_part(stuck, work, lambda text: None, 5.0, look)  # type: ignore[arg-type]
    assert len(report.seconds) == 2 and report.stopped == "after 2 of 5 rounds: a peer has died"
    assert given_up == [at]


def test_processes_of_one_host_may_take_their_time() -> None:
    assert join_timeout_s(None) == join_timeout_s(2) == 60.0 and join_timeout_s(16) == 160.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"codec": "nix"}, "unknown codec"),
        ({"mb": 0.0}, "--mb"),
        ({"mb": 1e9}, "--mb"),
        ({"n_peers": 1}, "at least 2 peers"),
        ({"rounds": 0}, "1 round"),
    ],
)
def test_work_that_cannot_be_done_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Work(**({"n_peers": 2, "mb": 1.0, "codec": "fp16", "rounds": 1} | options))
