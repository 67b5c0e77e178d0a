"""What no correct peer says about a slot: checked before any machine acts on it, so that nothing half-done is left.

`wire.py` has checked types and lengths already. Here are the relations: that indexes point at something, that a plan
covers its grid, that numbers are in range. A message that breaks one is dropped and counted (ProtocolError).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set

from dlc.comm import messages as msg
from dlc.comm.entries import (
    CHANNEL_BYTES_MAX,
    CHANNELS_MAX,
    CONFIG,
    EMPTY,
    OPEN,
    ROUND,
    ChannelState,
    Entry,
    LogState,
    Part,
)
from dlc.comm.filling import FILL_S_MAX
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.wire import size_of
from dlc.errors import ConfigError, ProtocolError

BALLOTS_AHEAD_MAX = 1 << 16
"""How far the next ballot may be above the last that was heard of: far above what a slot can use up. No message then
leaves a slot without numbers that have a wire form."""
DIGEST_BYTES = 32
"""Of a channel's state."""
LEASE_LEN_MAX = 1 << 32
"""Blocks of one lease; with as many leases as a run ever gives, positions stay numbers that have a wire form."""


def check_slot_message(m: object, state: LogState, seen: Ballot) -> None:
    """Raises ProtocolError for a message of the slot after `state` that no correct peer sends. seen: the highest ballot
    heard of."""
    ballot = m.promised if isinstance(m, msg.Nack) else getattr(m, "ballot", None)
    if isinstance(ballot, Ballot) and not 0 <= ballot.counter <= max(0, seen.counter) + BALLOTS_AHEAD_MAX:
        raise ProtocolError(f"ballot counter {ballot.counter}")
    if isinstance(m, msg.Plan) and not plausible_plan(m, state):
        raise ProtocolError(f"a plan of ballot {m.ballot} that does not fit this slot")
    if isinstance(m, msg.Promise):
        _check_promise(m, state)


def _check_promise(m: msg.Promise, state: LogState) -> None:
    if m.plan is not None and (m.plan.head != m.head or not plausible_plan(m.plan, state)):
        raise ProtocolError("a promise with a plan that does not fit this slot")
    if (m.accepted is None) != (m.accepted_ballot is None):
        raise ProtocolError("a promise with half an accepted decree")
    if m.accepted is not None and not plausible_decree(m.accepted, state):
        raise ProtocolError("a promise with a decree that does not fit this slot")
    n_chunks = len(m.plan.assignment) if m.plan is not None else 0
    for held in m.held:
        if not 0 <= held.chunk < n_chunks or not 0 <= held.included < len(m.rosters):
            raise ProtocolError(f"a promise with a held chunk {held.chunk} of roster {held.included}")


def plausible_plan(m: msg.Plan, state: LogState) -> bool:
    """The plan's entry may follow `state`, and each chunk has either an owner or a fixed result."""
    fixed = {f.chunk for f in m.fixed}
    return (
        plausible_entry(m.entry, state)
        and len(m.digest) in (0, DIGEST_BYTES)
        and len(m.assignment) == _n_chunks(m.entry)
        and len(fixed) == len(m.fixed)
        and len(m.norms) in (0, len(m.entry.roster))
        and all(0 <= norm < math.inf for norm in m.norms)
        and 0 <= m.fill_s <= FILL_S_MAX
        and all(0 <= chunk < len(m.assignment) for chunk in fixed)
        and all(-1 <= owner < len(m.owners) for owner in m.assignment)
        and all((owner < 0) == (chunk in fixed) for chunk, owner in enumerate(m.assignment))
    )


def plausible_decree(m: msg.Decree, state: LogState) -> bool:
    return plausible_entry(m.entry, state) and len(m.hashes) == _n_chunks(m.entry)


def plausible_entry(entry: Entry, state: LogState) -> bool:
    """The entry may follow `state`."""
    if entry.kind not in (CONFIG, OPEN, ROUND) or entry.parent != state.head or entry.depth != state.depth + 1:
        return False
    if not _plausible_voters(entry) or not 0 <= entry.lease_len < LEASE_LEN_MAX:
        return False
    if entry.kind == CONFIG:
        return entry.t == 0 and not entry.roster
    known = state.channel(entry.channel)
    try:
        grid = Grid(entry.numel, entry.chunk_elems, entry.codec)
    except ConfigError:
        return False
    if not 1 <= size_of(entry.channel) <= CHANNEL_BYTES_MAX:
        return False
    if entry.kind == OPEN:
        return entry.t == 0 and not entry.roster and not (known is not None and known.opened)
    return (
        len(entry.roster) <= grid.parts_max
        and len({p.voter for p in entry.roster}) == len(entry.roster)
        and all(0 <= p.weight <= WEIGHT_MAX for p in entry.roster)
        and entry.t == state.round_of(entry.channel) + 1
        and (known is None or not known.opened or grid == Grid(known.numel, known.chunk_elems, known.codec))
        and (known is None or not known.leased or all(state.ledger.valid(p.voter, p.upto) for p in entry.roster))
    )


def _plausible_voters(entry: Entry | LogState) -> bool:
    """Somebody votes next, one process of each peer, and the trainers are among them."""
    peers, voters = {v.peer for v in entry.electorate}, set(entry.electorate)
    return 0 < len(peers) == len(entry.electorate) and voters.issuperset(entry.trainers)


def plausible_state(m: msg.Offer) -> bool:
    """An offered state of the log is one that entries can have made, as many as its chain tells: whoever took another
    would understand no entry that follows."""
    state, chain, totals = m.state, m.chain, m.totals
    if not chain or len(totals) != len(chain) or (chain[-1], totals[-1]) != (state.head, state.tokens):
        return False
    whole = chain[0] == EMPTY
    if state.depth != len(chain) - 1 if whole else state.depth < len(chain):
        return False
    names = [channel.name for channel in state.channels]
    return (
        all(before <= after for before, after in itertools.pairwise((0.0, *totals)))
        and _plausible_voters(state)
        and len(names) <= CHANNELS_MAX
        and names == sorted(set(names))
        and all(_plausible_channel(channel) for channel in state.channels)
        and any(channel.leased for channel in state.channels) == (state.ledger.length > 0)
        and state.ledger.length < LEASE_LEN_MAX
        and state.ledger.sound
    )


def _plausible_channel(channel: ChannelState) -> bool:
    try:
        Grid(channel.numel, channel.chunk_elems, channel.codec)
    except ConfigError:
        return False
    return 1 <= size_of(channel.name) <= CHANNEL_BYTES_MAX and channel.t >= 0


def plausible_results(entry: Entry, results: Sequence[msg.Result]) -> bool:
    """The results are those of the entry's chunks, in order, from contributors that its roster names."""
    if len(results) != _n_chunks(entry):
        return False
    if entry.kind != ROUND:
        return True
    grid, roster = Grid(entry.numel, entry.chunk_elems, entry.codec), set(entry.roster)
    return all(
        r.header.chunk == chunk
        and len(r.payload) == (grid.result_bytes(chunk, len(r.header.included)) if r.header.included else 0)
        and named(r.header.included, roster)
        for chunk, r in enumerate(results)
    )


def named(included: Sequence[Part], roster: Set[Part]) -> bool:
    """Whether they are all of this roster, none of them twice."""
    return len(set(included)) == len(included) and all(part in roster for part in included)


def _n_chunks(entry: Entry) -> int:
    return Grid(entry.numel, entry.chunk_elems, entry.codec).n_chunks if entry.kind == ROUND else 0
