"""Committed rounds computed again: means from the rosters' own vectors, leases from first principles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from dlc.comm.codecs import get_codec
from dlc.comm.entries import LogState, Part, manifest_hash
from dlc.comm.events import RoundDone
from dlc.comm.exchange import result_hash
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.ledger import Ledger
from dlc.comm.log import Past, means
from dlc.comm.messages import ChunkHeader
from dlc.comm.reducer import scaled_weights
from dlc.sim.toy import TOKENS_PER_BLOCK, Means, vector

TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "topk": 1e-6}
"""Rounding of contributions and of the mean, for elements of at most 1."""

WEIGHTS_TOLERANCE = 1e-6
"""Of the sum of a few dozen fp32 numbers."""
FRACTION_TOLERANCE = 1e-9
OUTSIDE = frozenset({"left", "dead", "not ready", "no room"})
"""Why a trainer may not stand in a roster."""


class OracleError(Exception):
    """A committed round is not what it says; the first word is the invariant."""


def check_means(
    before: LogState,
    past: Past,
    sizes: Collection[int],
    rosters: Mapping[Ballot, frozenset[Voter]] = MappingProxyType({}),
) -> None:
    """I4: every chunk is the exact weighted mean of the contributors that it names, all of them in the roster; and it
    says of everybody in the roster of the ballot under which it was reduced (`rosters`: where that is not the entry's)
    whether it is in or out. `sizes`: those of the vectors that peers offer on the channel."""
    entry, numel = past.entry, past.entry.numel
    grid, codec = Grid(entry.numel, entry.chunk_elems, entry.codec), get_codec(entry.codec)
    if len(past.results) != grid.n_chunks or numel not in sizes:
        raise OracleError(f"I4 round {entry.t} has {len(past.results)} chunks of {grid.n_chunks}")
    hashes = tuple(result_hash(r) for r in past.results)
    if hashes != past.hashes or manifest_hash(hashes) != entry.manifest:
        raise OracleError(f"I4 round {entry.t}: the bytes applied are not those of the manifest")
    base = before.base(entry.channel)
    for chunk, result in enumerate(past.results):
        header = result.header
        if header.chunk != chunk or header.base != base or header.head != entry.parent:
            raise OracleError(f"I4 chunk {chunk} of round {entry.t} is of another chunk, base or slot")
        if not set(header.included) <= set(entry.roster):
            raise OracleError(f"I4 chunk {chunk} of round {entry.t} includes somebody outside the roster")
        named = [p.voter for p in header.included] + [x.voter for x in header.excluded]
        roster = {p.voter for p in entry.roster}
        planned = rosters.get(header.ballot, roster)
        if not planned <= roster or sorted(named) != sorted(planned):
            raise OracleError(f"I4 chunk {chunk} of round {entry.t} does not say of everybody in or out: {header}")
        if not header.included:
            continue
        start, stop = grid.span(chunk)
        parts = [vector(entry.channel, p, numel)[start:stop] for p in header.included]
        if codec.sparse:  # the mean of what was sent, which is far from that of the vectors
            parts = [codec.decode(codec.encode(part), stop - start) for part in parts]
        vectors = torch.stack(parts).double()
        weights = torch.tensor([p.weight for p in header.included], dtype=torch.float64)
        scaled, divisor = scaled_weights(weights.tolist())
        if abs(sum(scaled) / divisor - 1) > WEIGHTS_TOLERANCE:
            raise OracleError(f"I4 the weights in chunk {chunk} of round {entry.t} sum to {sum(scaled) / divisor}")
        mean = (vectors * (weights / weights.sum())[:, None]).sum(0)
        error = (codec.decode_result(result.payload, stop - start).double() - mean).abs().max().item()
        if not error <= TOLERANCE[entry.codec]:
            raise OracleError(f"I4 chunk {chunk} of round {entry.t} is off by {error:.2e}")


def _passes_over(header: ChunkHeader, voter: Voter) -> bool:
    """It was reduced under an earlier ballot, for which this one was not ready."""
    return voter not in {p.voter for p in header.included} | {x.voter for x in header.excluded}


def check_report(past: Past, before: LogState, event: RoundDone, me: Voter, offer: Part | None) -> None:
    """I4: the report names exactly who is in which part of the elements, and why the others are not; and what I am told
    of `offer`, my present one, is not of one that I took back before."""
    report, entry = event.report, past.entry
    name = f"round {entry.t} of {entry.channel}"
    shares = _shares(past)
    true = {part.voter.peer: (part.weight, share) for part, share in shares.items() if share}
    told = {share.peer: (share.weight, share.fraction) for share in report.contributors}
    if true.keys() != told.keys() or not all(_close(told[peer], true[peer]) for peer in true):
        raise OracleError(f"I4 {name}: contributors {true} are reported as {told}")
    weight = sum(weight for weight, _ in true.values())
    if (report.channel, report.t) != (entry.channel, entry.t) or not _close((report.weight,), (weight,)):
        raise OracleError(f"I4 {name}, of weight {weight}, is reported as {report}")
    by_voter = {part.voter: share for part, share in shares.items()}
    for voter in {*before.trainers, *by_voter}:
        missing = [m for m in report.missing if m.peer == voter.peer]
        lacking = 1.0 - by_voter.get(voter, 0.0)
        reasons = {_told(x.reason) for r in past.results for x in r.header.excluded if x.voter == voter}
        reasons |= {"not ready"} if any(_passes_over(r.header, voter) for r in past.results) else set()
        if not _close((sum(m.fraction for m in missing),), (lacking,)):
            raise OracleError(f"I4 {name}: {voter} is missing from {lacking:.1%}, the report says {missing}")
        if not {m.reason for m in missing} <= (reasons if voter in by_voter else OUTSIDE):
            raise OracleError(f"I4 {name}: {voter} is missing for {reasons}, the report says {missing}")
    share = shares.get(offer, 0.0) if offer is not None else 0.0
    if event.counted != (2 * share > 1 + FRACTION_TOLERANCE):
        raise OracleError(f"I4 {name}: {me} is told counted={event.counted}, and {share:.1%} of {offer} is in it")
    chunks = tuple(offer in r.header.included for r in past.results)
    if event.included not in ((), chunks):
        raise OracleError(f"I4 {name}: {me} is told to be in the chunks {event.included}, {offer} is in {chunks}")
    older = offer is not None and bool(by_voter.get(me, 0.0)) and not share
    if event.older != older:
        raise OracleError(f"I4 {name}: {me} is told older={event.older}, its offer is {offer}, the shares {shares}")


def _told(reason: str) -> str:
    """A report has one word for whatever an owner refused."""
    return reason if reason in ("late", "dead", "left") else "refused: not finite"


def _shares(past: Past) -> dict[Part, float]:
    """Part of the elements that each member of the roster is in."""
    entry = past.entry
    grid, shares = Grid(entry.numel, entry.chunk_elems, entry.codec), dict.fromkeys(entry.roster, 0.0)
    for result in past.results:
        for part in result.header.included:
            shares[part] += grid.elems(result.header.chunk) / entry.numel
    return shares


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) <= FRACTION_TOLERANCE * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))


def check_delivered(past: Past, got: Means) -> None:
    """I4: the caller of an all-reduce was given the means of that round."""
    grid = Grid(past.entry.numel, past.entry.chunk_elems, past.entry.codec)
    spans = [grid.span(result.header.chunk) for result in past.results]
    if got.t != past.entry.t or [c[:2] for c in got.chunks] != spans:
        raise OracleError(f"I4 round {past.entry.t} of {past.entry.channel} delivered round {got.t}: {got.chunks}")
    for (start, _, mean), (_, _, want) in zip(got.chunks, means(past.entry, past.results), strict=True):
        same = mean is want if mean is None or want is None else torch.equal(mean, want)
        if not same:
            raise OracleError(
                f"I4 round {past.entry.t} of {past.entry.channel} delivered {mean} at {start}, not {want}"
            )


def check_ledger(before: LogState, after: LogState, counted: Sequence[Part]) -> None:
    """I5: consumed, pool and leases are disjoint and together [0, next); what was counted, no more, was consumed."""
    free = _free_blocks(after.ledger)
    if len(set(free)) != len(free) or any(not 0 <= b < after.ledger.next for b in free):
        raise OracleError(f"I5 ranges overlap or lie outside [0, {after.ledger.next}): {after.ledger}")
    consumed = _consumed(after.ledger) - _consumed(before.ledger)
    trained = sum(p.weight for p in counted if p.upto >= 0) / TOKENS_PER_BLOCK if after.ledger.length else 0.0
    if consumed != trained:
        raise OracleError(f"I5 {consumed} blocks were consumed, {trained} trained, by {counted} from {before.ledger}")
    fresh = after.ledger.next - before.ledger.next
    if not set(free) <= set(_free_blocks(before.ledger)) | set(range(before.ledger.next, before.ledger.next + fresh)):
        raise OracleError("I5 a consumed block is handed out again")


def _free_blocks(ledger: Ledger) -> list[int]:
    ranges = [*ledger.pool, *(r for lease in ledger.leases for r in lease.ranges)]
    return [block for r in ranges for block in range(r.lo, r.hi)]


def _consumed(ledger: Ledger) -> int:
    return ledger.next - len(_free_blocks(ledger))
