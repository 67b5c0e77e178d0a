"""The outer half of DiLoCo on one peer: its part in the rounds.

    base    theta of the swarm, as it was when the inner steps began
    local   the parameters, moved by the inner steps                    both are `local_model`'s matter
    d       base - local: the pseudo-gradient

At its sync point a peer offers d to the next round. Once a round counted it, the model becomes the new theta:

    offer ──> wait ──> settle     again until d is counted

Two things can happen meanwhile, and neither loses work or counts it twice (promise P7):

- A round is committed without us: we were late, or joined in the middle. `rebase` goes on from its theta with d as it
  was, for a later round.
- Inner steps go on while d is offered. `grow` offers what has come since along with it, as long as no plan names d;
  after that the new steps are no part of the round, and `settle` keeps them: local := theta_new - (d_now - d).

Either holds only as long as the lease still names the blocks that the work was trained on. With `eager` the inner steps
that go on meanwhile do not begin at local, but where the peer's own part of the mean, d / M, will take theta.

Where the model is cut into `Fragments`, base, local and d are of the whole model as ever, but a round is offered, and
moves, one fragment of them. What its lease tells is counted then, once; the other fragments of d stay, without blocks
of their own, until it is their turn.

(Of an offer that is in a round in part the round says whether it counts, as a whole: see "Not guaranteed" in
docs/protocol.md.)

What is sent of d, after the caller's hook and with what encoding lost of earlier offers, is `outgoing`'s matter; d
itself is as before, and all of it counts as delivered.

Without overlap, and with the whole model in each round, what is offered is all that a round holds of d. It is measured,
looked at and encoded part by part; after that the parameters may change, the offer does not. base is theta's own
memory. d itself is base - local for as long as no step is made, so neither is copied before one is (`resume`), and base
is gone when the round that counts the offer moves theta.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import Tensor

from dlc.comm import vectors
from dlc.comm.encoded import Encoded
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.errors import DlcError, RoundTimeout, UsageError
from dlc.flat import FlatView, finite, parts_of
from dlc.runspec import OuterSpec
from dlc.train.announcement import Announcements
from dlc.train.fragments import Fragments
from dlc.train.local_model import LocalModel
from dlc.train.offers import NotFinite, Offer, Settled, Work, share_of
from dlc.train.outer import OuterState
from dlc.train.outgoing import NOT_FINITE, Hook, Outgoing
from dlc.train.swarm import Position, TrainPeer

WAIT_SLICE_S = 0.1
"""How long a stop can go unnoticed while waiting for a round."""


class OuterLoop:
    """Keeps one model in step with channel `channel` of `peer`. Used from one thread.

    overlap:   with "none" inner steps during a round are an exception, before which `displaced` asks for `resume`; a
               round then takes the memory of its payloads only.
    fragments: into how many the model is cut.
    mixing:    see `LocalModel`, in [0, 1).
    """

    def __init__(
        self,
        peer: TrainPeer,
        view: FlatView,
        *,
        channel: str,
        outer: OuterSpec,
        overlap: str = "none",
        fragments: int = 1,
        mixing: float = 0.0,
        hook: Hook | None = None,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer, self._channel = peer, channel
        self._hook, self.patience_s = hook, patience_s
        self._fragments = Fragments.strided(view.sizes(), fragments) if fragments > 1 else Fragments.whole(view.numel)
        self._eager = overlap == "eager"
        self.share = 1.0
        """Our part of a mean, as it was last: what `eager` foresees."""
        self._whole = fragments == 1 and not mixing
        """A round that counted all inner steps leaves nothing of d."""
        self._lean = overlap == "none" and self._whole
        """d is not kept while it is offered, nor memory for it."""
        self._packed: Tensor | None = None
        """Memory for a fragment of d, while none is offered."""
        self._offer: Offer | None = None
        self.announced = Announcements(peer, channel, patience_s)
        self._outgoing: Outgoing | None = None
        self.displaced = False
        """The parameters belong to an older base than `position`, or d is on its way and not kept: `resume` before the
        next inner step."""
        theta = view.gather(vectors.empty(view.numel))
        self._sound = finite(theta)
        """What the model holds now could be what a run begins from."""
        self.state = OuterState(theta, outer, fragments=self._fragments, layout=view.fingerprint())
        self.model = LocalModel(peer, channel, view, self.state, mixing=mixing, lean=self._lean, clock=clock)
        self._clips = outer.clip == "median"

    @property
    def position(self) -> Position:
        """That of the model."""
        return self.model.position

    def open(
        self,
        *,
        codec: str,
        chunk_elems: int,
        lease_len: int = 0,
        residual: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Position:
        """Attach the state to the channel and load the swarm's theta into the model; blocks until both are done.

        `chunk_elems`: 0 for the run's, or `usual_chunk_elems`. `residual`: see `Outgoing`. UsageError: the parameters
        hold NaN or Inf, and the run might begin from them. After an error another loop may open the channel.
        """
        if not self._sound and not self._peer.position(self._channel).t:
            raise UsageError("the parameters hold NaN or Inf, and a run would begin from them: give a sound model")
        elems = chunk_elems or usual_chunk_elems(self.state.numel, codec)
        self.model.leased = lease_len > 0
        self._outgoing = Outgoing(Grid(self.state.numel, elems, codec), len(self._fragments), self._hook, self._clips)
        self._outgoing.load_residual(residual)
        opened = self._peer.open(
            self._channel, self.state, codec=codec, chunk_elems=elems, lease_len=lease_len, timeout_s=timeout_s
        )
        if not chunk_elems and opened.chunk_elems not in (0, elems):  # an earlier version began it, with its own usual
            self._peer.abandon(self._channel, self.state)
            return self.open(
                codec=codec,
                chunk_elems=opened.chunk_elems,
                lease_len=lease_len,
                residual=residual,
                timeout_s=timeout_s,
            )
        try:
            return self.adopt()
        except BaseException:
            self._peer.abandon(self._channel, self.state)
            raise

    @property
    def outgoing(self) -> Outgoing:
        """What is sent of the pseudo-gradients, and what encoding lost of them."""
        if self._outgoing is None:
            raise DlcError("the channel is not open yet")
        return self._outgoing

    # ---------------------------------------------------------------- between inner steps

    def adopt(self) -> Position:
        """Set the model to the swarm's theta; local progress is dropped."""
        self.announced.retract()
        self.displaced = False
        return self.model.adopt()

    def take_up(self, local: Tensor, of: bytes, work: Work, start: Tensor | None = None) -> bool:
        """Go on from theta with the parameters that `model.local` gave, and what `model.origin.rounded` did as `start`,
        in place of what is here: `of` is the digest of the state where they did, and `work` what is in them that no
        round has counted. Not during an offer.

        False, with the model at theta: that is another by now, or the lease of `work` is gone. CheckpointError, with
        nothing changed: see `LocalModel.check`.
        """
        self.model.check(local)
        if start is not None:
            self.model.check(start)
        position = self.adopt()
        if position.digest != of or not self.model.stands(position, work):
            return False
        self.model.load(local, start)
        return True

    def refresh(self) -> Position:
        """The newest position, with the model at its theta: called where all that was trained is counted."""
        if not self.model.up_to_date():
            if self._whole:
                return self.adopt()
            self._replant(self.model.measure(), Work())  # what is counted already, and not in theta yet
        return self.position

    def strayed(self) -> bool:
        """Where there is nothing to offer: whether the parameters are not where the last round put them. False also
        where rounds leave a part of d."""
        return self._whole and any(bool(part.any()) for part in self._streamed())

    def rebase(self, work: Work) -> bool:
        """Go on from the swarm's newest theta. True: local progress is kept; False: it was dropped."""
        return self._replant(self.model.measure(), work)

    def resume(self, work: Work) -> bool:
        """Where `displaced`, before further inner steps: put the model where they begin, and keep what they need.

        False: there can be none. `work` was dropped, or, with an offer, its round is over, and has to be settled.
        """
        if self._offer is None:
            return self.rebase(work)
        if not self.model.origin.reclaim():
            return False
        d = self.model.measure()
        self._offer, self.displaced = self._offer._replace(d=d), False
        return not self.model.lags or self.model.catch_up(d)

    def _replant(self, d: Tensor, work: Work, mixed: int | None = None) -> bool:
        """See `LocalModel.replant`; what was announced is of another base then."""
        self.announced.retract()
        kept = self.model.replant(d, work, mixed)
        self.displaced = False
        return kept

    # ---------------------------------------------------------------- rounds

    def announce(self, weight: float, work: Work, in_s: float, expected_s: float) -> None:
        """Tell the round after `position`, `in_s` seconds from now, that `offer` will be called with `weight` and
        `work` within about `expected_s` more. Nothing is said where d is kept, or something of it has to be told first.

        It stands until `offer` takes it up, `announced.retract`, or until the model is set to another base.
        """
        if (
            not self._lean
            or self._hook is not None
            or self.waiting
            or self.announced.stands
            or not self.announced.free(0.0)
        ):
            return
        sent = self.outgoing.announced()
        if sent is None:
            return
        self.announced.say(sent, weight, work, self.position.t, in_s, expected_s)

    def offer(self, weight: float, work: Work) -> bool:
        """Freeze d and offer it to the round after `position`, and to no later one.

        False: its lease is gone, d is dropped and the model is at theta.

        NotFinite: d holds NaN or Inf. UsageError: the hook made nothing of it that can be offered. In either case, and
        where the hook raises, or anything else before d is offered, the model is at theta. Where something is raised
        after that, this loop is `waiting`, and the offer stands.
        """
        try:
            return self._offer_lean(weight, work) if self._lean else self._offer_kept(weight, work)
        except BaseException:
            if not self.waiting:
                self.adopt()
            raise

    def _offer_kept(self, weight: float, work: Work) -> bool:
        """Where d is kept, as steps may be made meanwhile."""
        d = self.model.measure()
        if not finite(d):
            raise NotFinite(NOT_FINITE)
        if not self._stands(work):
            self.model.reuse(d)
            self.adopt()
            return False
        hooked = self.outgoing.hooked(d)
        self.displaced = False
        self._contribute(d, hooked, weight, work)
        return True

    def _offer_lean(self, weight: float, work: Work) -> bool:
        """Where no step is made meanwhile."""
        if not self._stands(work):
            self.adopt()
            return False
        taken = self.announced.taken_up(weight, work)
        while not self.announced.free(WAIT_SLICE_S):
            pass  # it was of other work, and its round goes on without us
        sent, norm = self.outgoing.streamed(self._parts(), taken[0] if taken is not None else None)
        self.displaced = True
        self.model.origin.spend(by=lambda: self._peer.counts(self._channel))
        if taken is None:
            self._send(None, sent, 0, norm, weight, work)
        else:
            self._offer = Offer(taken[1], 0, None, sent, work)
            self.announced.final()
        return True

    def _parts(self) -> Iterable[Tensor]:
        """What is to be offered of d, one after the other."""
        if self._hook is None:
            return self._streamed()
        d = self.model.measure()
        if not finite(d):
            raise NotFinite(NOT_FINITE)
        elems, _ = self.outgoing.cut(d.device)
        return parts_of(self.outgoing.hooked(d), elems)

    def _streamed(self) -> Iterable[Tensor]:
        """d, one part after the other."""
        origin = self.model.origin
        return origin.parts(*self.outgoing.cut(origin.device))

    def _contribute(self, d: Tensor, hooked: Tensor, weight: float, work: Work) -> None:
        """Offer what the hook made of d, or its fragment of the next round; the caller's d is taken."""
        fragment = self._fragments.of_round(self.position.t + 1)
        if len(self._fragments) > 1:
            packed = self._packed if self._packed is not None else vectors.empty(self._fragments.packed_numel)
            self._fragments.take(d, fragment, packed)
            hooked = packed if hooked is d else self._fragments.take(hooked, fragment)
            self.model.reuse(d)
            self._packed, d = None, packed
        sent, norm = self.outgoing.whole(hooked, fragment)
        self._send(d, sent, fragment, norm, weight, work)
        if self._eager:
            self.model.foresee(fragment, hooked * self.share)

    def _send(
        self, d: Tensor | None, sent: Tensor | Encoded, fragment: int, norm: float, weight: float, work: Work
    ) -> None:
        try:
            pending = self._peer.contribute(
                self._channel,
                sent,
                weight=weight,
                upto=work.upto,
                norm=norm,
                after=self.position.t,
                patience_s=self.patience_s,
            )
        except BaseException:
            self.outgoing.over(sent)
            raise
        self._offer = Offer(pending, fragment, d, sent, work)

    def _done_with(self, offer: Offer) -> None:
        """The memory of an offer that nobody reads any more."""
        if len(self._fragments) > 1:
            self._packed = offer.d
        elif offer.d is not None:
            self.model.reuse(offer.d)

    def wait(self, timeout_s: float) -> bool:
        """Whether the offer's round is over."""
        assert self._offer is not None
        try:
            self._offer.pending.wait(timeout_s)
        except RoundTimeout:
            return False
        return True

    def grow(self, weight: float, work: Work) -> bool:
        """Offer the inner steps done since along with the rest; where a plan names the old offer, that one stands.

        False: the lease is gone, all of d is dropped and nothing is offered. NotFinite: d holds NaN or Inf now, and the
        old offer stands. All that takes time is done before the old offer is taken back: a plan that names it meanwhile
        would be in vain.
        """
        assert self._offer is not None
        d = self.model.measure()
        if not finite(d):
            self.model.reuse(d)
            raise NotFinite("the inner steps since the offer ended in values that are not finite")
        hooked, stands = self.outgoing.hooked(d), self._stands(work)
        if not self._peer.withdraw(self._channel):
            self.model.reuse(d)
            return True
        before, self._offer = self._offer, None
        self.outgoing.over(before.sent)
        self._done_with(before)
        if stands:
            self._contribute(d, hooked, weight, work)
        else:
            self.adopt()
        return stands

    def put_back(self) -> None:
        """Set the model to what is offered: inner steps made since then are undone, and in other fragments also those
        before."""
        assert self._offer is not None and self._offer.d is not None, "steps are made after `resume`"
        self.model.put_back(self._offer.d, self._offer.fragment)
        self.displaced = False

    @property
    def waiting(self) -> bool:
        """An offer is on its way, or its round over and not settled."""
        return self._offer is not None

    @property
    def offered(self) -> Work:
        """What the present offer was trained on."""
        return self._offer.work if self._offer is not None else Work()

    def settle(self, work: Work) -> Settled:
        """After `wait` said True. `work`: all that was trained and not counted before, the offered part included.

        What was not counted is kept if its lease stands, and the model goes on from it once `resume` was called.
        """
        assert self._offer is not None
        offer, self._offer = self._offer, None
        pending, offered = offer.pending, offer.work
        report, counted = pending.report, pending.counted
        self.outgoing.over(offer.sent, pending.included if counted else (), offer.fragment)
        if pending.misfit:
            self._done_with(offer)
            raise UsageError(
                f"the round averaged {pending.misfit}, but this peer offers {self.outgoing.grid}: "
                "all peers must give the same codec and chunk_elems"
            )
        more = len(work.blocks) > len(offered.blocks)
        if counted and report is not None:
            rest = Work(work.blocks[len(offered.blocks) :], work.upto)
            self.share = share_of(report, self._peer.id)
            if more or not self._whole:
                kept = self._go_on(offer, rest)
                self._done_with(offer)
            else:
                self._done_with(offer)
                kept = self.adopt() is not None
        elif (report is not None and report.refused(self._peer.id)) or (
            report is None and not pending.overtaken and not self.model.leased
        ):
            self._done_with(offer)
            kept = False
            self.adopt()
        elif more or not self._whole or self._eager:
            kept = self._replant(self.model.measure(), work)
            self._done_with(offer)
        else:
            # Not the model yet, nor base: d may be offered again as it is.
            self._done_with(offer)
            self.model.lag()
            self.displaced = True
            kept = self.model.stands(self.position, work)
            if not kept:
                self.adopt()
        return Settled(report, counted, kept)

    def _go_on(self, offer: Offer, rest: Work) -> bool:
        """From the theta that has the offer in it. False: the lease of `rest` is gone, and it was dropped."""
        if offer.d is None:
            raise UsageError("inner steps were made while a contribution was on its way without overlap: wait for it")
        left = self.model.measure()
        self._fragments.add(offer.d, offer.fragment, left, -1.0)
        return self._replant(left, rest, offer.fragment)

    def give_up(self) -> None:
        """Nothing more will be offered: the model is set to theta, and the peer may still send the frozen d."""
        self._offer = None
        self.adopt()

    def _stands(self, work: Work) -> bool:
        return self.model.stands(self.model.newest(), work)
