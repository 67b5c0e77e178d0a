"""A RoundReport of a committed round, read from the manifest's own chunk headers, so true by construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlc.comm.entries import Entry, Part
from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import grid_of
from dlc.comm.messages import Result
from dlc.comm.offered import Offered, Traffic
from dlc.report import Missing, Reason, RoundReport, Share


def account(
    entry: Entry,
    results: Sequence[Result],
    absent: Mapping[Voter, Reason],
    mine: Offered | None,
    traffic: Traffic,
    reduce_s: float,
    now: float,
    paths: Mapping[PeerId, str],
) -> RoundReport:
    """`absent`: alive voters that the roster lacks. `mine`: my own contribution, if I had one; its times are mine."""
    grid = grid_of(entry)
    elements = {part.voter: 0 for part in entry.roster}
    reasons: dict[Voter, dict[str, int]] = {}
    owned: dict[PeerId, int] = {}
    for result in results:
        start, stop = grid.span(result.header.chunk)
        owner = result.header.owner.peer
        owned[owner] = owned.get(owner, 0) + stop - start
        for part in result.header.included:
            elements[part.voter] += stop - start
        for voter, reason in _lacking(entry, result):
            by_reason = reasons.setdefault(voter, {})
            by_reason[reason] = by_reason.get(reason, 0) + stop - start
    shares = [Share(p.voter.peer, p.weight, elements[p.voter] / grid.numel) for p in entry.roster if elements[p.voter]]
    missing = [
        Missing(voter.peer, _reason(by_reason), min(1.0, sum(by_reason.values()) / grid.numel))
        for voter, by_reason in sorted(reasons.items())
    ]
    missing += [Missing(voter.peer, reason, 1.0) for voter, reason in sorted(absent.items())]
    seconds = now - mine.since if mine else 0.0
    waited_s = mine.waited_s if mine else None
    return RoundReport(
        channel=entry.channel,
        t=entry.t,
        head=entry.hash.hex(),
        contributors=tuple(shares),
        missing=tuple(missing),
        weight=sum(share.weight for share in shares),
        bytes_sent=traffic.bytes_sent,
        bytes_received=traffic.bytes_received,
        seconds=seconds,
        waiting_s=seconds if waited_s is None else min(seconds, waited_s),
        reduce_s=reduce_s,
        ballots=max(1, traffic.ballots),
        paths=dict(paths),
        owned={peer: elems / grid.numel for peer, elems in sorted(owned.items())},
    )


def _lacking(entry: Entry, result: Result) -> list[tuple[Voter, str]]:
    """Who is not in this chunk, and why. One that was reduced under an earlier ballot, whose roster was smaller, says
    nothing of who was not ready then."""
    header = result.header
    lacking = [(excluded.voter, excluded.reason) for excluded in header.excluded]
    if header.included:
        named = {part.voter for part in header.included} | {voter for voter, _ in lacking}
        lacking += [(part.voter, "not ready") for part in entry.roster if part.voter not in named]
    return lacking


def chunks_with(own: Part, results: Sequence[Result]) -> tuple[bool, ...]:
    """For each chunk whether this contribution is in its mean."""
    return tuple(own in result.header.included for result in results)


def deaf_owners(entry: Entry, results: Sequence[Result]) -> set[Voter]:
    """Owners that nobody else's part reached in time, in any of their chunks: their bulk port is probably closed.

    Parts that reached no owner at all prove nothing: their contributor took them back, or cannot send.
    """
    sent = {part.voter for result in results for part in result.header.included}
    heard: dict[Voter, bool] = {}
    for result in results:
        header = result.header
        late = {excluded.voter for excluded in header.excluded if excluded.reason == "late"}
        others = {part.voter for part in entry.roster if part.voter in sent} - {header.owner}
        heard[header.owner] = heard.get(header.owner, False) or not others or not others <= late
    return {owner for owner, was_heard in heard.items() if not was_heard}


def _reason(by_reason: Mapping[str, int]) -> Reason:
    """The reason that most elements give; anything that an owner refused counts as not finite."""
    name = max(by_reason, key=lambda reason: (by_reason[reason], reason))
    if name in ("late", "dead", "left", "not ready"):
        return name  # type: ignore[return-value]
    return "refused: not finite"
