"""The training of `dlc join`: inner steps on leased blocks, an exchange, again, until the run is over.

    open ──> [ ready? ──> inner steps ──> exchange ──> now and then: checkpoint, validation ] ──> end
             └──────────── strategy ─────────────┘

- The swarm's RunSpec says everything: model, data, H, optimizers, and the strategy, which knows what is exchanged (see
  `strategy`). The model starts from what the swarm holds.
- The inner optimizer's state is local and survives rounds, and so does what int8 and int4 lose of a contribution.
- `stop` ends it within seconds: where the next round is near, our work is offered to it first. A
  consistent copy is taken, the leave announced, then the files are written.
- So does an error, after which nothing more is offered: what was counted until then is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dlc.comm.events import RoundDone
from dlc.comm.roles import TRAINER
from dlc.errors import DlcError, UsageError
from dlc.report import RoundReport
from dlc.runspec import RunSpec
from dlc.strategyspec import OWN_MODELS
from dlc.train.checkpoint import sweep_model_folder
from dlc.train.data import open_blocks
from dlc.train.engine import Engine
from dlc.train.group import Group, SiteLost
from dlc.train.loader import Stopped
from dlc.train.model import save_model
from dlc.train.packing import TOKENS
from dlc.train.rng import seed_peer
from dlc.train.samedata import FIELD, SameData
from dlc.train.saver import KEPT, Saver
from dlc.train.saves import Saved, check_same_model
from dlc.train.setup import check_own_tokenizer, check_vocabulary, pick_device
from dlc.train.site import SiteEngine
from dlc.train.strategies import strategy_of
from dlc.train.strategy import CHANNEL, Calls, Parts
from dlc.train.swarm import Frozen, MemberView, Position, TrainerPeer
from dlc.train.telling import ENDS, Event, Setbacks, Teller, at_the_end
from dlc.train.tokens import load_tokenizer

log = logging.getLogger(__name__)

LEASE_LOOK_S = 0.1
"""Between two looks for a lease, where this peer has none."""
LINGER_S = 60.0
"""How long a peer that has reached the end stays for those that still fetch the last round, or the model, or may come
back for them."""
LINGER_TOLD_S = 1.0
"""After which the log says so: records of the last round take a moment."""
LAST_TRIES = 5
"""To take the model and the checkpoint of one round: few rounds are so short that one passes in between again."""
HEADS_KEPT = 256
"""More rounds than are ever told of late."""
EVAL_BLOCKS = 64
CHECKPOINT_EVERY = 10
INTERRUPTED, FAILED = "interrupted", "failed"
"""Reasons of an end that is not the run's."""
_LEFT_BEHIND = (
    "the run has ended while this peer was away: %s came to its last round, and left. The model of the end is in their "
    "state directories; this peer's is of round %d. Started again, it would train on from there, to another end"
)


@dataclasses.dataclass(frozen=True)
class Summary:
    """How the training ended on this peer."""

    reason: str
    """"rounds" or "tokens" (the limit that was reached), "interrupted", or "failed", by what `run` raises."""
    t: int
    digest: str
    """Of the outer state after round `t`, hex."""
    validation_loss: float | None
    """Nats per token at the end; None if interrupted or failed."""
    tokens: float | None
    """Of all peers together; of this one alone where there are no rounds of all (gossip, moshpit). None with strategy
    "parameter-server", where nobody counts them."""
    waited_s: float
    """Time this peer's inner steps stood still for rounds."""
    bytes_sent: int
    """In rounds that it told of, or other exchanges: without what was fetched, or given, of the model."""
    bytes_received: int
    setbacks: Setbacks
    """What faults cost this peer."""
    model: Path | None
    """Folder for `from_pretrained`; None if it could not be written."""
    checkpoint: Path | None
    """The newest that is whole on disk."""
    saved: bool
    """It is of the end: the last one could be written."""


class Trainer:
    """Trains the run of `peer` (joined with hold=True); files go to `folder`. `run` may be called once.

    on_event:     gets a dict for everything that happens, on the caller's thread (see `telling`).
    peer_events:  the queue whose `put` the peer got as its `on_event`.
    micro_batch:  sequences that go through the model at once, where fewer than `inner.batch_size` fit the device; 0:
                  so many. The steps are the same ones.
    site:         the processes that train together, of which this is rank 0; None: this process alone, on `device`.
    resume:       a checkpoint of this RunSpec, or of one that differs in length only, whose log the peer was given too.
                  What is large in it is let go of (`Saved.let_go`) once it is taken.
    cache:        folder of tokenised text, which peers of one host may share; else one in `folder`.
    eval_every, checkpoint_every: in rounds; 0 for only at the end.
    keep:         how many checkpoints stay on the disk, at least 1.
    before_write: sees that `folder` still is this peer's; UsageError: no checkpoint and no model may be written.

    The global random state of torch is set: to that of the checkpoint, or else to a stream of this peer's own.

    UsageError: the model cannot be built, the data not be read, or there is no such device.
    """

    def __init__(
        self,
        peer: TrainerPeer,
        folder: Path,
        *,
        device: str = "auto",
        micro_batch: int = 0,
        site: Group | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        peer_events: queue.SimpleQueue[object] | None = None,
        resume: Saved | None = None,
        cache: Path | None = None,
        eval_blocks: int = EVAL_BLOCKS,
        eval_every: int = 0,
        checkpoint_every: int = CHECKPOINT_EVERY,
        keep: int = KEPT,
        before_write: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec = peer.spec
        self._engine = (
            Engine(spec, pick_device(device), micro_batch)
            if site is None
            else SiteEngine(spec, site, peer.id, micro_batch)
        )
        self.device, self.model, view = self._engine.device, self._engine.model, self._engine.view
        tokenizer = load_tokenizer(spec.data.tokenizer)
        check_own_tokenizer(spec, self.model, tokenizer)
        check_vocabulary(self.model, tokenizer)  # before the text is tokenised, which may take long
        self._source = open_blocks(spec, tokenizer, cache or folder / TOKENS)
        self._eval_batches = self._source.validation_batches(self._engine.batch_size, eval_blocks)
        if resume is not None:
            check_same_model(resume, view)
        self._peer, self._folder, self._clock, self._resume = peer, folder, clock, resume
        self._before_write = before_write
        self._eval_every, self._checkpoint_every = eval_every, checkpoint_every
        self._same_data = SameData(self._source.fingerprint(), spec.data.source)
        if resume is not None:
            self._same_data.goes_on(resume)
        told = (self._same_data.mine, resume, peer.id)
        self._saver = Saver(folder, spec, view.layout(), keep, *told, before_write=before_write)
        about = {FIELD: self._same_data.mine}
        self._tell = Teller(peer, on_event, peer_events, clock, self._engine.utilisation(), about)
        calls = Calls(
            over=self._over,
            hear=self._hear,
            listen=self._listen,
            on_round=self._report,
            counted=self._now_and_then,
            stopping=lambda: self._stop.is_set(),
            moved=self._moved,
        )
        self.strategy = strategy_of(Parts(peer, spec, self._engine, self._source, self._tell, calls, clock))
        self._stop = threading.Event()
        """That of `run`."""
        self._heard: list[RoundDone] = []
        """Rounds that the peer told of, and that are not reported yet."""
        self._told: deque[str] = deque(maxlen=HEADS_KEPT)
        """Heads of the rounds that were reported; their numbers come again where another history wins."""
        self._saved_t = self._validated_t = 0
        self._to_save = False
        """The model is what the swarm held, or later, and its end is not saved yet."""
        self._waited_s = 0.0
        self._bytes_sent = self._bytes_received = 0

    def run(self, stop: threading.Event) -> Summary:
        """Train until the run's limit or `stop`.

        DlcError: the training diverged, the data could not be read on, or the peer had to leave. Where that comes after
        the beginning, what was counted is saved first; and it is no UsageError then.
        """
        self._stop = stop
        try:
            return self._run(stop)
        except Exception as error:
            if not self._to_save:
                raise
            self._save_at(error, stop)
            if isinstance(error, UsageError):  # what was given was good enough to begin with
                raise DlcError(str(error)) from error
            raise
        finally:
            self.strategy.close()

    def _run(self, stop: threading.Event) -> Summary:
        self._open()
        while True:
            self._hear()
            if not stop.is_set():
                self._check_not_left_behind()
            if (reason := self._over(stop)) is not None:
                break
            if self.strategy.ready():
                with contextlib.suppress(Stopped):
                    self.strategy.advance(stop)
            else:
                self._tell.phase("waiting")
                stop.wait(LEASE_LOOK_S)
        self.strategy.wind_up(reason == INTERRUPTED, stop)
        return self._finish(reason, stop)

    def _save_at(self, error: Exception, stop: threading.Event) -> None:
        """The training ends by `error`, which is what people have to hear of, whatever else goes wrong here.

        A site saves nothing where one of its processes is gone, or may wait for this one in the middle of a step.
        """
        if isinstance(error, SiteLost) or (isinstance(self._engine, SiteEngine) and not isinstance(error, DlcError)):
            return
        try:
            self.strategy.wind_up(False, stop)
            self._finish(FAILED, stop)
        except Exception as another:
            why = "" if str(another) == str(error) else f": {another}"
            log.warning("what was trained since the last checkpoint (%s) is not saved%s", self._saver.last, why)

    def _open(self) -> None:
        self._tell.event("phase", phase="syncing")
        seed_peer(self.spec.seed, self._peer.id)
        resume = self._resume
        position = self.strategy.open(resume.as_of(self._peer.id) if resume is not None else None)
        if resume is not None:
            resume.let_go()
        self._listen()
        self._heard = [done for done in self._heard if done.report.t > position.t]
        self._saved_t = self._validated_t = position.t
        self._tell.synced(position.t)
        knows = position.t > 0 and resume is None  # others told the loss already, and a newcomer has to hurry
        if not knows and self.spec.over(position.t, position.tokens) is None:  # else the end tells it
            self._validate()
        self._to_save = True

    def _over(self, stop: threading.Event) -> str | None:
        """Why the training is over, or None."""
        position = self.strategy.position
        return self.spec.over(position.t, position.tokens) or (INTERRUPTED if stop.is_set() else None)

    def _check_not_left_behind(self) -> None:
        """DlcError: the others have come to the run's end and left while this peer was away. To go on would give the
        run another end, and nothing would tell the two apart."""
        ended = at_the_end(self._peer.members(departed=True), self.spec) if self._tell.left_ahead else ""
        self._tell.left_ahead = False
        if ended:
            raise DlcError(_LEFT_BEHIND % (ended, self.strategy.position.t))

    def _now_and_then(self, t: int, stop: threading.Event) -> None:
        for other in self._same_data.look(self._peer.members()):
            self._tell.event("other_data", peer=other)
        if self._over(stop) is not None:
            return
        # A slower peer is counted now and then only: what is due since its last round is done now.
        if self._checkpoint_every and abs(t - self._saved_t) >= self._checkpoint_every and not self._saver.busy:
            self._saved_t = t
            self._saver.start(self.strategy.frozen(), self.strategy.local())
        if self._eval_every and abs(t - self._validated_t) >= self._eval_every:
            self._validated_t = t
            self._validate()

    def _hear(self) -> None:
        """Report what happened without us: members, and rounds that were committed during our inner steps."""
        self._listen()
        while self._heard:
            done = self._heard.pop(0)
            self._tell_round(done.report, done.counted, None, 0.0)

    def _listen(self) -> None:
        self._heard.extend(self._tell.peer_events())

    def _report(self, report: RoundReport, counted: bool, loss: float | None, waited_s: float) -> None:
        """Tell of a round, after those before it."""
        while self._heard and self._heard[0].report.head != report.head:
            earlier = self._heard.pop(0)
            self._tell_round(earlier.report, earlier.counted, None, 0.0)
        self._tell_round(report, counted, loss, waited_s)

    def _tell_round(self, report: RoundReport, counted: bool, loss: float | None, waited_s: float) -> None:
        """Once for each round."""
        if report.channel != CHANNEL or report.head in self._told:
            return
        self._told.append(report.head)
        self._moved(report.bytes_sent, report.bytes_received, waited_s)
        position = self.strategy.newest()
        digest = position.digest.hex() if position.head.hex() == report.head else ""
        own = {"counted": counted, "digest": digest, "loss": loss, "own_waiting_s": waited_s}
        speed = {"tokens_per_s": self._tell.tokens_per_s, "mfu": self._tell.mfu}
        self._tell.event("round", **report.to_dict(), **own, **speed)

    def _moved(self, bytes_sent: int, bytes_received: int, waited_s: float) -> None:
        self._waited_s += waited_s
        self._bytes_sent += bytes_sent
        self._bytes_received += bytes_received

    def _validate(self) -> float:
        with self.strategy.at_rest():
            loss = self._engine.evaluate(self._eval_batches)
        self._tell.event("validation", t=self.strategy.position.t, loss=loss)
        return loss

    def _finish(self, reason: str, stop: threading.Event) -> Summary:
        self._hear()
        early = reason in (INTERRUPTED, FAILED)
        if not early:
            self._tell.ends(self.strategy.position.t)
        elif reason != FAILED:  # the peer may have left already
            self._tell.phase(ENDS)
        position, frozen = self._last()
        if early:
            self._peer.leave()
        loss = None if early else self._validate()
        self._saver.finish()
        saved = self._saver.save(frozen, self.strategy.local()) is not None
        model = self._save_model()
        self._to_save = False
        if not early:
            self._linger(stop)
            self._peer.leave()
        summary = Summary(
            reason=reason,
            t=position.t,
            digest=position.digest.hex(),
            validation_loss=loss,
            tokens=None if self.spec.strategy == "parameter-server" else position.tokens,
            waited_s=self._waited_s,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            setbacks=self._tell.setbacks,
            model=model,
            checkpoint=self._saver.last,
            saved=saved,
        )
        paths = {
            name: str(path) if path else None for name, path in (("model", model), ("checkpoint", summary.checkpoint))
        }
        self._tell.event("end", **{**dataclasses.asdict(summary), **paths})
        return summary

    def _last(self) -> tuple[Position, Frozen]:
        """Where the model ends, and what is kept of it: the same round, though those of others go on."""
        for _ in range(LAST_TRIES):
            position = self.strategy.finish()
            frozen = self.strategy.frozen()
            if frozen.t == position.t:
                break
        else:
            log.warning("rounds pass too fast: the model is of round %d, the checkpoint of %d", position.t, frozen.t)
        return position, frozen

    def _save_model(self) -> Path | None:
        folder = self._folder / "model"
        try:
            model = self._engine.whole_model()
            self._before_write()
            sweep_model_folder(folder)  # it takes room that the checkpoints would have to make
            self._saver.with_room(folder, lambda: save_model(model, folder, self._source.tokenizer))
            sweep_model_folder(folder)
        except UsageError as error:
            log.warning("%s", error)
            return None
        except OSError as error:  # of the disk on which room was to be made
            log.warning("the model folder %s could not be written (%s)", folder, error)
            return None
        return folder

    def _linger(self, stop: threading.Event) -> None:
        """Stay until everybody has applied as many entries as we have, and every trainer has the model: who has come
        for the last rounds gets it from nobody else, and who is cut off for a moment would train on alone. Where there
        are no rounds of all, until the others have their part of the last exchange, and newcomers a model."""
        since, told = self._clock(), False
        while (stayed_s := self._clock() - since) < LINGER_S and not stop.is_set():
            members = self._peer.members()
            me = next((m for m in members if m.me), None)
            lacking = [m.id[:8] for m in members if _lacks(m, me, self.spec)] if me is not None else []
            lacking += [peer[:8] for peer in self._peer.needed_by()]
            if not lacking:
                return
            if stayed_s >= LINGER_TOLD_S and not told:
                told = True
                names = ", ".join(lacking)
                log.info("staying for %s, for want of the model or the last round there: %g s at most", names, LINGER_S)
            stop.wait(LEASE_LOOK_S)


def _lacks(other: MemberView, me: MemberView, spec: RunSpec) -> bool:
    """Whether it still needs something of the end of the run that I have."""
    if other.me or other.left or not (other.alive or other.away):
        return False
    if spec.strategy in OWN_MODELS:
        return other.role == TRAINER and other.alive and "t" not in other.status
    lacks_model = other.role == TRAINER and CHANNEL in me.channels and CHANNEL not in other.channels
    return other.depth < me.depth or lacks_model
