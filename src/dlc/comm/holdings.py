"""The giving side of parcels: vectors that I hold under keys, and who has asked for which chunk of them.

A holding is either a frozen vector, encoded chunk by chunk when it is asked for, or a set of parcels that are put there
one by one as they come to be. A chunk that is asked for before it is there is sent when it comes; so is one of a key
that is not held yet, for EARLY_S: the asker may have heard of it before me. A holding lives until it is released, or
until its time is over; who asks after that is told so.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from torch import Tensor

from dlc.comm.effects import Send
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Coming, Key, NoParcel, Parcel, Pull
from dlc.comm.messages import GridSpec

EARLY_S, EARLY_MAX = 10.0, 1024
"""How long, and how many, requests for keys not held yet are kept."""
RELEASED_MAX = 4096
"""Released keys that are remembered, and those that will not be held: who asks for an older one finds out by its own
patience."""
CHANNEL_CHARS_MAX = 512
ASKED_MAX = 1024
"""Chunks that one peer may have asked for and not got: four windows."""


class Tally:
    """Payload bytes that have been sent of some holdings, until they are told."""

    def __init__(self) -> None:
        self._untold = 0

    def add(self, n_bytes: int) -> None:
        self._untold += n_bytes

    def tell(self) -> int:
        """Those that have been sent since this was called last."""
        told, self._untold = self._untold, 0
        return told


class Holding:
    """One vector under one key."""

    def __init__(
        self,
        grid: Grid,
        until_run: float,
        *,
        vector: Tensor | None = None,
        weight: float = 0.0,
        keep: bool = False,
        wanted: Callable[[int], None] | None = None,
        sent: Callable[[PeerId, int], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        """vector: fp32, CPU, frozen; None: parcels are put here. keep: what was encoded is kept for others.
        wanted: called with a chunk that is asked for and not there. sent: with whom a chunk goes to, as it goes.
        tally: what is sent counts there."""
        self.grid, self.until_run = grid, until_run
        self.spec = GridSpec(grid.numel, grid.chunk_elems, grid.codec)
        self.wanted, self.sent = wanted, sent
        self.tally = Tally() if tally is None else tally
        self.sent_bytes = 0
        self._vector, self._weight, self._keep = vector, weight, keep
        self._parcels: dict[int, Parcel] = {}

    def has(self, chunk: int) -> bool:
        return self._vector is not None or chunk in self._parcels

    def put(self, parcel: Parcel) -> None:
        self._parcels[parcel.chunk] = parcel

    def parcel(self, key: Key, chunk: int) -> Parcel:
        parcel = self._parcels.get(chunk)
        if parcel is None:
            assert self._vector is not None
            start, stop = self.grid.span(chunk)
            payload = self.grid.coder.encode(self._vector[start:stop])
            parcel = Parcel(key, chunk, self._weight, (), (), payload)
            if self._keep:
                self._parcels[chunk] = parcel
        return parcel


class Holdings:
    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._held: dict[Key, Holding] = {}
        self._released: collections.OrderedDict[Key, None] = collections.OrderedDict()
        self._never: collections.OrderedDict[Key, str] = collections.OrderedDict()
        """Keys that will not be held, and why."""
        self._early: list[tuple[float, Voter, Pull]] = []
        self._waiting: dict[Key, dict[int, set[Voter]]] = {}
        """Asked for, and not there yet."""
        self._ready: dict[PeerId, dict[tuple[Key, int], None]] = {}
        """To be sent, in the order in which it was asked for."""

    def hold(self, key: Key, holding: Holding) -> None:
        self._held[key] = holding
        self._waiting[key] = {}
        early = [(sender, pull) for _, sender, pull in self._early if pull.key == key]
        self._early = [kept for kept in self._early if kept[2].key != key]
        for sender, pull in early:
            self.asked(sender, pull)

    def put(self, key: Key, parcel: Parcel) -> None:
        """A chunk of a holding has come to be: whoever waits for it gets it."""
        holding = self._held.get(key)
        if holding is None:
            return
        holding.put(parcel)
        for voter in sorted(self._waiting[key].pop(parcel.chunk, ())):
            self._ready.setdefault(voter.peer, {})[key, parcel.chunk] = None

    def refuse(self, key: Key, chunk: int, why: str) -> None:
        """A chunk of a holding will not come to be: whoever waits for it is told."""
        for voter in sorted(self._waiting.get(key, {}).pop(chunk, ())):
            self.ground.send(voter, NoParcel(key, why))

    def release(self, key: Key, why: str = "it is no longer held") -> None:
        """Give its memory back; those who still wait are told. Nothing happens where the key is not held."""
        if self._held.pop(key, None) is None:
            return
        self._released[key] = None
        while len(self._released) > RELEASED_MAX:
            self._released.popitem(last=False)
        told = {voter.peer for voters in self._waiting.pop(key).values() for voter in voters}
        for peer, queue in list(self._ready.items()):
            for known in [k for k in queue if k[0] == key]:
                del queue[known]
                told.add(peer)
            if not queue:
                del self._ready[peer]
        self.ground.out.extend(Send(peer, NoParcel(key, why)) for peer in sorted(told))

    def never(self, key: Key, why: str) -> None:
        """It will not be held here: whoever asks for it, or has asked already, is told."""
        if len(key.channel) > CHANNEL_CHARS_MAX:
            return  # nobody can ask for it
        self._never[key] = why
        while len(self._never) > RELEASED_MAX:
            self._never.popitem(last=False)
        asked, self._early = self._early, [early for early in self._early if early[2].key != key]
        for _, sender, pull in asked:
            if pull.key == key:
                self.ground.send(sender, NoParcel(key, why))

    def held(self, key: Key) -> Holding | None:
        return self._held.get(key)

    def was_held(self, key: Key) -> bool:
        """It is released."""
        return key in self._released

    # ---------------------------------------------------------------- requests

    def asked(self, sender: Voter, pull: Pull) -> None:
        key, holding = pull.key, self._held.get(pull.key)
        if holding is None:
            if key in self._released or key in self._never:
                self.ground.send(sender, NoParcel(key, self._never.get(key, "it is no longer held")))
            elif len(self._early) < EARLY_MAX:
                self._early.append((self.ground.running_s, sender, pull))
            return
        if pull.grid != holding.spec:
            held, asked = holding.spec, pull.grid
            why = f"{held.numel} elements in {held.codec} are held, and {asked.numel} in {asked.codec} asked for"
            self.ground.send(sender, NoParcel(key, why))
            return
        chunks = [c for c in pull.chunks if 0 <= c < holding.grid.n_chunks]
        room = max(0, ASKED_MAX - len(self._ready.get(sender.peer, ())))
        if len(chunks) > room:  # it asks for the rest again
            self.ground.dropped[sender.peer, "asks for too much"] += 1
            chunks = chunks[:room]
        missing = [c for c in chunks if not holding.has(c)]
        for chunk in chunks:
            if holding.has(chunk):
                self._ready.setdefault(sender.peer, {})[key, chunk] = None
            else:
                self._waiting[key].setdefault(chunk, set()).add(sender)
        if missing and len(missing) == len(chunks):
            self.ground.send(sender, Coming(key))
        for chunk in missing:
            if holding.wanted is not None:
                holding.wanted(chunk)

    def pending(self) -> list[PeerId]:
        return list(self._ready)

    def next_bulk(self, peer: PeerId) -> Parcel | None:
        queue = self._ready.get(peer)
        if not queue:
            return None
        key, chunk = next(iter(queue))
        del queue[key, chunk]
        if not queue:
            del self._ready[peer]
        holding = self._held[key]
        parcel = holding.parcel(key, chunk)
        holding.sent_bytes += len(parcel.payload)
        holding.tally.add(len(parcel.payload))
        if holding.sent is not None:
            holding.sent(peer, chunk)
        self.ground.rates.sent(self.ground.now, len(parcel.payload), more=bool(self._ready))
        return parcel

    # ---------------------------------------------------------------- time and members

    def tick(self) -> None:
        running_s = self.ground.running_s
        for key in [k for k, holding in self._held.items() if holding.until_run <= running_s]:
            self.release(key, "its time is over")
        if self._early and running_s - self._early[0][0] > EARLY_S:
            self._early = [kept for kept in self._early if running_s - kept[0] <= EARLY_S]

    @property
    def any(self) -> bool:
        """Something is held, or waited for."""
        return bool(self._held or self._early)

    def drop_asker(self, voter: Voter) -> None:
        """It is dead or gone: nothing is sent there any more."""
        self._ready.pop(voter.peer, None)
        for waiting in self._waiting.values():
            for voters in waiting.values():
                voters.discard(voter)
        self._early = [kept for kept in self._early if kept[1] != voter]
