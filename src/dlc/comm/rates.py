"""What my own link carries, in each direction: estimated from the rounds themselves, and told in my record.

A round shows a rate only where it asks for it. Hence three rules:

- *Rising by what was seen.* The largest rate over a window of about half a second is a lower bound of what the link
  carries, whatever else went on. A greater one than the estimate becomes the estimate at once.
- *Falling needs a reason.* The round asked for more than it got, and my own link is what was short: packets waited on
  all of my connections (one alone may end at a slow receiver). Where the system tells nothing of connections: bulk
  waited to be sent nearly all the time; of the way down nothing is known then. One odd round may happen to anybody:
  only when it is so a second time in a row, the more that was seen in the two is believed. Where the estimate was used
  up while packets waited, what the link carried over half of the round is what it carries: a shorter window would see
  a queue flow off. One round takes no more than `GIVE` leaves. If packets wait at the lower rate, too, it is not for
  this link that they do (a busy processor, a receiver's link), and a little less is no reason to fall again.
- *Rising on trial.* Paced at the estimate, a link shows no more than that. So an estimate that was used up, while
  packets did not wait, or waited and yet all went that was asked for, rises by a step: small where it is nearly sure,
  doubled at each further trial. What was used up is proved, the step is not: one odd round takes it back. What was
  found too much is not tried again for `TRIAL_REST` rounds: on a far link a round that asks for 1 or 2 % more than it
  carries may take a tenth longer.

The way down is seldom asked for all that it carries, since others send as fast as *their* links allow; and its messages
come in bursts, behind what was lost and sent again, so that the most that was seen may be more than it carries. A peer
of a round sends about as much as it gets, so nothing is gained by knowing a wider way down: it is told to be like the
way up, unless a round showed that it is less. Who sends nothing tells what came.

Rounds may be small, and their first ones slow for reasons of their own. Paced at what those showed, all later ones
would be as slow, and too short to tell more. So an estimate that is no more than what once went, unpaced and without
packets waiting, rises on trial by short rounds, too, until packets wait.

An idle link is not lowered: nothing was asked of it. Rounds that are too short, or have too few messages to tell,
change nothing; until the first one that tells, the rate is 0, unknown, or what a probe of the way up has shown
(linkprobe.py): the greatest of several. It stands for less than what a round shows: the first round that falls short of
it is believed. A round that stood still for most of its time, as for a peer that froze, is no first one that tells.

    begin(plan) -> samples, sent, received ... -> end

What is sent is measured by what the other sides acknowledged (`samples`, from the kernel, all bulk included), or else
by what was handed to the sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dlc.comm.partition import Load

WINDOW_S = 0.4
"""The shortest time over which a rate is measured: bursts and the kernel's buffers even out."""
WINDOW_SHARE, MEAN_SHARE = 0.2, 0.5
"""Of the round's length, at least: the longer the more exact. For the most that was seen, and for what was held."""
MESSAGES_WINDOW_S = 1.0
"""The same where whole messages are counted: after a loss, what came behind it is handed over all at once."""
WINDOW_BYTES_MIN = 64 << 10
"""And the fewest bytes: less would pass through any link's buffers at once."""
WINDOW_MESSAGES = 16
"""Of the largest size, in a window that counts whole messages: one that ends just inside it counts as a whole."""
SLOT_S = 0.05
"""Points of a meter are no closer, at first."""
POINTS_MAX = 2048
"""Of a meter, 100 s of them: then each second one is dropped, and those that follow are half as dense."""
FAST_Bps = 500e6
"""Rates above it are told as this: at 4 Gbit/s it is the processor that is measured, and not a link."""

WAITING_S = 0.012
"""Packets wait where a round trip takes longer than the path's by this and the time of WAITING_PACKETS."""
WAITING_PACKETS = 8
WAITING_MUCH = 0.5
"""Part of the samples with packets waiting, above which a link is short; else it flows."""
PACKET_BYTES = 1500
BUSY = 0.5
"""Part of the samples from the first bytes to the last in which something moved, below which the round stood still."""
BACKLOG = 0.8
"""Part of the time in which bulk waited to be sent, above which the way up was what was short."""

SHORT = 0.95
"""Part of what a round asked for: less was not enough. Paced links get a little less than was asked for."""
DOWN_SHORT = 0.75
"""The same of the way down, which is counted by whole messages, and goes slowly for other reasons too."""
HOLDS = 0.99
"""Part of what a round asked for that it holds where packets wait, but not because it asked for too much: on a busy
host, say, or as large bursts do for each other where the round trip is short."""
NOISE = 0.1
"""Part by which what was seen may exceed the estimate, and count for nothing, where packets waited, or the link was
paced at about that."""
USED_UP = 0.95
"""Part of the estimate that a round must have asked for and seen, to try whether there is more."""
PACED = 0.98
"""What is seen of what is asked for, on a link that is not short."""
GIVE = 0.85
"""What one round leaves at least of an estimate that was used up while packets waited."""
STEP_MAX, STEP_FULL, STEP_MIN = 0.2, 0.05, 0.02
"""Of a trial: 1 + this is the factor by which the estimate rises. On a link that never was short; that was overfilled
by a round without pacing, which may have lost much of what it carried; of which only probes have told, which seldom
show less than it carries, or that a paced round found short. The last is what a plan leaves free of each link."""
TRIAL_REST = 10
"""Rounds that use up the estimate before what was found too much is tried again."""
TOLD_CHANGE = 0.01
"""A rate is told anew if it differs by more from the one told before: what was not told is not tried."""


class Sample(Protocol):
    """What the kernel says of one connection that bulk leaves by."""

    @property
    def bytes_acked(self) -> int: ...
    @property
    def rtt_s(self) -> float: ...
    @property
    def min_rtt_s(self) -> float: ...


class Meter:
    """A growing total, and the largest rate at which it grew."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._slot_s = SLOT_S
        self._slot_since = 0.0

    def begin(self, now: float, total: float) -> None:
        self._points, self._slot_s, self._slot_since = [(now, total)], SLOT_S, now

    def clear(self) -> None:
        """It begins with what comes next."""
        self._points = []

    def at(self, now: float, total: float) -> None:
        if not self._points:
            self.begin(now, total)
        elif now - self._slot_since < self._slot_s:
            self._points[-1] = (now, total)
        else:
            self._points.append((now, total))
            self._slot_since = now
            if len(self._points) > POINTS_MAX:
                self._points = self._points[::2]
                self._slot_s *= 2

    @property
    def empty(self) -> bool:
        return not self._points

    def peak_Bps(self, window_s: float, window_bytes: float, share: float = WINDOW_SHARE) -> float:
        """The largest rate over the shortest windows of at least this time, this share of all of it, and so many bytes.

        0 if there are none.
        """
        points, peak, end = self._points, 0.0, 0
        if not points:
            return 0.0
        window_s = max(window_s, share * (points[-1][0] - points[0][0]))
        for begin_s, begin_total in points:
            while end < len(points) and (
                points[end][0] - begin_s < window_s or points[end][1] - begin_total < window_bytes
            ):
                end += 1
            if end == len(points):
                break
            peak = max(peak, (points[end][1] - begin_total) / (points[end][0] - begin_s))
        return peak


class Moves:
    """In how many of the samples from the first bytes to the last something moved."""

    def __init__(self) -> None:
        self._moved, self._span, self._idle = 0, 0, 0

    def look(self, moved: bool) -> None:
        if moved:
            self._moved, self._span, self._idle = self._moved + 1, self._span + self._idle + 1, 0
        elif self._moved:
            self._idle += 1

    @property
    def none(self) -> bool:
        return not self._moved

    @property
    def share(self) -> float:
        """1 where nothing moved."""
        return self._moved / self._span if self._span else 1.0


class Estimate:
    """One direction."""

    def __init__(self) -> None:
        self.Bps = 0.0
        """0 = unknown."""
        self._step = STEP_MAX
        self._short_Bps = 0.0
        """What was seen in the last round that told something, if it fell short; else 0."""
        self._eased = False
        """It fell by a little, and packets have waited in every round since."""
        self._proved_Bps = 0.0
        """What the last round that told something used up, if the estimate rose on trial after it; else 0."""
        self._refuted_Bps, self._rest = 0.0, 0
        """What was found too much last, 0 = nothing, and how many more rounds that counts."""
        self.fell = False
        """It was once found too high: it is more than a lower bound."""
        self.probed = False
        """It comes from probes, and no round has told anything yet."""
        self._loose = False
        """It is what went once where nothing was known, and packets have not waited: it may be much too low."""

    def learn(self, seen_Bps: float, held_Bps: float, asked_Bps: float, waiting: bool, flowing: bool) -> None:
        """A round is over.

        seen_Bps:  the largest rate in it, 0 if it was too short to tell.
        held_Bps:  the largest that it held for MEAN_SHARE of it.
        asked_Bps: what the plan asked of this direction, 0 if nothing in particular.
        waiting:   packets waited on my own link.
        flowing:   packets were seen not to wait there.
        """
        self._loose = self._loose and not waiting
        if seen_Bps <= 0:
            if self._loose and flowing and asked_Bps >= USED_UP * self.Bps:
                self._try(asked_Bps)
            return
        before_Bps, before_short_Bps, probed = self.Bps, self._short_Bps, self.probed
        self._loose = self._loose or not (before_Bps or waiting)
        proved_Bps, self._proved_Bps = self._proved_Bps, 0.0
        self._short_Bps, self.probed = 0.0, False
        holds = waiting and 0 < HOLDS * asked_Bps <= held_Bps
        short = waiting and not holds
        used_up = asked_Bps >= USED_UP * before_Bps
        if seen_Bps >= before_Bps * (1 + NOISE * (waiting or used_up)):
            self.Bps = seen_Bps
        elif short and seen_Bps < SHORT * asked_Bps:
            self._short_Bps = seen_Bps
            if before_short_Bps or probed:
                self.Bps = max(seen_Bps, before_short_Bps)
                self.fell = True
            elif proved_Bps:
                self.Bps = min(before_Bps, max(seen_Bps, proved_Bps))
        elif short and used_up:
            least_Bps = max(proved_Bps, GIVE * before_Bps)
            held_Bps = min(before_Bps, max(held_Bps if proved_Bps else held_Bps / PACED, least_Bps))
            a_little = held_Bps >= SHORT * before_Bps
            if proved_Bps or not (a_little and self._eased):
                self.Bps = held_Bps
            self._eased = self._eased or (a_little and held_Bps < before_Bps)
        elif (flowing or holds) and used_up and seen_Bps >= USED_UP * before_Bps:
            if holds and not self._refuted_Bps:  # perhaps it is for this link that they wait: no trial now
                self._refuted_Bps, self._rest = before_Bps * (1 + STEP_MIN), TRIAL_REST
            self._step = min(self._step, STEP_MIN) if probed else self._step
            self._try(asked_Bps)
        if self.Bps < before_Bps:
            self._refuted_Bps, self._rest = before_Bps, TRIAL_REST
        self._eased = self._eased and waiting
        if short:
            self._step = STEP_MIN if asked_Bps else STEP_FULL
        self.Bps = min(self.Bps, FAST_Bps)

    def _try(self, asked_Bps: float) -> None:
        """A round has used up the estimate: try a step more, unless that was too much lately."""
        before_Bps, used_Bps = self.Bps, min(asked_Bps, self.Bps)
        tried_Bps = used_Bps * (1 + self._step)
        if self._refuted_Bps:
            tried_Bps = min(tried_Bps, self._refuted_Bps * (1 - STEP_MIN / 2))
            if tried_Bps < used_Bps * (1 + STEP_MIN / 2):
                self._rest -= 1
                if self._rest > 0:
                    return
                self._refuted_Bps, self._step = 0.0, STEP_MIN
                tried_Bps = used_Bps * (1 + STEP_MIN)
        if tried_Bps > before_Bps:
            self._proved_Bps, self.Bps = used_Bps, tried_Bps
            if asked_Bps >= before_Bps * (1 - STEP_MIN / 2):  # of what no plan has asked for, nothing is proved
                self._step = min(STEP_MAX, 2 * self._step)


class Rates:
    """Both directions of my link. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.up, self.down = Estimate(), Estimate()
        self.told_up_Bps, self.told_down_Bps = 0.0, 0.0
        """What my record says; changed at the end of a round or a probe, by more than TOLD_CHANGE."""
        self._measuring = self._of_gifts = False
        self._asked_Bps = Load(0.0, 0.0)
        self._received, self._handed, self._acked = Meter(), Meter(), Meter()
        self._received_bytes, self._handed_bytes, self._acked_bytes = 0, 0, 0
        self._message_bytes = 0
        """The largest message of this round."""
        self._sampled = False
        """The kernel told something in this round."""
        self._last_acked: dict[str, int] = {}
        self._looks, self._waiting = 0, 0
        """Samples in which something moved, and those with packets waiting on all ways."""
        self._moves = Moves()
        self._first_handed = self._last_handed = 0.0
        self._backlog_s = 0.0
        self._more = False
        """More waited after the last message that was handed over."""

    # ---------------------------------------------------------------- a round

    def begin(self, now: float, asked_Bps: Load, gifts: bool = False) -> None:
        """The data plane of a plan begins, which asks so much of my link (0: nothing in particular).

        A later plan of the same slot goes on measuring. gifts: of these; nothing where a plan is measured, and a plan
        begins anew: it would be told from the time, too, in which they stood still.
        """
        if gifts and self.planned:
            return
        self._asked_Bps = asked_Bps
        if self._measuring and gifts == self._of_gifts:
            return
        self._measuring, self._of_gifts, self._sampled = True, gifts, False
        # From the first message on: an announced plan is long before it, and no round is to seem slow by that.
        self._received.clear()
        self._handed.clear()
        self._message_bytes = self._looks = self._waiting = 0
        self._moves = Moves()
        self._first_handed = self._last_handed = now
        self._backlog_s, self._more = 0.0, False

    def end(self, gifts: bool = False) -> None:
        """The slot is over: learn from it. gifts: or these are, if it is they that are measured."""
        if not self._measuring or gifts != self._of_gifts:
            return
        self._measuring = False
        by_messages = max(WINDOW_BYTES_MIN, WINDOW_MESSAGES * self._message_bytes)
        waiting = self._waiting > WAITING_MUCH * self._looks
        flowing = self._looks > 0 and not waiting
        if not self.up.Bps and self._moves.share < BUSY:
            return
        if self._sampled:
            up_Bps, up_short = self._acked.peak_Bps(WINDOW_S, WINDOW_BYTES_MIN), waiting
            up_held_Bps = self._acked.peak_Bps(WINDOW_S, WINDOW_BYTES_MIN, MEAN_SHARE)
        else:
            handing_s = self._last_handed - self._first_handed
            up_Bps = self._handed.peak_Bps(MESSAGES_WINDOW_S, by_messages)
            up_held_Bps = self._handed.peak_Bps(MESSAGES_WINDOW_S, by_messages, MEAN_SHARE)
            up_short = self._backlog_s > BACKLOG * handing_s
        down_Bps = self._received.peak_Bps(MESSAGES_WINDOW_S, by_messages)
        down_held_Bps = self._received.peak_Bps(MESSAGES_WINDOW_S, by_messages, MEAN_SHARE)
        # What waits on the way up waits for the way up, unless that carried what was asked, and the other did not.
        up_lacked = up_Bps < SHORT * self._asked_Bps.up
        down_short = waiting and not up_lacked and down_Bps < DOWN_SHORT * self._asked_Bps.down
        self.up.learn(up_Bps, up_held_Bps, self._asked_Bps.up, up_short, flowing)
        if self.up.Bps or self._moves.none:
            self.down.learn(down_Bps, down_held_Bps, self._asked_Bps.down, down_short, flowing)
        self._tell()

    def _tell(self) -> None:
        if not self.down.fell:
            self.down.Bps = self.up.Bps or self.down.Bps
        self.told_up_Bps = _told(self.told_up_Bps, self.up.Bps)
        self.told_down_Bps = _told(self.told_down_Bps, self.down.Bps)

    # ---------------------------------------------------------------- a probe

    @property
    def measuring(self) -> bool:
        """A round, or a group's, is on its way, or gifts."""
        return self._measuring

    @property
    def planned(self) -> bool:
        """A round, or a group's, is on its way."""
        return self._measuring and not self._of_gifts

    @property
    def unsure(self) -> bool:
        """No round has told anything of the way up."""
        return not self.up.Bps or self.up.probed

    @property
    def acked_bytes(self) -> int:
        """What others acknowledged of all bulk, as far as samples have told: only how it grows means something."""
        return self._acked_bytes

    def probed(self, up_Bps: float) -> None:
        """A probe has shown that the way up carries so much, perhaps more."""
        if self.unsure and up_Bps > self.up.Bps:
            self.up.Bps, self.up.probed = min(up_Bps, FAST_Bps), True
            self._tell()

    # ---------------------------------------------------------------- what is seen

    def received(self, now: float, size: int) -> None:
        """A bulk message of a round came."""
        self._received_bytes += size
        self._message_bytes = max(self._message_bytes, size)
        if self._measuring:
            self._received.at(now, self._received_bytes)

    def sent(self, now: float, size: int, more: bool) -> None:
        """A bulk message was handed to its socket; `more`: others wait."""
        self._handed_bytes += size
        self._message_bytes = max(self._message_bytes, size)
        if self._measuring:
            if self._handed.empty:
                self._first_handed = now
            elif self._more:
                self._backlog_s += now - self._last_handed
            self._last_handed, self._more = now, more
            self._handed.at(now, self._handed_bytes)

    def samples(self, samples: Mapping[str, Sample], now: float) -> None:
        """What the kernel says of all connections that bulk leaves by, by peer."""
        moving: list[Sample] = []
        for peer, sample in samples.items():
            before = self._last_acked.get(peer, sample.bytes_acked)
            # Fewer than before: another connection, which began at 0.
            gained = sample.bytes_acked - before if sample.bytes_acked >= before else sample.bytes_acked
            self._acked_bytes += gained
            if gained:
                moving.append(sample)
        self._last_acked = {peer: sample.bytes_acked for peer, sample in samples.items()}
        if not self._measuring or not samples:
            return
        if not self._sampled:
            self._sampled = True
            self._acked.begin(now, self._acked_bytes)
            return
        self._acked.at(now, self._acked_bytes)
        self._moves.look(bool(moving))
        if moving:
            self._look(moving, alone=len(moving) == 1 < len(samples))

    def _look(self, moving: list[Sample], alone: bool) -> None:
        """Do packets wait on my link? `alone`: only one of several connections moves, so it may be the other's link."""
        waited_s = min(sample.rtt_s - sample.min_rtt_s for sample in moving)
        packets_s = WAITING_PACKETS * PACKET_BYTES / self.up.Bps if self.up.Bps else 0.0
        waiting = waited_s > WAITING_S + packets_s
        if not (waiting and alone):
            self._looks += 1
            self._waiting += waiting


def _told(told_Bps: float, now_Bps: float) -> float:
    return told_Bps if abs(now_Bps - told_Bps) <= TOLD_CHANGE * told_Bps else now_Bps
