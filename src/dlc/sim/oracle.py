"""Committed rounds computed again: means from the rosters' own vectors, leases from first principles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlc.comm.codecs import get_codec
from dlc.comm.entries import LogState, Part, manifest_hash
from dlc.comm.exchange import result_hash
from dlc.comm.grid import Grid
from dlc.comm.ledger import Ledger
from dlc.comm.log import Past
from dlc.sim.toy import TOKENS_PER_BLOCK, vector

TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3}
"""Rounding of contributions and of the mean, for elements of at most 1."""


class OracleError(Exception):
    """A committed round is not what it says; the first word is the invariant."""


def check_means(before: LogState, past: Past, numel: int) -> None:
    """I4: every chunk is the exact weighted mean of the contributors that it names, all of them in the roster."""
    entry = past.entry
    grid, codec = Grid(entry.numel, entry.chunk_elems, entry.codec), get_codec(entry.codec)
    if len(past.results) != grid.n_chunks or entry.numel != numel:
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
        if not header.included:
            continue
        start, stop = grid.span(chunk)
        vectors = torch.stack([vector(p.voter.peer, p.upto, numel)[start:stop].double() for p in header.included])
        weights = torch.tensor([p.weight for p in header.included], dtype=torch.float64)
        mean = (vectors * (weights / weights.sum())[:, None]).sum(0)
        error = (codec.decode(result.payload, stop - start).double() - mean).abs().max().item()
        if not error <= TOLERANCE[entry.codec]:
            raise OracleError(f"I4 chunk {chunk} of round {entry.t} is off by {error:.2e}")


def check_ledger(before: LogState, after: LogState, counted: Sequence[Part]) -> None:
    """I5: consumed, pool and leases are disjoint and together [0, next); what was counted, no more, was consumed."""
    free = _free_blocks(after.ledger)
    if len(set(free)) != len(free) or any(not 0 <= b < after.ledger.next for b in free):
        raise OracleError(f"I5 ranges overlap or lie outside [0, {after.ledger.next}): {after.ledger}")
    consumed = _consumed(after.ledger) - _consumed(before.ledger)
    trained = sum(p.weight for p in counted) / TOKENS_PER_BLOCK if after.ledger.length else 0.0
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
