"""The outer half of DiLoCo on one peer: what happens to a model between its inner steps.

    base    theta of the swarm, as it was when the inner steps began
    local   the parameters, moved by the inner steps
    d       base - local: the pseudo-gradient

At its sync point a peer offers d to the next round. Once a round counted it, the model becomes the new theta:

    offer ──> wait ──> settle     again until d is counted

Two things can happen meanwhile, and neither loses work or counts it twice (promise P7):

- A round is committed without us: we were late, or joined in the middle. `rebase` sets base := theta_new,
  local := theta_new - d, so that d stays what it was, and is offered to a later round.
- Inner steps go on while d is offered. `grow` offers what has come since along with it, as long as no plan names d;
  after that the new steps are no part of the round, and `settle` keeps them: local := theta_new - (d_now - d).

With `eager` the inner steps that go on meanwhile do not begin at local, but where the peer's own part of the mean,
d / M, will take theta (eager updates, arXiv:2502.12996). What that moved the model by, the overlay, is no part of d,
and gone when the round is over: the mean has come in its place. The state that all peers share moves by means only.

With `mixing` a > 0 the model does not become local' = theta_new - (d_now - d) after a round, but stays a part of the
way back, at (1 - a) local' + a local (Streaming DiLoCo, arXiv:2501.18512): what that leaves undone is part of d again.
local is without the overlay here, too: with it, d would take back a part of what the round has brought to all.

Where the model is cut into `Fragments`, base, local and d are of the whole model as ever, but a round is offered, and
moves, one fragment of them. What its lease tells is counted then, once; the other fragments of d stay, without blocks
of their own, until it is their turn.

(Of an offer that is in a round in part the round says whether it counts, as a whole: see "Not guaranteed" in
docs/protocol.md.)

Either holds only as long as the lease still names the blocks that the work was trained on: otherwise somebody else
trains them now, and it is dropped.

Parameters of fewer bits than fp32 hold a rounded theta. d is measured from what they did hold, not from theta, so the
rounding is no part of it and theta serves as the master copy.

What is sent of d, after the caller's hook and with what encoding lost of earlier offers, is `outgoing`'s matter; d
itself is as before, and all of it counts as delivered.

Without overlap, and with the whole model in each round, what is offered is all that a round holds of d. It is measured,
looked at and encoded part by part; after that the parameters may change, the offer does not. base is theta's own
memory. d itself is base - local for as long as no step is made, so neither is copied before one is (`resume`), and base
is gone when the round that counts the offer moves theta.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.encoded import Encoded
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.errors import CheckpointError, DlcError, RoundTimeout, UsageError
from dlc.flat import FlatView, finite, parts_of
from dlc.runspec import OuterSpec
from dlc.train.announcement import Announcements
from dlc.train.fragments import Fragments
from dlc.train.offers import NotFinite, Offer, Overlay, Settled, Work, share_of
from dlc.train.origin import Origin
from dlc.train.outer import OuterState
from dlc.train.outgoing import NOT_FINITE, Hook, Outgoing
from dlc.train.swarm import Position, TrainPeer

POLL_S = 0.2
"""Between two looks whether a round passed without us: short against a round, long against the cost of looking."""
WAIT_SLICE_S = 0.1
"""How long a stop can go unnoticed while waiting for a round."""


class OuterLoop:
    """Keeps one model in step with channel `channel` of `peer`. Used from one thread.

    overlap:   with "none" inner steps during a round are an exception, before which `displaced` asks for `resume`; a
               round then takes the memory of its payloads only.
    fragments: into how many the model is cut.
    mixing:    see above, in [0, 1).
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
        self._peer, self._channel, self._clock = peer, channel, clock
        self._hook, self.patience_s = hook, patience_s
        self._fragments = Fragments.strided(view.sizes(), fragments) if fragments > 1 else Fragments.whole(view.numel)
        self._eager = overlap == "eager"
        self.share = 1.0
        """Our part of a mean, as it was last: what `eager` foresees."""
        self._overlay: Overlay | None = None
        self._mixing = mixing
        self._whole = fragments == 1 and not mixing
        """A round that counted all inner steps leaves nothing of d."""
        self._lean = overlap == "none" and self._whole
        """d is not kept while it is offered, nor memory for it."""
        self._spare: Tensor | None = None
        """Memory for d."""
        self._packed: Tensor | None = None
        """Memory for a fragment of d, while none is offered."""
        self._position: Position | None = None
        self._leased = False
        self._poll_at = -math.inf
        self._offer: Offer | None = None
        self.announced = Announcements(peer, channel, patience_s)
        self._outgoing: Outgoing | None = None
        self._missed = False
        """No round counted the last offer, and base is older than `position`: if no step comes between, the same d is
        offered again, bit for bit."""
        self.displaced = False
        """The parameters belong to an older base than `position`, or d is on its way and not kept: `resume` before the
        next inner step."""
        theta = view.gather(vectors.empty(view.numel))
        self._sound = finite(theta)
        """What the model holds now could be what a run begins from."""
        self.state = OuterState(theta, outer, fragments=self._fragments, layout=view.fingerprint())
        self._origin = Origin(view, self.state)
        self._clips = outer.clip == "median"

    @property
    def position(self) -> Position:
        """The position that `base` belongs to; after an offer that no round counted, the one after it."""
        if self._position is None:
            raise DlcError("the channel is not open yet")
        return self._position

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

        `chunk_elems`: 0 for `usual_chunk_elems`. `residual`: see `Outgoing`. UsageError: the parameters hold NaN or
        Inf, and the run might begin from them. After an error another loop may open the channel.
        """
        if not self._sound and not self._peer.position(self._channel).t:
            raise UsageError("the parameters hold NaN or Inf, and a run would begin from them: give a sound model")
        chunk_elems = chunk_elems or usual_chunk_elems(self.state.numel)
        self._leased = lease_len > 0
        grid = Grid(self.state.numel, chunk_elems, codec)
        self._outgoing = Outgoing(grid, len(self._fragments), self._hook, self._clips)
        self._outgoing.load_residual(residual)
        self._peer.open(
            self._channel, self.state, codec=codec, chunk_elems=chunk_elems, lease_len=lease_len, timeout_s=timeout_s
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

    def local(self) -> Tensor | None:
        """A copy of the parameters, as far as the inner steps made them, to go on from elsewhere with `take_up`. None
        where theta has moved since: what of d is in that is not known yet."""
        if self._missed or self._differs(self._peer.position(self._channel)):
            return None
        return self._without_overlay()

    def start(self) -> Tensor | None:
        """A copy of what the parameters held where the inner steps began, for `take_up`; None where that is theta.

        Parameters of fewer bits than fp32 did not hold theta, and from what they held `rebase` and fragments keep d."""
        return self._origin.rounded()

    def check_local(self, local: Tensor) -> None:
        """CheckpointError: what `local`, or `start`, gave is of another model, or not finite."""
        if local.dtype != torch.float32 or local.shape != (self._fragments.numel,) or not finite(local):
            raise CheckpointError(
                f"the saved parameters are {local.dtype} {tuple(local.shape)}, this model needs finite float32 "
                f"({self._fragments.numel},): they belong to another model, or are damaged"
            )

    def take_up(self, local: Tensor, of: bytes, work: Work, start: Tensor | None = None) -> bool:
        """Go on from theta with the parameters that `local` gave, and what `start` did, in place of what is here: `of`
        is the digest of the state where they did, and `work` what is in them that no round has counted. Not during an
        offer.

        False, with the model at theta: that is another by now, or the lease of `work` is gone. CheckpointError, with
        nothing changed: see `check_local`.
        """
        self.check_local(local)
        if start is not None:
            self.check_local(start)
        position = self.adopt()
        if position.digest != of or not self._stands(position, work):
            return False
        self._origin.scatter(local.clone())
        if start is not None:
            self._origin.set_rounded(start)
        return True

    # ---------------------------------------------------------------- between inner steps

    def adopt(self) -> Position:
        """Set the model to the swarm's theta; local progress is dropped."""
        self.announced.retract()
        self.displaced, self._overlay = False, None
        self._position = self._pull()
        self._origin.load()
        return self._position

    def refresh(self) -> Position:
        """The newest position, with the model at its theta: called where all that was trained is counted."""
        newest = self._peer.position(self._channel)
        if self._differs(newest):
            if self._whole:
                return self.adopt()
            self._replant(self._measure(), Work())  # what is counted already, and not in theta yet
            return self.position
        self._position = newest
        return newest

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Meanwhile the model is at theta of `position`; then it has all of its inner steps again, bit for bit."""
        local = self._origin.gather()
        self._origin.show()
        try:
            yield
        finally:
            self._origin.scatter(local)

    def newest(self) -> Position:
        """Where the swarm stands, whatever the model's base is: for its lease."""
        return self._peer.position(self._channel)

    def moved(self, at_once: bool = False) -> bool:
        """Whether theta changed under our inner steps. Cheap: but for `at_once`, most calls do not ask the peer."""
        now = self._clock()
        if now < self._poll_at and not at_once:
            return False
        self._poll_at = now + POLL_S
        return self._differs(self._peer.position(self._channel))

    def strayed(self) -> bool:
        """Where there is nothing to offer: whether the parameters are not where the last round put them. False also
        where rounds leave a part of d."""
        parts = self._origin.parts(*self.outgoing.cut(self._origin.device)) if self._whole else ()
        return any(bool(part.any()) for part in parts)

    def rebase(self, work: Work) -> bool:
        """Go on from the swarm's newest theta. True: local progress is kept; False: it was dropped."""
        return self._replant(self._measure(), work)

    def resume(self, work: Work) -> bool:
        """Where `displaced`, before further inner steps: put the model where they begin, and keep what they need.

        False: there can be none. `work` was dropped, or, with an offer, its round is over, and has to be settled.
        """
        if self._offer is None:
            return self.rebase(work)
        if not self._origin.reclaim():
            return False
        d = self._measure()
        self._offer, self.displaced = self._offer._replace(d=d), False
        if not self._missed:
            return True
        pulled, self._spare = self._pull(), self._vector().copy_(d)
        self._place(self._spare)
        return (pulled.t, pulled.digest) == (self.position.t, self.position.digest)

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
        d = self._measure()
        if not finite(d):
            raise NotFinite(NOT_FINITE)
        if not self._stands(self._peer.position(self._channel), work):
            self._spare = d
            self.adopt()
            return False
        hooked = self.outgoing.hooked(d)
        self.displaced = False
        self._contribute(d, hooked, weight, work)
        return True

    def _offer_lean(self, weight: float, work: Work) -> bool:
        """Where no step is made meanwhile."""
        if not self._stands(self._peer.position(self._channel), work):
            self.adopt()
            return False
        taken = self.announced.taken_up(weight, work)
        while not self.announced.free(WAIT_SLICE_S):
            pass  # it was of other work, and its round goes on without us
        sent, norm = self.outgoing.streamed(self._parts(), taken[0] if taken is not None else None)
        self.displaced = True
        self._origin.spend(by=lambda: self._peer.counts(self._channel))
        if taken is None:
            self._send(None, sent, 0, norm, weight, work)
        else:
            self._offer = Offer(taken[1], 0, None, sent, work)
            self.announced.final()
        return True

    def _parts(self) -> Iterable[Tensor]:
        """What is to be offered of d, one after the other."""
        if self._hook is None:
            return self._origin.parts(*self.outgoing.cut(self._origin.device))
        d = self._measure()
        if not finite(d):
            raise NotFinite(NOT_FINITE)
        elems, _ = self.outgoing.cut(d.device)
        return parts_of(self.outgoing.hooked(d), elems)

    def _contribute(self, d: Tensor, hooked: Tensor, weight: float, work: Work) -> None:
        """Offer what the hook made of d, or its fragment of the next round; the caller's d is taken."""
        fragment = self._fragments.of_round(self.position.t + 1)
        if len(self._fragments) > 1:
            packed = self._packed if self._packed is not None else vectors.empty(self._fragments.packed_numel)
            self._fragments.take(d, fragment, packed)
            hooked = packed if hooked is d else self._fragments.take(hooked, fragment)
            self._packed, self._spare, d = None, d, packed
        sent, norm = self.outgoing.whole(hooked, fragment)
        self._send(d, sent, fragment, norm, weight, work)
        if self._eager:
            self._foresee(fragment, hooked)

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

    def _foresee(self, fragment: int, offered: Tensor) -> None:
        """Put the offered fragment of the model where our part of the mean will take theta."""
        ahead = torch.empty_like(offered)
        if not self.state.foresee(self.position.t + 1, offered * self.share, ahead):
            return  # that round is past: what became of the offer is learned by waiting for it
        local = self._origin.gather()
        before = self._fragments.take(local, fragment).clone()
        self._fragments.put(ahead, fragment, local)
        try:
            moved = self._fragments.take(self._origin.scatter(local), fragment).sub_(before)
        except BaseException:  # what is moved in part, and by how much is not known, would be taken for inner steps
            self._fragments.put(before, fragment, local)
            self._origin.scatter(local)
            raise
        self._overlay = Overlay(fragment, moved if self._overlay is None else moved.add_(self._overlay.moved))

    def _done_with(self, offer: Offer) -> None:
        """The memory of an offer that nobody reads any more."""
        if len(self._fragments) > 1:
            self._packed = offer.d
        elif not self._lean:
            self._spare = offer.d

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
        d = self._measure()
        if not finite(d):
            self._spare = d
            raise NotFinite("the inner steps since the offer ended in values that are not finite")
        hooked, stands = self.outgoing.hooked(d), self._stands(self._peer.position(self._channel), work)
        if not self._peer.withdraw(self._channel):
            self._spare = d
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
        d = self._vector()
        if len(self._fragments) > 1:
            d.zero_()
        self._fragments.put(self._offer.d, self._offer.fragment, d)
        if self._overlay is not None:
            self._shift(d, *self._overlay, -1.0)
        self._place(d)
        self._spare = d

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
            report is None and not pending.overtaken and not self._leased
        ):
            self._done_with(offer)
            kept = False
            self.adopt()
        elif more or not self._whole or self._eager:
            kept = self._replant(self._measure(), work)
            self._done_with(offer)
        else:
            # Not the model yet, nor base: d may be offered again as it is.
            self._done_with(offer)
            self._origin.reclaim()
            self._position = self._peer.position(self._channel)
            self._missed = self.displaced = True
            kept = self._stands(self._position, work)
            if not kept:
                self.adopt()
        return Settled(report, counted, kept)

    def _go_on(self, offer: Offer, rest: Work) -> bool:
        """From the theta that has the offer in it; as `_replant`."""
        if offer.d is None:
            raise UsageError("inner steps were made while a contribution was on its way without overlap: wait for it")
        left = self._measure()
        self._shift(left, offer.fragment, offer.d, -1.0)
        return self._replant(left, rest, offer.fragment)

    def give_up(self) -> None:
        """Nothing more will be offered: the model is set to theta, and the peer may still send the frozen d."""
        self._offer = None
        self.adopt()

    # ---------------------------------------------------------------- inside

    def _measure(self) -> Tensor:
        """start - local without the overlay, in the spare vector, which is the caller's then."""
        d = self._origin.measure(self._vector())
        if self._overlay is not None:
            self._shift(d, *self._overlay, 1.0)
        return d

    def _without_overlay(self) -> Tensor:
        """A copy of the parameters, as far as the inner steps made them."""
        local = self._origin.gather()
        if self._overlay is not None:
            self._shift(local, *self._overlay, -1.0)
        return local

    def _vector(self) -> Tensor:
        """The spare one, or a new one."""
        d = self._spare if self._spare is not None else vectors.empty(self._fragments.numel)
        self._spare = None
        return d

    def _shift(self, flat: Tensor, fragment: int, packed: Tensor, sign: float) -> None:
        """Add a fragment to its places in a flat vector, or subtract it."""
        for a, b, at in self._fragments.pieces(fragment):
            flat[a:b].add_(packed[at : at + b - a], alpha=sign)

    def _replant(self, d: Tensor, work: Work, mixed: int | None = None) -> bool:
        """base := theta_new, local := theta_new - d; d becomes spare. False: the lease of `work` is gone, d dropped.

        `mixed`: the fragment that the round moved, of which `mixing` keeps a part where it is.
        """
        local = self._without_overlay() if mixed is not None and self._mixing else None
        self.announced.retract()
        self._overlay = None
        self._position = self._pull()
        base = self._origin.base
        kept = self._stands(self._position, work)
        if kept and local is not None and mixed is not None:
            for a, b, _ in self._fragments.pieces(mixed):
                d[a:b].lerp_(base[a:b] - local[a:b], self._mixing)
        if kept:
            self._place(d)
        else:
            self._origin.load()
            self.displaced = False
        self._spare = None if self._lean else d
        return kept

    def _pull(self) -> Position:
        """base := the swarm's theta. Where it stands is asked before and after, so that the two belong together."""
        while True:
            position = self._peer.position(self._channel)
            self._origin.renew()
            after = self._peer.position(self._channel)
            if (after.head, after.digest) == (position.head, position.digest):
                self._missed = False
                return after

    def _place(self, d: Tensor) -> None:
        """local := base - d; d is overwritten."""
        self._origin.place(d)
        self.displaced = False

    def _stands(self, position: Position, work: Work) -> bool:
        if not self._leased:
            return True
        lease = position.lease
        return lease is not None and tuple(lease.take(len(work.blocks))[0]) == work.blocks

    def _differs(self, newest: Position) -> bool:
        if not newest.digest:
            return False  # being fetched again: nothing to go on from yet
        return newest.t != self.position.t or newest.digest != self.position.digest
