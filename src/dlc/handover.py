"""A vector that a peer shows to newcomers, and how far each one is: for strategies without a common state.

stand(t, vector)    everybody hears that I am at step t, and may fetch the vector
standings()         who is at which step, with a sketch of its vector: the consensus distance follows from these
fetch(out, above)   the vector of whoever is furthest; of the next one if it dies meanwhile
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlc.comm.board import TTL_S_MAX
from dlc.comm.clock import clock
from dlc.comm.effects import Effect
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.holdings import Holding
from dlc.comm.ids import Voter
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Key, Parcel
from dlc.comm.parcels import Intake
from dlc.comm.sketch import Trail, from_bytes, sketch, to_bytes
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError, SwarmClosed
from dlc.handles import Flag
from dlc.peer import Peer

HELD_S = 1e9
"""A vector is held until a newer one takes its place, not by the clock."""
FETCH_S = 3600.0
"""No fetch from one peer takes longer; one that has fallen silent is given up in seconds."""
TRIES_MAX = 3
"""Of one donor: it may have gone on to another vector just when it was asked."""
ASK_RTTS = 4
"""A vector is shown for so many of the longest round trips at least: where exchanges are quicker than these, whoever
has just heard of it would find the next one in its place, each time."""
CODEC = "fp32"
T_MAX = 10**8
"""No run makes so many exchanges: names of checkpoints have eight digits."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What everybody hears of a peer."""

    t: int
    """Its step."""
    held: int
    """Step of the vector that can be fetched; below `t` while somebody fetches it."""
    sketch: bytes


class Standing(NamedTuple):
    """One of the others, who is up."""

    voter: Voter
    t: int
    held: int
    sketch: Tensor | None


class Handover:
    """For one thread. All peers of one `name` show vectors of `numel` elements, fp32."""

    def __init__(self, peer: Peer, name: str, numel: int, seed: int = 0, most: int = T_MAX) -> None:
        """most: nobody can be beyond this step."""
        self._mesh, self._me, self._seed, self._most = peer.mesh, peer.voter, seed, most
        self._topic, self._grid = f"state/{name}", Grid(numel, usual_chunk_elems(numel, CODEC), CODEC)
        self._shown: tuple[int, Tensor, Holding] | None = None
        self._sent_bytes = 0
        self._asked_until = 0.0
        """Until then who has heard of the shown vector may be about to ask for it."""
        self._trail = Trail()

    def stand(self, t: int, vector: Tensor) -> float | None:
        """I am at step `t`, with `vector` (fp32, CPU, [numel]; copied). Returns the consensus distance: see `Trail`.

        Shown until `close`, or until this peer is down, however long its steps take. The vector that is shown stays the
        one before while somebody fetches that, or may have heard of it just now.
        """
        if self._shown is None or not (self._is_fetched() or self._mesh.ask(lambda mesh, now: now < self._asked_until)):
            self._show(t, vector)
        assert self._shown is not None
        mine = sketch(vector, self._seed)
        notice = pack(Notice(t, self._shown[0], to_bytes(mine)))
        self._mesh.act(lambda mesh, now: mesh.post(self._topic, notice, TTL_S_MAX, now))
        self._trail.add(t, mine)
        return self._trail.distance((s.t, s.sketch) for s in self.standings())

    def _is_fetched(self) -> bool:
        """Something of the shown vector was sent since the last look."""
        assert self._shown is not None
        before, self._sent_bytes = self._sent_bytes, self._shown[2].sent_bytes
        return self._sent_bytes > before

    def _show(self, t: int, vector: Tensor) -> None:
        before = self._shown
        memory = before[1] if before is not None else torch.empty_like(vector)

        def hold(mesh: Mesh, now: float) -> list[Effect]:
            holdings = mesh.parcels.holdings
            if before is not None:
                holdings.release(self._key(before[0]), "a newer one is shown")
            memory.copy_(vector)
            holding = Holding(self._grid, mesh.ground.running_s + HELD_S, vector=memory)
            holdings.hold(self._key(t), holding)
            self._shown, self._sent_bytes = (t, memory, holding), 0
            rtts_s = [mesh.ground.members.rtt_s(voter.peer) for voter in mesh.ground.up()]
            self._asked_until = now + ASK_RTTS * max(rtts_s, default=0.0)
            return mesh.tick(now)

        if before is None or before[0] != t:
            self._mesh.act(hold)

    def _key(self, t: int) -> Key:
        return Key(self._topic, t, 0)

    def standings(self) -> list[Standing]:
        """Of the others that are up, sorted by voter."""

        def read(mesh: Mesh, now: float) -> list[Standing]:
            found = []
            for posted in mesh.board.get(self._topic).values():
                if posted.author == self._me or not mesh.ground.members.up(posted.author):
                    continue
                try:
                    notice = unpack(posted.value, Notice)
                    if not 0 <= notice.held <= notice.t <= self._most:
                        raise ProtocolError(f"step {notice.t} of {self._most}, with the vector of {notice.held}")
                except ProtocolError:
                    mesh.ground.dropped[posted.author.peer, "a standing that cannot be"] += 1
                    continue
                found.append(Standing(posted.author, notice.t, notice.held, from_bytes(notice.sketch)))
            return sorted(found, key=lambda standing: standing.voter)

        return self._mesh.ask(read)

    def fetch(self, out: Tensor, above: int = -1) -> int | None:
        """The vector of whoever is furthest into `out`, and its step; None: nobody could give one beyond step `above`,
        and `out` is spoilt."""
        tried: Counter[Voter] = Counter()
        while True:
            left = [s for s in self.standings() if s.held > above and tried[s.voter] < TRIES_MAX]
            if not left:
                return None
            donor = max(left, key=lambda standing: (standing.held, standing.voter))
            if self._fetched(donor, out):
                return donor.held
            tried[donor.voter] += 1

    def _fetched(self, donor: Standing, out: Tensor) -> bool:
        over, left, good = Flag(), set(range(self._grid.n_chunks)), True

        def taken(parcel: Parcel) -> None:
            nonlocal good
            start, stop = self._grid.span(parcel.chunk)
            good = good and self._grid.coder.finite(parcel.payload, stop - start)
            out[start:stop].copy_(self._grid.coder.decode(parcel.payload, stop - start))
            left.discard(parcel.chunk)
            if not left:
                over.set()

        def failed(why: str) -> None:
            nonlocal good
            good = False
            over.set()

        def want(mesh: Mesh, now: float) -> list[Effect]:
            until_run = mesh.ground.running_s + FETCH_S
            intakes.append(Intake(self._key(donor.held), donor.voter, self._grid, until_run, 1, taken, failed))
            mesh.parcels.want(intakes[0], range(self._grid.n_chunks))
            return mesh.tick(now)

        def stop(mesh: Mesh, now: float) -> list[Effect]:
            for intake in intakes:
                mesh.parcels.stop(intake)
            return []

        intakes: list[Intake] = []
        end = clock() + FETCH_S
        try:
            self._mesh.act(want)
            while not over.wait(0.25):
                self._mesh.ask(lambda mesh, now: None)  # SwarmClosed where nothing more will come
                if clock() > end:
                    raise SwarmClosed(f"the state of {donor.voter.peer[:8]} did not come within {FETCH_S:g} s")
        finally:  # after Ctrl-C, too: `out` is the caller's again, and the next fetch of these an intake of its own
            with contextlib.suppress(SwarmClosed):
                self._mesh.act(stop)
        return good and not left

    def close(self) -> None:
        """Nothing is shown any more."""
        shown, self._shown = self._shown, None

        def end(mesh: Mesh, now: float) -> list[Effect]:
            if shown is not None:
                mesh.parcels.holdings.release(self._key(shown[0]), "it has left")
            return mesh.withdraw(self._topic, now)

        self._mesh.act(end)
