"""Catching up: the one rule for whoever is behind, forked or new (docs/protocol.md, "Behind, forked, new").

Whoever learns of an alive peer with a greater history asks it what follows its own head:

  IDLE --greater history alive--> ASKED --Steps--> REPLAY (fetch results by hash, apply entry by entry) --> IDLE
                                        --Offer--> IMAGES (fetch pieces, verify, switch at once)        --> ASKED
  REPLAY --the donor dies or falls silent--> IDLE (another is taken; my own state was not touched)
  IMAGES --nobody is left who has them-----> IDLE (what came is kept for the next offer that names the same images)
  IMAGES --mine is of another kind---------> IDLE (the application is told; that channel is asked for no more)

Which offers are taken is `imageoffers.py`. Pieces are asked of every alive peer that stands at the offered head or
beyond (`download.py`); the other side of this conversation is `donations.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping

from dlc.comm.context import Context
from dlc.comm.donations import Donations
from dlc.comm.download import Download, Staged
from dlc.comm.entries import EMPTY, ROUND, Entry, manifest_hash
from dlc.comm.events import ChannelSynced, HistoryLost
from dlc.comm.exchange import Exchange, result_hash
from dlc.comm.ids import LOWEST, Voter
from dlc.comm.imageoffers import ImageOffers, opened
from dlc.comm.images import PieceLimits
from dlc.comm.log import Attached, Log
from dlc.comm.messages import (
    Fetch,
    NoOffer,
    NoPiece,
    Offer,
    Piece,
    Result,
    Step,
    Steps,
    SyncReq,
)
from dlc.comm.permit import alive_records, greater_alive
from dlc.comm.reach import direct
from dlc.comm.records import STATES_MAX, key_of, told_digest
from dlc.comm.shapes import plausible_entry, plausible_results
from dlc.errors import CheckpointError

STEPS_IN_FLIGHT = 2
"""Entries whose results are asked for at once: hides the round trips, bounds the memory."""
BEST = 3
"""Who is asked, turn by turn, of those with the greatest histories."""
ASK_AGAIN_S = 1.0
RESULT_PAUSES = 3.0
"""Times the longest pause between two results of a donor before what is lacking is asked for again, and then ever
less often: what is on its way already would come twice."""
OFFER_S = 60.0
"""An offer that comes later than this after the question is not waited for: a donor hashes 1 GB in about 2 s."""
TAKEN = "taken"
"""Use of the log's pin: entries are kept from the first question on, as the answer may be of that head."""


class Sync:
    def __init__(
        self,
        ctx: Context,
        log: Log,
        exchange: Exchange,
        apply: Callable[[Entry, tuple[bytes, ...], tuple[Result, ...]], None],
        switched: Callable[[], None],
        accepted_first: Callable[[], bytes],
        last_results_come: Callable[[], bool],
        piece_bytes: int,
    ) -> None:
        self.ctx, self.log, self.exchange = ctx, log, exchange
        self.apply, self.switched = apply, switched
        """Apply the next entry; told after a snapshot was installed."""
        self.accepted_first = accepted_first
        """Digest of the first state that I accepted in this slot, if it is an opening."""
        self.last_results_come = last_results_come
        """What follows my head is decided, and all of it will be here soon without being asked for."""
        self.donor: Voter | None = None
        self._steps: list[Step] = []
        self._results: dict[bytes, Result] = {}
        self._wanted: set[bytes] = set()
        """Results that the steps in flight name."""
        self._lacking: set[bytes] = set()
        """Those of the first step that have not come since it was looked at: all of it is looked at once more then."""
        self._asked: dict[Voter, float] = {}
        """Who was asked what follows my head, and when: an offer takes its time."""
        self._silent: dict[Voter, float] = {}
        """Whose entries or images were given up as they did not come, and when, until some come: bulk may have no way
        from there."""
        self._download: Download | None = None
        self._staged: dict[str, Staged] = {}
        """Images of the last download as far as they came: one per channel, until it is in step."""
        self.limits = PieceLimits(piece_bytes)
        self.donations = Donations(ctx, log, exchange, self.limits)
        self.offers = ImageOffers(ctx, log, self.limits)
        self._contradicted: tuple[bytes, frozenset[Voter]] = (b"", frozenset())
        """A head of mine, and who says of it, or of what follows it, what cannot be if my log is right."""
        self._asked_at = -1e9
        self._heard_at = 0.0
        self._pause_s = 0.0
        """The longest since the last Steps between two results, or before the first."""

    @property
    def busy(self) -> bool:
        return bool(self._steps) or self._download is not None

    # ---------------------------------------------------------------- asking

    def tick(self) -> None:
        now = self.ctx.now
        self.donations.tick()
        unsynced = self.offers.unsynced()
        if not unsynced and self._download is None:
            self.log.pin(TAKEN, b"")
        if self._staged and not (unsynced or greater_alive(self.ctx, self.log)):
            self._staged = {}
        if self._results and not (self._steps or greater_alive(self.ctx, self.log)):
            self._results = {}
        if self._download is not None:
            self._download.verify()
            self._ask_pieces()
            self._finish_if_complete()
        elif self.donor is not None and not self._donor_fit():
            self._abandon(silent=[self.donor] if self._steps else [])
        if now < self._asked_at + ASK_AGAIN_S or self._download is not None:
            return
        if self._steps:
            self._replay()
            silent_s = now - max(self._asked_at, self._heard_at)
            if silent_s >= max(ASK_AGAIN_S, RESULT_PAUSES * self._pause_s, self._asked_at - self._heard_at):
                self._ask_results()
        else:
            self.start()

    def _donor_fit(self) -> bool:
        assert self.donor is not None
        patience_s = max(self._patience_s, RESULT_PAUSES * self._pause_s)
        return self.ctx.members.alive(self.donor) and self.ctx.now - self._heard_at < patience_s

    @property
    def _patience_s(self) -> float:
        """Silence after which somebody else is asked."""
        return max(4 * ASK_AGAIN_S, 2 * self.ctx.members.t_dead_s)

    @property
    def working(self) -> bool:
        """A slice of work waits for the next tick."""
        down = self._download
        return self.donations.working or (down is not None and down.complete)

    def fetch_first_state(self, donor: Voter, channel: str, digest: bytes) -> None:
        """A plan opens this channel with another first state than mine: take the coordinator's before voting."""
        attached = self.log.attached[channel]
        if attached.misfit:
            return
        kept = self.donations.kept(channel, digest)
        if kept is not None:
            self._replace(attached, channel, memoryview(kept), digest)
            return
        known = self.offers.first_states.get(channel) == digest
        self.offers.first_states[channel] = digest
        # The coordinator may lack it too, if it proposes what others accepted: then everybody is asked in turn.
        self.start(hint=None if known else donor)

    def start(self, hint: Voter | None = None) -> None:
        """Ask the peer with the greatest history for what I lack; `hint`: one known to have it."""
        if self.busy or self._awaiting() or self.last_results_come():
            return
        greater = sorted(greater_alive(self.ctx, self.log), key=lambda r: (key_of(r), r.synced), reverse=True)
        ahead = [r.voter for r in greater]
        lacking = self.offers.unsynced()
        image = bool(lacking)
        if not (ahead or image or hint):
            return
        if not ahead and image:
            ahead = self._holders(lacking)
        ahead.sort(key=lambda voter: self._silent.get(voter, -math.inf))
        if hint is not None and hint != self.ctx.me:
            ahead.insert(0, hint)
        if not ahead:
            return
        ahead = direct(self.ctx, ahead) or ahead  # who answers by a relay can give entries, and no bytes
        # Turn by turn among the best few, and then others, so that no silent donor is asked for ever.
        best = ahead if self.offers.first_states else ahead[:BEST]
        self.donor = best[int(self.ctx.now / ASK_AGAIN_S) % len(best)] if hint is None else ahead[0]
        if image and self.log.after(self.log.pinned.get(TAKEN, b"")) is None:
            self.log.pin(TAKEN, self.log.head)
        self._asked_at = self._heard_at = self.ctx.now
        self._asked = {v: at for v, at in self._asked.items() if at > self.ctx.now - OFFER_S} | {
            self.donor: self.ctx.now
        }
        state = self.log.state
        wanted = tuple(self.offers.first_states.values())
        snapshot = image or state.head == EMPTY or self._misled(r.voter for r in greater[:BEST])
        self.ctx.send(self.donor, SyncReq(state.head, state.depth, snapshot, wanted))

    def _misled(self, ahead: Iterable[Voter]) -> bool:
        """All of them contradict my log: it is mine that is wrong."""
        head, donors = self._contradicted
        return head == self.log.head and donors.issuperset(ahead)

    def _holders(self, lacking: list[str]) -> list[Voter]:
        """Who may hold a state that I lack, at my head or at one that the entries kept here follow: those first who say
        that they do."""
        head, recent = self.log.head, self.log.recent()
        near = [r for r in alive_records(self.ctx) if r.head == head or r.head in recent]
        says = {r.voter: any(told_digest(r, r.head, c) for c in lacking) for r in near}
        # No record tells of first states, nor of more channels than it has room for: who lacks another may have them.
        near = [r for r in near if r.synced or says[r.voter] or self.offers.first_states or len(r.states) == STATES_MAX]
        near.sort(key=lambda r: (not says[r.voter], r.head != head))
        return [r.voter for r in near]

    def _awaiting(self) -> bool:
        """Somebody was asked just now: the answer is on the way, or it was of no use."""
        return self.ctx.now - self._asked_at < ASK_AGAIN_S

    def _abandon(self, silent: Collection[Voter] = ()) -> None:
        """`silent`: from whom nothing came of what they had promised. Others are asked before they are asked again."""
        told = {v: at for v, at in self._silent.items() if self.ctx.members.alive(v)}
        self._silent = told | dict.fromkeys(silent, self.ctx.now)
        if self._download is not None:
            self._staged = self._download.staged
        self.donor, self._steps, self._download = None, [], None

    # ---------------------------------------------------------------- replay

    def receive_steps(self, sender: Voter, m: Steps) -> None:
        if sender not in self._asked or m.after != self.log.head or self.busy or not m.steps:
            return
        self.donor, self._heard_at = sender, self.ctx.now
        self._steps, self._pause_s = list(m.steps), 0.0
        named = {h for step in m.steps[:STEPS_IN_FLIGHT] for h in step.hashes}
        self._results = {h: r for h, r in self._results.items() if h in named}  # of another donor
        self._ask_results()
        self._replay()

    def _ask_results(self, which: slice = slice(0, STEPS_IN_FLIGHT)) -> None:
        if not self._steps or self.donor is None or self.last_results_come():
            return
        self._asked_at = self.ctx.now
        held = set(self.exchange.hashes.values())
        for step in self._steps[which]:
            lacking = tuple(h for h in step.hashes if h not in self._results and h not in held)
            if lacking:
                self.ctx.send(self.donor, Fetch(step.entry.parent, LOWEST, (), lacking))

    def receive_result(self, result: Result) -> bool:
        """Take a result that the replay waits for."""
        if not self._steps:
            return False
        digest = result_hash(result)
        if digest not in self._wanted:
            return False
        now = self.ctx.now
        self._pause_s, self._heard_at = max(self._pause_s, now - self._heard_at), now
        self._results[digest] = result
        self._lacking.discard(digest)
        if self.donor is not None:
            self._silent.pop(self.donor, None)
        if not self._lacking or self._steps[0].entry.parent != self.log.head:
            self._replay()
        return True

    def _replay(self) -> None:
        """Apply as many steps as are complete. Some may be done: their COMMIT came, and all their bytes were here."""
        following = (i for i, step in enumerate(self._steps) if step.entry.parent == self.log.head)
        self._steps = self._steps[next(following, 0) :]
        while self._steps:
            step = self._steps[0]
            if step.entry.parent != self.log.head and self._steps[-1].entry.hash in self.log.chain:
                self._steps = []  # COMMITs have led me past all of them: nobody contradicts me
                break
            if step.entry.parent != self.log.head or not _consistent(step):
                self._refuse()
                return
            in_hand = {self.exchange.hashes[c]: r for c, r in self.exchange.held.items()} | self._results
            self._lacking = {h for h in step.hashes if h not in in_hand}
            if self._lacking:
                self._wanted = {h for named in self._steps[:STEPS_IN_FLIGHT] for h in named.hashes}
                return
            results = tuple(in_hand[h] for h in step.hashes)
            if not plausible_entry(step.entry, self.log.state) or not plausible_results(step.entry, results):
                self._refuse()
                return
            rest = self._steps[1:]
            self._results = {h: r for h, r in self._results.items() if h not in step.hashes}
            self.log.learned_run = self.ctx.running_s
            self.apply(step.entry, step.hashes, results)
            self._steps = rest
            self._ask_results(slice(STEPS_IN_FLIGHT - 1, STEPS_IN_FLIGHT))
        donor, self.donor, self._results = self.donor, None, {}
        self._asked_at = -1e9
        # It keeps what follows for me, which others may not.
        self.start(hint=donor if any(r.voter == donor for r in greater_alive(self.ctx, self.log)) else None)

    def _refuse(self) -> None:
        head, donors = self._contradicted
        assert self.donor is not None
        self._contradicted = self.log.head, frozenset({self.donor, *(donors if head == self.log.head else ())})
        self._abandon()

    # ---------------------------------------------------------------- images

    def receive_offer(self, sender: Voter, m: Offer) -> None:
        if sender not in self._asked or self.busy:
            return
        wanted = self.offers.wanted(sender, m)
        if wanted is None:
            if sender == self.donor:
                self.donor = None
            return
        if not self.offers.fit(sender, m, wanted):
            self.donor = None  # what it has of other channels is asked for next
            return
        self.donor, self._heard_at = sender, self.ctx.now
        largest = max((i.piece_bytes for i in wanted), default=self.limits.piece_bytes)
        self._download = Download(m, wanted, dataclasses.replace(self.limits, piece_bytes=largest), self._staged)
        self._staged = {}
        self._ask_pieces()
        self._finish_if_complete()

    def _is_ancestor(self, m: Offer) -> bool:
        return self.log.head == EMPTY or self.log.head in m.chain

    def _ask_pieces(self) -> None:
        """Keep the windows of all donors full."""
        down = self._download
        if down is None or down.complete:
            return
        self._asked_at = self.ctx.now
        key = down.offer.state.key
        for voter, request in down.ask(self._donors(key), self._patience_s, self.ctx.now):
            self.ctx.send(voter, request)
        if down.hopeless():
            self._abandon(silent=[voter for voter, donor in down.donors.items() if donor.silences])

    def _donors(self, key: tuple[float, int, bytes]) -> list[Voter]:
        """Who stands at the offered head, or has passed it and may keep its image."""
        donors = [r.voter for r in alive_records(self.ctx) if key_of(r) >= key]
        donors = direct(self.ctx, donors) or donors
        if self.donor is not None and self.donor not in donors and self.ctx.members.alive(self.donor):
            donors.append(self.donor)
        return donors

    def receive_piece(self, sender: Voter, m: Piece) -> None:
        if self._download is not None:
            if self._download.receive(sender, m, self.ctx.now):
                self._silent.pop(sender, None)
            self._ask_pieces()
            self._finish_if_complete()

    def receive_no_piece(self, sender: Voter, m: NoPiece) -> None:
        if self._download is not None:
            self._download.refuse(sender, m.channel, m.digest)
            self._ask_pieces()

    def _finish_if_complete(self) -> None:
        """All pieces verified: switch to the offered state at once, or change nothing."""
        down = self._download
        if down is None or not (down.complete and down.verified):
            return
        donor, self.donor, self._download = self.donor, None, None
        self._asked_at = -1e9
        bad = [staged.image for staged in down.staged.values() if not staged.sound]
        if not bad:
            self._switch(down)
        elif donor is not None:
            for image in bad:
                self.offers.remember_bad(donor, image)

    def _switch(self, down: Download) -> None:
        """From what I hold to the offered state, and what I know to follow it."""
        offer = down.offer
        # The log may have gone on meanwhile: then what is kept of it is applied to the image. None: too far.
        ahead = offer.state.key < self.log.state.key
        later = self.log.after(offer.state.head) if ahead else []
        if later is None:
            return
        jump = offer.state.key > self.log.state.key  # at an equal head: what I hold of the log itself is wrong
        was = {channel: self.log.state.base(channel) for channel in self.log.attached}
        touched: list[Attached] = []
        for image in offer.images:
            attached = self.log.attached.get(image.channel)
            if attached is None or (ahead and attached.synced):
                continue
            same = attached.digest == image.digest and opened(offer, image.channel)
            if not same and not self.offers.needs(offer, image):
                continue
            if attached.digest != image.digest:
                staged = down.staged.pop(image.channel, None)
                if staged is None and not jump:
                    continue  # I have come to lack it since I asked
                whole = memoryview(staged.memory) if staged is not None else None  # None: my state moved since
                if whole is None or not self._replace(attached, image.channel, whole, image.digest):
                    for other in touched:
                        other.synced = False
                    return
                touched.append(attached)
            elif not attached.synced:
                touched.append(attached)
            attached.synced = attached.digest == image.digest and opened(offer, image.channel)
            attached.misfit = "" if attached.synced else attached.misfit
            self.log.follow(image.channel, later)
        if jump:
            self._jump(offer, was)
        self.ctx.record_due = True
        for image in offer.images:
            if image.channel in self.log.attached and self.log.attached[image.channel].synced:
                self.ctx.notify(ChannelSynced(image.channel, self.log.state.round_of(image.channel)))
        self.start()

    def _jump(self, offer: Offer, was: Mapping[str, bytes]) -> None:
        """Put the offered log in the place of mine, in which the channels had these bases."""
        self._report_loss(offer)
        self.log.learned_run = self.ctx.running_s
        self.log.install(offer.state, offer.chain, offer.totals)
        offered = {i.channel for i in offer.images}
        for channel, attached in self.log.attached.items():
            lacked = channel not in offered and self.log.state.base(channel) != was[channel]
            if lacked or not self.log.is_open(channel):
                attached.synced = False  # the donor does not hold it, or it is of a history that opened it, and is lost
        self.switched()

    def _replace(self, attached: Attached, channel: str, image: memoryview, digest: bytes) -> bool:
        """Another state takes the place of mine; one that I accepted in this slot is set aside first. False: it is of
        another kind, and mine stays."""
        if attached.digest == self.accepted_first():
            self.donations.keep(channel)
        self.log.before_change(channel)
        try:
            attached.state.restore(image)
        except CheckpointError as error:
            self.offers.tell_misfit(channel, str(error))
            return False
        attached.passed.clear()
        attached.digest = digest  # of the very bytes: `Download` has hashed them
        return True

    def _report_loss(self, offer: Offer) -> None:
        # A chain that does not reach back to my depth says nothing of where I stand to it.
        reaches = self.log.state.depth > offer.state.depth - len(offer.chain)
        if self.log.active and reaches and not self._is_ancestor(offer):
            self.ctx.notify(HistoryLost(*self.log.beyond(offer.chain)))

    def receive_no_offer(self, sender: Voter, m: NoOffer) -> None:
        if sender != self.donor or self.busy:
            return
        if self.offers.as_told(sender, self.log.state):
            self.donor = None
        else:
            self._refuse()


def _consistent(step: Step) -> bool:
    if step.entry.kind != ROUND:
        return not step.hashes
    return manifest_hash(step.hashes) == step.entry.manifest
