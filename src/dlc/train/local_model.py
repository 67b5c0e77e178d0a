"""One peer's model between rounds: which theta of the swarm its inner steps began at, and what they have made of it.

    base    theta of the swarm, as it was when the inner steps began: that of `position`
    local   the parameters, moved by the inner steps
    d       base - local: the pseudo-gradient

The swarm may go on without us. `replant` then sets base := theta_new, local := theta_new - d, so that d stays what it
was, and is offered to a later round. It does so only as long as the lease still names the blocks that the work was
trained on: otherwise somebody else trains them now, and it is dropped. `lag` leaves base and local as they are.

The overlay (`foresee`) is what the model was moved by where the peer's own part of the mean will take theta, in advance
of the round that does (eager updates, arXiv:2502.12996). It is no part of d, and gone when the round is over: the mean
has come in its place. The state that all peers share moves by means only.

With `mixing` a > 0 the model does not become local' = theta_new - d after a round that counted us, but stays a part of
the way back, at (1 - a) local' + a local (Streaming DiLoCo, arXiv:2501.18512): what that leaves undone is part of d
again. local is without the overlay here, too: with it, d would take back a part of what the round has brought to all.

Parameters of fewer bits than fp32 hold a rounded theta. d is measured from what they did hold, not from theta (`start`
of `Origin`), so the rounding is no part of it and theta serves as the master copy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.errors import CheckpointError, DlcError
from dlc.flat import FlatView, finite
from dlc.train.offers import Work
from dlc.train.origin import Origin
from dlc.train.outer import OuterState
from dlc.train.swarm import Position, TrainPeer

POLL_S = 0.2
"""Between two looks whether a round passed without us: short against a round, long against the cost of looking."""


class Overlay(NamedTuple):
    """What was added to the parameters in advance of a round."""

    fragment: int
    moved: Tensor
    """Packed."""


class LocalModel:
    """Of channel `channel` of `peer`, whose outer state is `state`. Used from one thread.

    mixing: see above, in [0, 1).
    lean:   memory for d is not kept from one use to the next.
    """

    def __init__(
        self,
        peer: TrainPeer,
        channel: str,
        view: FlatView,
        state: OuterState,
        *,
        mixing: float,
        lean: bool,
        clock: Callable[[], float],
    ) -> None:
        self._peer, self._channel, self._clock = peer, channel, clock
        self._state, self._fragments, self._mixing, self._lean = state, state.fragments, mixing, lean
        self.origin = Origin(view, state)
        self.leased = False
        """Work counts only for who has the lease of its blocks."""
        self.lags = False
        """base is older than `position`."""
        self._position: Position | None = None
        self._poll_at = -math.inf
        self._overlay: Overlay | None = None
        self._spare: Tensor | None = None
        """Memory for d."""

    # ---------------------------------------------------------------- where the swarm is

    @property
    def position(self) -> Position:
        """The position that base belongs to; where it `lags`, a later one."""
        if self._position is None:
            raise DlcError("the channel is not open yet")
        return self._position

    def newest(self) -> Position:
        """Where the swarm stands, whatever base is: for its lease."""
        return self._peer.position(self._channel)

    def moved(self, at_once: bool = False) -> bool:
        """Whether theta changed under our inner steps. Cheap: but for `at_once`, most calls do not ask the peer."""
        now = self._clock()
        if now < self._poll_at and not at_once:
            return False
        self._poll_at = now + POLL_S
        return self._differs(self.newest())

    def up_to_date(self) -> bool:
        """Whether theta is that of `position` still, which then is the newest in all else, too."""
        newest = self.newest()
        if self._differs(newest):
            return False
        self._position = newest
        return True

    def stands(self, position: Position, work: Work) -> bool:
        """Whether `work` is still ours to offer after `position`."""
        if not self.leased:
            return True
        lease = position.lease
        return lease is not None and tuple(lease.take(len(work.blocks))[0]) == tuple(work.blocks)

    def _differs(self, newest: Position) -> bool:
        if not newest.digest:
            return False  # being fetched again: nothing to go on from yet
        return newest.t != self.position.t or newest.digest != self.position.digest

    # ---------------------------------------------------------------- d

    def measure(self) -> Tensor:
        """d without the overlay, in the spare memory, which is the caller's until `reuse`."""
        d = self.origin.measure(self._vector())
        if self._overlay is not None:
            self._fragments.add(self._overlay.moved, self._overlay.fragment, d)
        return d

    def reuse(self, d: Tensor) -> None:
        """The memory of what `measure` gave: nobody reads it any more."""
        if not self._lean:
            self._spare = d

    def put_back(self, packed: Tensor, fragment: int) -> None:
        """Set the parameters to where d is `packed` in this fragment, and zero in others."""
        d = self._vector()
        if len(self._fragments) > 1:
            d.zero_()
        self._fragments.put(packed, fragment, d)
        self._place(d)
        self.reuse(d)

    def _vector(self) -> Tensor:
        """The spare one, or a new one."""
        d = self._spare if self._spare is not None else vectors.empty(self._fragments.numel)
        self._spare = None
        return d

    def _place(self, d: Tensor) -> None:
        """local := base - d, and the overlay; d is overwritten."""
        if self._overlay is not None:
            self._fragments.add(self._overlay.moved, self._overlay.fragment, d, -1.0)
        self.origin.place(d)

    # ---------------------------------------------------------------- base

    def adopt(self) -> Position:
        """base := theta_new, local := theta_new."""
        self._overlay = None
        self._position = self._pull()
        self.origin.load()
        return self._position

    def replant(self, d: Tensor, work: Work, mixed: int | None = None) -> bool:
        """base := theta_new, local := theta_new - d; d is to be reused. False: the lease of `work` is gone, d dropped.

        `mixed`: the fragment that the round moved, of which `mixing` keeps a part where it is.
        """
        local = self._without_overlay() if mixed is not None and self._mixing else None
        self._overlay = None
        self._position = self._pull()
        base = self.origin.base
        kept = self.stands(self._position, work)
        if kept and local is not None and mixed is not None:
            for a, b, _ in self._fragments.pieces(mixed):
                d[a:b].lerp_(base[a:b] - local[a:b], self._mixing)
        if kept:
            self._place(d)
        else:
            self.origin.load()
        self.reuse(d)
        return kept

    def lag(self) -> None:
        """position := the newest, with base and local as they were: d may be offered again as it is, bit for bit."""
        self.origin.reclaim()
        self._position = self.newest()
        self.lags = True

    def catch_up(self, d: Tensor) -> bool:
        """Where it `lags`, and `d` was measured: base := theta, local := theta - d. False: theta has moved on since
        `position`, too."""
        pulled, again = self._pull(), self._vector().copy_(d)
        self._place(again)
        self.reuse(again)
        return (pulled.t, pulled.digest) == (self.position.t, self.position.digest)

    def _pull(self) -> Position:
        """base := the swarm's theta. Where it stands is asked before and after, so that the two belong together."""
        while True:
            position = self.newest()
            self.origin.renew()
            after = self.newest()
            if (after.head, after.digest) == (position.head, position.digest):
                self.lags = False
                return after

    # ---------------------------------------------------------------- in advance of a round

    def foresee(self, fragment: int, mean: Tensor) -> None:
        """Move this fragment of the model to where the round after `position` takes theta, were that its mean (packed):
        the overlay."""
        ahead = torch.empty_like(mean)
        if not self._state.foresee(self.position.t + 1, mean, ahead):
            return  # that round is past: what became of the offer is learned by waiting for it
        local = self.origin.gather()
        before = self._fragments.take(local, fragment).clone()
        self._fragments.put(ahead, fragment, local)
        try:
            moved = self._fragments.take(self.origin.scatter(local), fragment).sub_(before)
        except BaseException:  # what is moved in part, and by how much is not known, would be taken for inner steps
            self._fragments.put(before, fragment, local)
            self.origin.scatter(local)
            raise
        self._overlay = Overlay(fragment, moved if self._overlay is None else moved.add_(self._overlay.moved))

    def _without_overlay(self) -> Tensor:
        """A copy of the parameters, as far as the inner steps made them."""
        local = self.origin.gather()
        if self._overlay is not None:
            self._fragments.add(self._overlay.moved, self._overlay.fragment, local, -1.0)
        return local

    # ---------------------------------------------------------------- elsewhere

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Meanwhile the model is at theta of `position`; then it has all of its inner steps again, bit for bit."""
        local = self.origin.gather()
        self.origin.show()
        try:
            yield
        finally:
            self.origin.scatter(local)

    def local(self) -> Tensor | None:
        """A copy of the parameters, as far as the inner steps made them, to go on from elsewhere with `load`. None
        where theta has moved since: what of d is in that is not known yet."""
        if self.lags or self._differs(self.newest()):
            return None
        return self._without_overlay()

    def check(self, local: Tensor) -> None:
        """CheckpointError: what `local`, or `Origin.rounded`, gave is of another model, or not finite."""
        if local.dtype != torch.float32 or local.shape != (self._fragments.numel,) or not finite(local):
            raise CheckpointError(
                f"the saved parameters are {local.dtype} {tuple(local.shape)}, this model needs finite float32 "
                f"({self._fragments.numel},): they belong to another model, or are damaged"
            )

    def load(self, local: Tensor, start: Tensor | None) -> None:
        """Take back what `local` gave, and what `Origin.rounded` did, with base as it was then."""
        self.origin.scatter(local.clone())
        if start is not None:
            self.origin.set_rounded(start)
