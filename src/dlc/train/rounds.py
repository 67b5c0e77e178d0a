"""The strategy "diloco": pseudo-gradients of H inner steps, averaged over all peers in rounds (arXiv:2311.08105).

    inner_phase ──> exchange ──> inner_phase ...        what happens in and between rounds: `phases`
                                                        what a round does to the model:     `outer_loop`, `local_model`

It keeps all promises: rounds are entries of the log, the outer state has the same bits on all peers, what a peer
trained is counted once.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dlc.train.offers import NotFinite
from dlc.train.others import Others
from dlc.train.outer_loop import OuterLoop
from dlc.train.phases import Phases
from dlc.train.progress import Progress
from dlc.train.rng import load_random_state, random_state
from dlc.train.saves import Local, Saved
from dlc.train.scalars import saved_share
from dlc.train.strategy import CHANNEL, Parts
from dlc.train.swarm import Frozen, Position

log = logging.getLogger(__name__)

_PARAMETERS, _HELD, _SHARE = "parameters", "held", "share"


class Rounds:
    """See `strategy.Strategy`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._finished = False
        self._held: list[int] = []
        """What `phases.held` had at the end, before it was dropped."""
        self._at_end: Tensor | None = None
        """What `_ahead_of_theta` gave before the model was set to theta of that same round, when all was trained."""
        spec, peer, engine, clock = parts.spec, parts.peer, parts.engine, parts.clock
        self.outer = OuterLoop(
            peer,
            engine.view,
            channel=CHANNEL,
            outer=spec.outer.ending(spec.rounds),
            fragments=spec.fragments,
            overlap=spec.overlap,
            mixing=spec.mixing,
            clock=clock,
        )
        self.phases = Phases(
            spec,
            self.outer,
            parts.source,
            Others(peer.members, clock),
            parts.tell,
            engine.inner_loop,
            engine.batch_size,
            clock,
            parts.calls,
        )

    @property
    def position(self) -> Position:
        return self.outer.position

    def newest(self) -> Position:
        return self.outer.model.newest()

    def open(self, saved: Saved | None) -> Position:
        spec = self._parts.spec
        if saved is not None:
            done, share = Progress.of(saved.own), saved_share(saved.own.get(_SHARE, self.outer.share))
            if _PARAMETERS in saved.own:
                self.outer.model.check(saved.own[_PARAMETERS])
            self.outer.state.restore(saved.image, any_end=saved.spec != spec)
            self.phases.inner.load(saved.inner)
            load_random_state(saved.rng, self._parts.engine.device)
        position = self.outer.open(
            codec=spec.codec,
            chunk_elems=spec.chunk_elems,
            lease_len=spec.blocks_per_lease,
            residual=saved.residual if saved is not None else None,
        )
        return position if saved is None else self._take_up(saved, done, share)

    def _take_up(self, saved: Saved, done: Progress, share: float) -> Position:
        """What a checkpoint has of this peer alone, as far as it is of use: where the swarm has gone on, or the samples
        are another's now, the model stays at theta."""
        spec, own, phases = self._parts.spec, saved.own, self.phases
        mine, phases.ahead = saved.peer in ("", self._parts.peer.id), saved.ahead
        if mine:
            self.outer.share = share
        held = own[_HELD].tolist() if _HELD in own else [1]
        if _PARAMETERS in own and mine and self.outer.take_up(own[_PARAMETERS], saved.digest, done.work):
            phases.take_up(done, own)
            if _HELD in own:
                phases.held.load(held)
            return self.position
        if len(done):
            phases.ahead = True
            gone = "the run has gone on since, or their samples were given to others"
            why = gone if mine else "the checkpoint is another peer's"
            log.info("%d inner steps that were ahead of round %d are lost: %s", len(done), saved.t, why)
        if (spec.fragments > 1 or spec.mixing) and any(held):
            log.info("what fragments, or mixing, had left of the inner steps before round %d is lost", saved.t)
        return self.position

    def ready(self) -> bool:
        if self.phases.at_work:
            return True
        lease = self.outer.refresh().lease  # there is no local progress
        return lease is not None and lease.blocks > 0

    def advance(self, stop: threading.Event) -> None:
        try:
            if self.phases.inner_phase(stop):
                self.phases.exchange(stop)
        except NotFinite:
            self.phases.start_again(stop)

    def wind_up(self, stopped: bool, stop: threading.Event) -> None:
        position, phases = self.position, self.phases
        if stopped:
            phases.last_round(stop)
        elif self._parts.spec.over(position.t, position.tokens):
            phases.last_turns(stop)
        self._held = phases.held.amounts()
        if phases.at_work:
            phases.drop()

    def finish(self) -> Position:
        ahead, of = self._at_end if self._finished else self._ahead_of_theta(), self.outer.position.digest
        position = self.outer.adopt()
        self._finished, self._at_end = True, ahead if position.digest == of else None
        return position

    def at_rest(self) -> AbstractContextManager[None]:
        """Steps of the next phase, or other fragments, may be ahead of the last round."""
        spec = self._parts.spec
        if spec.overlap == "none" and spec.fragments == 1 and not self.phases.at_work:
            return nullcontext()
        return self.outer.model.at_rest()

    def frozen(self) -> Frozen:
        return self._parts.peer.checkpoint(CHANNEL)

    def local(self) -> Local:
        spec, phases, rng = self._parts.spec, self.phases, random_state(self._parts.engine.device)
        parameters = self._at_end if self._finished else self._ahead_of_theta()
        ahead = phases.ahead or (phases.at_work and parameters is None)
        own = {} if parameters is None else {_PARAMETERS: parameters, **phases.tensors()}
        if spec.fragments > 1 or phases.at_work:
            own[_HELD] = torch.tensor(self._held or phases.held.amounts(), device="cpu")
        if spec.overlap == "eager":
            own[_SHARE] = torch.tensor(self.outer.share, dtype=torch.float64, device="cpu")
        return Local(phases.inner.tensors(), self.outer.outgoing.residual, rng, own, ahead)

    def _ahead_of_theta(self) -> Tensor | None:
        """The parameters, where the model is not at theta: steps of the next phase are made already, other fragments
        have their turn later, or mixing has left a part undone. None, too, where steps were dropped."""
        if self.phases.ahead or not (self._parts.spec.mixing or self.phases.held.any()):
            return None
        return self.outer.model.local()

    def close(self) -> None:
        self.phases.close()
