"""Push-sum gossip: shares of a peer's mass change hands, and each share counts exactly once. No round, no barrier.

Every peer has an estimate z (a vector) and a weight w; its mass is (w z, w). In a step it gives parts of its weight
with its vector to neighbours; who takes one has afterwards z = sum w_i z_i / sum w_i over what it has and what came.
Mass is neither made nor lost, so all z approach the mean of what everybody brought, sum w z / sum w, whatever the
graph, the pace of each, or the loss of messages (Kempe, Dobra, Gehrke 2003; Benezit et al. 2010).

A gift goes through these states, and leaves them at both ends in one way only:

    giver                                               taker
    given: out of w and z, payload kept
       ── Gift, repeated ─────────────────────────────>  pulls the parcels
       <─ Taken  ─────────────────────────────────────   all of it is here: counts here from now on
       <─ Refused ────────────────────────────────────   it is not taken, and never will be
    stalled, or taker down: Withdraw, repeated ───────>  not here yet: Refused, and never taken; here: Taken
    Taken: forgotten        Refused: comes back to the giver

- A gift has no time of its own: it goes on as long as chunks go to its taker that it was not sent before. It is stalled
  where none did for keep_s, or none is left and there is no answer: so it is withdrawn at the latest keep_s after each
  chunk has gone once, however often the taker asks for them.
- A taker keeps its answer for the newest gift of each giver, and gives it again however often it is asked. A giver has
  one gift at a time on its way to each taker, so that is enough. Older gifts are settled.
- A taker that is down is asked for RECLAIM_S: it may be frozen, or behind a cut. Its *process* proved to be gone: the
  share comes back, for what it had taken went with it.
- But for what it had given on by then, where its Taken was lost: so much of the share counts twice, with the giver and
  with whoever has it now. The giver can't tell whether that is so. It tells the weight of shares that were sent whole,
  and came back without an answer (`unsure`): the error is no more than that. It is 0 unless a process ends, or is down
  for RECLAIM_S, within moments of what it was sent.
- After RECLAIM_S without an answer the share comes back, too. Should the taker return, it is asked until it answers
  whether it has it, and is given nothing before. If it has, the giver gives up as much of its weight (`overdrawn`), so
  that weights are right again, and the error of the mean is that weight times how far the two estimates were apart.
  Told, not silent.
- What a quantised payload does not say stays with the giver: who gives the weight v of z as z' keeps
  z + v (z - z') / (w - v). So a lossy codec moves no mass either (`give_away`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dlc.comm import vectors
from dlc.comm.giftpace import GiftPace
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.holdings import Holding
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Gift, Key, Parcel, Refused, Taken, Withdraw
from dlc.comm.messages import GridSpec
from dlc.comm.parcels import Intake, Parcels
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.service import ServiceNews
from dlc.errors import ProtocolError, UsageError

AGAIN_S = 1.0
"""Unanswered gifts and withdrawals are repeated so often."""
RECLAIM_S = 60.0
"""A taker that is down for longer does not keep the share."""
ARRIVED_MAX = 8
"""Gifts that wait here until the owner takes them in: one more is refused, and stays with its giver."""
VECTORS_MAX = 8
"""Of mine whose gifts are on their way: each is held in memory, and they share my link. No further one is given."""
OPEN_S = 1e9
"""A payload is held until its gifts are settled, not by the clock."""


@dataclass(frozen=True)
class Share:
    """Some mass: `weight` times the vector that the payloads, one per chunk, decode to."""

    peer: Voter
    """Who gave it; of a share that came back, who did not take it."""
    weight: float
    step: int
    payloads: Sequence[bytes | memoryview]
    why: str = ""
    """Of a share that came back."""


@dataclass
class Arrivals:
    """What changes the owner's mass since it looked last."""

    taken: list[Share] = field(default_factory=list)
    returned: list[Share] = field(default_factory=list)
    overdrawn: float = 0.0
    """Weight to be given up: it was taken back from somebody who had it."""
    unsure: float = 0.0
    """Weight, in `returned`, of which a part may count twice: who is gone, or dead, may have had it and given it on."""


@dataclass(frozen=True)
class GossipNews(ServiceNews):
    """A gift arrived, or one of mine is settled."""

    name: str


@dataclass
class Given:
    share: Share
    serial: int
    vector: int
    keep_s: float
    until_run: float
    """It is withdrawn then; keep_s after it began, or last got on."""
    sent: set[int] = field(default_factory=set)
    """Chunks that have gone to its taker."""
    again: float = 0.0
    withdrawn: bool = False
    down_since: float | None = None


@dataclass
class Reclaimed:
    """A share that came back without an answer: its taker is asked, once it is up, whether it has it."""

    serial: int
    weight: float
    again: float = 0.0


class Settled(NamedTuple):
    """A giver's newest gift that is settled here."""

    serial: int
    taken: bool
    why: str
    """Where it was not taken."""

    def answer(self, name: str) -> Taken | Refused:
        return Taken(name, self.serial) if self.taken else Refused(name, self.serial, self.why)


NONE_YET = Settled(-1, False, "")


@dataclass
class Coming:
    """A gift that is being pulled."""

    gift: Gift
    intake: Intake
    payloads: list[bytes | memoryview | None]
    left: int


class Gossip:
    def __init__(self, ground: Ground, parcels: Parcels, name: str, grid: Grid, settled: dict[Voter, Settled]) -> None:
        """settled: by giver, of the gossips of this name in this process; the caller's, who lets go of givers that are
        gone. A giver may not have heard yet what one that is closed by now has taken."""
        self.ground, self.parcels, self.name, self.grid = ground, parcels, name, grid
        self.spec = GridSpec(grid.numel, grid.chunk_elems, grid.codec)
        self._serial = self._vector = int(ground.now * 1000) << 16
        """Greater than those of an earlier gossip of this name in this process, which takers may remember."""
        self._given: dict[Voter, Given] = {}
        self._coming: dict[Voter, Coming] = {}
        self._settled = settled
        self._reclaimed: dict[Voter, Reclaimed] = {}
        """By taker: one each, for it is given nothing more until that one is settled."""
        self._arrivals = Arrivals()
        self.next_to: frozenset[PeerId] = frozenset()
        """Whom the owner will give to in its next step: links to them are opened beforehand."""
        self.bytes_sent = self.bytes_received = 0
        self.closed = False
        self._pace = GiftPace(ground)

    # ---------------------------------------------------------------- the owner

    def free(self, to: Voter) -> bool:
        """A gift to this peer may be given now."""
        on_their_way = {given.vector for given in self._given.values()}
        return to not in self._given and to not in self._reclaimed and len(on_their_way) < VECTORS_MAX

    def give(
        self, gifts: Sequence[tuple[Voter, float]], step: int, payloads: Sequence[bytes | memoryview], keep_s: float
    ) -> None:
        """Give (peer, weight) each of one vector, whose chunks are these; each is settled, or withdrawn once it is
        stalled for keep_s."""
        for to, _ in gifts:
            if not self.free(to):
                raise UsageError(f"a gift to {to.peer[:8]} is on its way already, or {VECTORS_MAX} to others")
        self._vector = vector = self._vector + 1
        until_run = self.ground.running_s + OPEN_S
        holding = Holding(self.grid, until_run, sent=lambda peer, chunk: self._sent(vector, peer, chunk))
        key = self._key(self._vector)
        for chunk, payload in enumerate(payloads):
            holding.put(Parcel(key, chunk, 0.0, (), (), payload))
        self.parcels.holdings.hold(key, holding)
        for to, weight in gifts:
            self._serial += 1
            share = Share(to, weight, step, payloads)
            given = Given(share, self._serial, self._vector, keep_s, self.ground.running_s + keep_s)
            self._given[to] = given
            self._push(given)
        self._pace.follow(self._given)

    def arrivals(self) -> Arrivals:
        """What came, and came back, since the last call: the caller takes it into its mass."""
        found, self._arrivals = self._arrivals, Arrivals()
        return found

    @property
    def unsettled(self) -> list[Share]:
        """Shares of mine that are on their way."""
        return [given.share for given in self._given.values()]

    @property
    def wanted(self) -> dict[int, PeerId]:
        """Gifts of mine that may be taken yet, by number: to whom."""
        return {given.serial: to.peer for to, given in self._given.items() if not given.withdrawn}

    @property
    def coming(self) -> set[Voter]:
        """Peers whose gift is being pulled."""
        return set(self._coming)

    def arrived_from(self, voter: Voter, step: int) -> bool:
        """A gift of this step, or a later one, has come and is not taken in yet."""
        return any(s.peer == voter and s.step >= step for s in self._arrivals.taken)

    def close(self) -> None:
        """Nothing is given or taken any more; what is unsettled is withdrawn once, and lost if nobody answers."""
        self.closed = True
        for given in list(self._given.values()):
            self.ground.send(given.share.peer, Withdraw(self.name, given.serial, given.share.peer))
            self._drop(given)
        for coming in list(self._coming.values()):
            self.parcels.stop(coming.intake)
            self._settle(coming.intake.holder, coming.gift.serial, "this gossip is closed")
        self._coming.clear()
        self._pace.close()

    # ---------------------------------------------------------------- giving

    def _key(self, vector: int) -> Key:
        return Key("gossip/" + self.name, vector, 0)

    def _push(self, given: Given) -> None:
        """Say it (again)."""
        given.again = self.ground.now + AGAIN_S
        to = given.share.peer
        if given.withdrawn:
            self.ground.send(to, Withdraw(self.name, given.serial, to))
            return
        share = given.share
        self.ground.send(to, Gift(self.name, given.serial, to, share.step, share.weight, self.spec, given.vector))

    def _sent(self, vector: int, peer: PeerId, chunk: int) -> None:
        """A chunk of one of my vectors has gone to this peer. One that it asks for again is no step on."""
        for to, given in self._given.items():
            if to.peer == peer and given.vector == vector and chunk not in given.sent:
                given.sent.add(chunk)
                given.until_run = self.ground.running_s + given.keep_s

    def receive_taken(self, sender: Voter, m: Taken) -> None:
        given = self._given.get(sender)
        if given is not None and given.serial == m.serial:
            self._drop(given)
            self._tell()
            return
        reclaimed = self._reclaimed.get(sender)
        if reclaimed is not None and reclaimed.serial == m.serial:
            del self._reclaimed[sender]
            self._arrivals.overdrawn += reclaimed.weight
            self._tell()

    def receive_refused(self, sender: Voter, m: Refused) -> None:
        given = self._given.get(sender)
        if given is not None and given.serial == m.serial:
            self._take_back(given, m.why)
            return
        reclaimed = self._reclaimed.get(sender)
        if reclaimed is not None and reclaimed.serial == m.serial:
            del self._reclaimed[sender]
            self._tell()

    def _take_back(self, given: Given, why: str) -> None:
        share = given.share
        self._drop(given)
        self._arrivals.returned.append(Share(share.peer, share.weight, share.step, share.payloads, why))
        self._tell()

    def _take_back_untold(self, given: Given, why: str) -> None:
        """Its taker can't say whether it had it."""
        if len(given.sent) == self.grid.n_chunks:
            self._arrivals.unsure += given.share.weight
        self._take_back(given, why)

    def _drop(self, given: Given) -> None:
        """It is settled: its payload goes with the last gift of the vector."""
        del self._given[given.share.peer]
        if not any(other.vector == given.vector for other in self._given.values()):
            holding = self.parcels.holdings.held(self._key(given.vector))
            self.bytes_sent += holding.sent_bytes if holding is not None else 0
            self.parcels.holdings.release(self._key(given.vector), "the gift is withdrawn")
        self._pace.follow(self._given)

    # ---------------------------------------------------------------- taking

    def receive_gift(self, sender: Voter, m: Gift) -> None:
        _check_serial(m.serial)
        why = self._reason_against(sender, m)
        serial = self._settled.get(sender, NONE_YET).serial
        coming = self._coming.get(sender)
        if m.to == self.ground.me and m.serial <= serial:
            if m.serial == serial:
                self._answer(sender)
            return
        if coming is not None and m.serial <= coming.gift.serial:
            return
        if coming is not None:  # the giver has settled that one by itself
            self._give_up(sender, coming, "another gift came")
        if why:
            if m.to == self.ground.me:
                self._settle(sender, m.serial, why)
            else:
                self.ground.send(sender, Refused(m.name, m.serial, why))
            return
        self._pull(sender, m)

    def _reason_against(self, sender: Voter, m: Gift) -> str:
        if m.to != self.ground.me:
            return "it was meant for another process"
        if self.closed:
            return "this gossip is closed"
        if m.grid != self.spec:
            return f"{self.spec.numel} elements in {self.spec.codec} are averaged here"
        if not 0 < m.weight <= WEIGHT_MAX:
            return f"a weight of {m.weight}"
        if len(self._arrivals.taken) + len(self._coming) >= ARRIVED_MAX:
            return "busy"
        return ""

    def _pull(self, sender: Voter, m: Gift) -> None:
        intake = Intake(
            self._key(m.vector),
            sender,
            self.grid,
            math.inf,
            2,
            lambda parcel: self._take(sender, parcel),
            lambda why: self._failed(sender, why),
        )
        n_chunks = self.grid.n_chunks
        self._coming[sender] = Coming(m, intake, [None] * n_chunks, n_chunks)
        self.parcels.want(intake, range(n_chunks))

    def _take(self, sender: Voter, parcel: Parcel) -> None:
        coming = self._coming[sender]
        if not self.grid.coder.finite(parcel.payload, self.grid.elems(parcel.chunk)):
            self.ground.dropped[sender.peer, "not finite"] += 1
            self._give_up(sender, coming, "refused: not finite")
            return
        coming.payloads[parcel.chunk] = parcel.payload
        coming.left -= 1
        if coming.left:
            return
        del self._coming[sender]
        self.parcels.stop(coming.intake)
        self.bytes_received += coming.intake.received_bytes
        gift = coming.gift
        whole = [payload for payload in coming.payloads if payload is not None]
        self._settled[sender] = Settled(gift.serial, True, "")
        self._arrivals.taken.append(Share(sender, gift.weight, gift.step, whole))
        self._answer(sender)
        self._tell()

    def _failed(self, sender: Voter, why: str) -> None:
        coming = self._coming.pop(sender)
        self._settle(sender, coming.gift.serial, why)

    def _give_up(self, sender: Voter, coming: Coming, why: str) -> None:
        self.parcels.stop(coming.intake)
        del self._coming[sender]
        self._settle(sender, coming.gift.serial, why)

    def receive_withdraw(self, sender: Voter, m: Withdraw) -> None:
        _check_serial(m.serial)
        if m.to != self.ground.me:
            self.ground.send(sender, Refused(m.name, m.serial, "it was meant for another process"))
            return
        serial = self._settled.get(sender, NONE_YET).serial
        coming = self._coming.get(sender)
        if m.serial == serial:
            self._answer(sender)
        elif coming is not None and coming.gift.serial == m.serial:
            self._give_up(sender, coming, "withdrawn")
        elif m.serial > serial and coming is None:
            self._settle(sender, m.serial, "withdrawn")

    def _settle(self, sender: Voter, serial: int, why: str) -> None:
        """This gift is not taken, now or ever."""
        self._settled[sender] = Settled(serial, False, why)
        self._answer(sender)

    def _answer(self, sender: Voter) -> None:
        self.ground.send(sender, self._settled[sender].answer(self.name))

    # ---------------------------------------------------------------- time and members

    def tick(self) -> None:
        self._pace.look()
        now, members = self.ground.now, self.ground.members
        for given in list(self._given.values()):
            to = given.share.peer
            if members.gone(to):
                self._take_back_untold(given, "left")
                continue
            if members.up(to):
                given.down_since = None
            elif given.down_since is None:
                given.down_since, given.withdrawn = self.ground.running_s, True
            elif self.ground.running_s - given.down_since > RECLAIM_S:
                self._reclaimed[to] = Reclaimed(given.serial, given.share.weight)
                self._take_back_untold(given, "dead")
                continue
            if self.ground.running_s >= given.until_run:
                given.withdrawn = True
            if now >= given.again:
                self._push(given)
        self._reclaimed = {to: reclaimed for to, reclaimed in self._reclaimed.items() if not members.gone(to)}
        for to, reclaimed in self._reclaimed.items():
            if members.up(to) and now >= reclaimed.again:
                reclaimed.again = now + AGAIN_S
                self.ground.send(to, Withdraw(self.name, reclaimed.serial, to))

    def member_up(self, voter: Voter) -> None:
        given = self._given.get(voter)
        if given is not None:
            given.again = 0.0
        if voter in self._reclaimed:
            self._reclaimed[voter].again = 0.0

    def member_gone(self, voter: Voter) -> None:
        """Down, or gone for good; intakes from it have failed already."""
        if self.ground.members.gone(voter):
            self._reclaimed.pop(voter, None)
        self.tick()

    def next_deadline(self) -> float:
        due = [given.again for given in self._given.values()]
        due += [reclaimed.again for to, reclaimed in self._reclaimed.items() if self.ground.members.up(to)]
        return min(due, default=math.inf)

    def _tell(self) -> None:
        self.ground.notify(GossipNews(self.name))


# ------------------------------------------------------------------ the arithmetic of mass


def _check_serial(serial: int) -> None:
    """ProtocolError for a gift that nobody can have numbered so."""
    if serial <= NONE_YET.serial:
        raise ProtocolError(f"a gift of number {serial}")


def give_away(grid: Grid, z: Tensor, weight: float, given: float) -> tuple[list[memoryview], float]:
    """Give the weight `given` of z away: what is sent, a payload per chunk, and the weight that is left.

    z keeps, in place, what the payloads don't say of it:

        w z = (w - v) z_new + v z',    so    z_new = z + v / (w - v) (z - z').
    """
    left = weight - given
    if not left > 0:
        raise ValueError(f"of a weight of {weight}, {given} cannot be given away")
    payloads, room = [], vectors.empty(min(grid.chunk_elems, grid.numel))
    for chunk in range(grid.n_chunks):
        start, stop = grid.span(chunk)
        part = z[start:stop]
        payloads.append(grid.coder.encode(part))
        told = grid.coder.decode(payloads[-1], stop - start, room[: stop - start])
        part.sub_(told.sub_(part), alpha=given / left)
    return payloads, left


def absorb(grid: Grid, z: Tensor, weight: float, share: Share) -> float:
    """Take a share into (z, weight), in place; returns the new weight."""
    total, room = weight + share.weight, vectors.empty(min(grid.chunk_elems, grid.numel))
    for chunk, payload in enumerate(share.payloads):
        start, stop = grid.span(chunk)
        z[start:stop].lerp_(grid.coder.decode(payload, stop - start, room[: stop - start]), share.weight / total)
    return total
