"""The taking side of parcels: vectors pulled from their holders, chunk by chunk, over the bulk lane.

    want(chunks) ──> Pull, a window at a time ──> Parcel per chunk: taken(parcel) ... until all that is wanted is here
                                             └──> NoParcel, death, silence, the end of its time: failed(why), once

- **Credit.** Only what fits a window is asked for at a time: bytes for what the way there and back takes, and a little.
- **Checked.** A parcel of a wrong length ends the intake; one that nobody asked for is dropped. Both are counted with
  the sender's name (`Ground.dropped`).
- **Patience** follows from what was measured: the longest pause between two parcels lately, or what is to be expected
  of a link such as the holder's record tells. Silent for longer: asked again, what was in the air may have been lost
  with a connection. Silent ASKS_MAX times in a row: given up. `Coming` breaks a silence, as does a parcel, also one of
  another intake from the same holder that was asked for before: all of it leaves by one connection, in the order in
  which it was asked for, and what is asked for again while it waits there comes twice. What was asked for later goes
  before it only where the holder did not have it yet, and said so. No intake lasts beyond its own end, so nobody waits
  for ever.

All of it in running time: while I was not scheduled, parcels lay unread in my own sockets.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable

from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.holdings import ASKED_MAX, CHANNEL_CHARS_MAX, Holdings
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Coming, Key, NoParcel, Parcel, Pull
from dlc.comm.messages import Bulk, GridSpec
from dlc.errors import ProtocolError

WINDOW_BYTES = 256 << 10
"""In the air of one intake besides what a round trip takes: more only queues in shallow buffers (measured)."""
WINDOW_CHUNKS_MIN, WINDOW_CHUNKS_MAX = 3, 256
FIRST_RATE_Bps = 1 << 20
"""Assumed of a holder's whole link that tells none, until parcels came."""
RATE_MIN_Bps = 64 << 10
SILENCE_S_MIN = 2.0
GAP_S_MAX = 20.0
GAPS = 3.0
"""Times the longest pause after which a holder counts as silent."""
GAP_DECAY = 0.9
ASKS_MAX = 3
LOOK_S = 0.25
"""Intakes are looked at so often: who has been silent for too long, whose time is over."""

WHY_CHARS_MAX = 128
"""Of the reason that a holder gives for not sending: others are told it, too."""
LATE, DEAD, LEFT, WRONG_SIZE = "late", "dead", "left", "refused: wrong size"


def nobody(told: object) -> None:
    """Is there any more to be told."""


class Intake:
    """What is wanted of one holder under one key."""

    def __init__(
        self,
        key: Key,
        holder: Voter,
        grid: Grid,
        until_run: float,
        crowd: int,
        taken: Callable[[Parcel], None],
        failed: Callable[[str], None],
    ) -> None:
        """until_run: the end of its time. crowd: how many pull from this holder at the same time."""
        self.key, self.holder, self.grid, self.until_run, self.crowd = key, holder, grid, until_run, crowd
        self.spec = GridSpec(grid.numel, grid.chunk_elems, grid.codec)
        self.taken, self.failed = taken, failed
        self.todo: collections.deque[int] = collections.deque()
        self.in_flight: dict[int, float] = {}
        """Chunks, and when each was asked for first."""
        self.received_bytes = 0
        self.asked_run = self.heard_run = self.parcel_run = 0.0
        self.coming = False
        """The holder did not have it when it was asked."""
        self.gap_s = 0.0
        self.asks = 0
        """Silences in a row."""
        self.active_s = 0.0
        """Time in which something was in the air."""


class Parcels:
    """All intakes of one peer, beside its holdings."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.holdings = Holdings(ground)
        self._intakes: dict[tuple[Key, Voter], Intake] = {}
        self._heard: dict[Voter, tuple[float, float]] = {}
        """Of the last parcel of each holder: when it was asked for, and when it came."""
        self._look_run = 0.0

    # ---------------------------------------------------------------- wanting

    def want(self, intake: Intake, chunks: Iterable[int]) -> None:
        """Pull these chunks, too."""
        if (intake.key, intake.holder) not in self._intakes:
            intake.heard_run = intake.parcel_run = self.ground.running_s
            self._intakes[intake.key, intake.holder] = intake
        if not intake.in_flight:  # what passed while nothing was wanted is neither silence nor a pause between parcels
            intake.heard_run = intake.parcel_run = self.ground.running_s
        intake.todo.extend(chunks)
        self._ask(intake)

    def stop(self, intake: Intake) -> None:
        """Nothing more is wanted; `failed` is not called. What the intake was to tell, and all the memory that this
        refers to, it forgets: mostly that refers to the intake, too, and would wait for the garbage collector."""
        if self._lasts(intake):
            del self._intakes[intake.key, intake.holder]
            intake.taken = intake.failed = nobody

    def _lasts(self, intake: Intake) -> bool:
        return self._intakes.get((intake.key, intake.holder)) is intake

    def _ask(self, intake: Intake) -> None:
        window = self._window(intake)
        if 4 * len(intake.in_flight) > 3 * window:
            return
        chunks = []
        while intake.todo and len(intake.in_flight) < window:
            chunk = intake.todo.popleft()
            intake.in_flight[chunk] = self.ground.running_s
            chunks.append(chunk)
        if chunks:
            intake.asked_run = self.ground.running_s
            self.ground.send(intake.holder, Pull(intake.key, intake.spec, tuple(chunks)))

    def _window(self, intake: Intake) -> int:
        chunk_bytes = intake.grid.wire_bytes(0)
        waited_s = intake.active_s
        rate_Bps = intake.received_bytes / waited_s if waited_s > 0 else self._told_Bps(intake)
        in_air = 2 * self.ground.members.rtt_s(intake.holder.peer) * rate_Bps + WINDOW_BYTES
        return min(max(math.ceil(in_air / chunk_bytes), WINDOW_CHUNKS_MIN), WINDOW_CHUNKS_MAX)

    def _told_Bps(self, intake: Intake) -> float:
        record = self.ground.members.record(intake.holder.peer)
        known = record.up_Bps if record is not None and record.up_Bps > 0 else FIRST_RATE_Bps
        return max(known, RATE_MIN_Bps)

    # ---------------------------------------------------------------- messages

    def receive_pull(self, sender: Voter, m: Pull) -> None:
        if len(m.chunks) > ASKED_MAX or len(m.key.channel) > CHANNEL_CHARS_MAX:
            raise ProtocolError(f"{sender} asks for {len(m.chunks)} chunks of a {len(m.key.channel)}-letter key")
        self.holdings.asked(sender, m)

    def receive_parcel(self, sender: Voter, m: Parcel) -> None:
        intake = self._intakes.get((m.key, sender))
        if intake is None or m.chunk not in intake.in_flight:
            self.ground.dropped[sender.peer, "not asked for"] += 1
            return
        size = memoryview(m.payload).nbytes
        if size != intake.grid.wire_bytes(m.chunk):
            self.ground.dropped[sender.peer, "wrong size"] += 1
            self._fail(intake, WRONG_SIZE)
            raise ProtocolError(
                f"{sender} sent {size} bytes as chunk {m.chunk} of {m.key.channel!r}, "
                f"which has {intake.grid.wire_bytes(m.chunk)}"
            )
        asked_run, now = intake.in_flight.pop(m.chunk), self.ground.running_s
        gap_s = now - intake.parcel_run
        intake.gap_s = max(gap_s, GAP_DECAY * intake.gap_s) if intake.received_bytes else 0.0
        intake.active_s += gap_s
        self._heard[sender] = (asked_run, now)
        intake.heard_run = intake.parcel_run = now
        intake.asks = 0
        intake.received_bytes += size
        self.ground.rates.received(self.ground.now, size)
        self._ask(intake)
        intake.taken(m)

    def receive_coming(self, sender: Voter, m: Coming) -> None:
        intake = self._intakes.get((m.key, sender))
        if intake is not None:
            intake.heard_run = intake.parcel_run = self.ground.running_s
            intake.asks, intake.coming = 0, True

    def receive_no_parcel(self, sender: Voter, m: NoParcel) -> None:
        intake = self._intakes.get((m.key, sender))
        if intake is not None:
            self._fail(intake, m.why[:WHY_CHARS_MAX] or LATE)

    # ---------------------------------------------------------------- time and members

    def tick(self) -> None:
        running_s = self.ground.running_s
        if running_s < self._look_run:
            return
        self._look_run = running_s + LOOK_S
        self.holdings.tick()
        for intake in list(self._intakes.values()):
            if not (self._lasts(intake) and (intake.in_flight or intake.todo)):
                continue
            if running_s >= intake.until_run:
                self._fail(intake, LATE)
            elif running_s - self._heard_of(intake) > self.silence_s(intake):
                self._silent(intake)

    def _heard_of(self, intake: Intake) -> float:
        """Since when its holder is silent."""
        asked_run, heard_run = self._heard.get(intake.holder, (0.0, 0.0))
        if intake.coming or asked_run <= intake.asked_run:
            intake.heard_run = max(intake.heard_run, heard_run)
        return intake.heard_run

    def _silent(self, intake: Intake) -> None:
        intake.asks += 1
        if intake.asks > ASKS_MAX:
            self._fail(intake, LATE)
            return
        intake.asked_run = intake.heard_run = self.ground.running_s
        intake.coming = False
        self.ground.send(intake.holder, Pull(intake.key, intake.spec, tuple(intake.in_flight)))

    def silence_s(self, intake: Intake) -> float:
        """The longest silence that the holder's pace explains."""
        chunk_bytes = intake.grid.wire_bytes(0)
        expected_s = 2 * intake.crowd * chunk_bytes / self._told_Bps(intake)
        gap_s = min(max(intake.gap_s, expected_s), GAP_S_MAX)
        return max(SILENCE_S_MIN, 4 * self.ground.members.rtt_s(intake.holder.peer), GAPS * gap_s)

    def next_deadline(self) -> float | None:
        """Absolute time of the next look."""
        return self.ground.at(self._look_run) if self._intakes or self.holdings.any else None

    def member_gone(self, voter: Voter, why: str) -> None:
        """It died or left: what is wanted of it will not come."""
        self.holdings.drop_asker(voter)
        self._heard.pop(voter, None)
        for intake in [i for i in self._intakes.values() if i.holder == voter]:
            if self._lasts(intake):  # what ended before it may have stopped it
                self._fail(intake, why)

    def _fail(self, intake: Intake, why: str) -> None:
        failed = intake.failed
        self.stop(intake)
        intake.todo.clear()
        intake.in_flight.clear()
        failed(why)

    # ---------------------------------------------------------------- bulk

    def pending(self) -> list[PeerId]:
        return self.holdings.pending()

    @property
    def resting(self) -> bool:
        """Nothing waits to be sent, and nothing is waited for."""
        return not self.pending() and not any(i.in_flight or i.todo for i in self._intakes.values())

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        return self.holdings.next_bulk(peer)
