"""`DiLoCoOptimizer`: OpenDiLoCo's optimizer, with its arguments, over one `dlc.DiLoCo`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.compat.bound import BoundOptimizer
from dlc.compat.opendiloco.outer import OuterOptimizer, parameters_of, spec_of
from dlc.compat.opendiloco.strategy import AllReduceStrategy, codec_of, patience_of, peer_of
from dlc.compat.opendiloco.tracker import DiloCoProgressTracker, Own
from dlc.errors import UsageError
from dlc.flat import FlatView
from dlc.report import RoundReport
from dlc.train.checkpoint import bytes_tensor
from dlc.train.diloco import DiLoCo
from dlc.train.outer import OuterState
from dlc.train.stephooks import skipped

log = logging.getLogger(__name__)

MATCHMAKING_S = 15.0
OWN_ARGUMENTS = {
    "optimizer": "outer_optimizer and inner_optimizer",
    "target_batch_size": "batch_size and num_inner_steps",
    "batch_size_per_step": "batch_size",
}
"""Of Hivemind's optimizer, and what takes their place."""
FIXED = {
    "use_local_updates": True,
    "offload_optimizer": True,
    "delay_state_averaging": False,
    "delay_grad_averaging": False,
    "delay_optimizer_step": False,
    "client_mode": False,
    "auxiliary": False,
    "extra_tensors": False,
}
"""Of Hivemind's optimizer, with the one value that they can have (None is the default, too)."""
NOTHING_MADE: Mapping[str, Any] = {"steps": 0, "residual": None}
"""The place of a peer that has not joined."""
NEEDLESS = frozenset(
    "averager_opts tracker_opts averaging_timeout allreduce_timeout next_chunk_timeout load_state_timeout "
    "shutdown_timeout average_state_every state_averaging_compression load_state_compression reuse_grad_buffers "
    "performance_ema_alpha status_loglevel verbose".split()
)
"""Of Hivemind's optimizer, taken and not used: dlc measures its deadlines, and there is no second exchange."""


class StateAverager:
    """What OpenDiLoCo's programs look for in `optimizer.state_averager`."""

    def __init__(self, outer: OuterOptimizer, inner: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
        self.optimizer = outer
        """The outer optimizer: `param_groups`, `state_dict`, `load_state_dict`."""
        self.inner_optimizer = inner
        self.main_parameters = params
        self.scheduler_inner_optimizer: Any = None


class DiLoCoOptimizer(BoundOptimizer):
    """Steps an inner optimizer, and every `num_inner_steps` of its steps exchanges with all peers of `run_id`.

    dht: a `dlc.Peer`, or what holds one as `.peer`. batch_size: samples of a step; a peer's weight in a round is its
    samples. outer_optimizer, inner_optimizer, scheduler: callables of the parameters, or of the inner optimizer.
    params: parameters, or groups of them, in the same order on all peers. grad_compression: Hivemind's, or the name of
    a codec; the default is fp32. all_reduce_strategy, timeout_waiting_for_peers, matchmaking_time: how long a round
    waits for peers that are alive and late, whose work is never lost (see `AllReduceStrategy`).

    The first step, or `load_state_from_peers`, takes the swarm's parameters; the first peer's become the swarm's.

    TypeError, ValueError, KeyError, UsageError: an argument is unknown, contradicts another, or asks for what is not
    offered; the message names it.
    """

    def __init__(
        self,
        *,
        dht: object,
        run_id: str,
        batch_size: int,
        num_inner_steps: int,
        outer_optimizer: Callable[[Any], torch.optim.Optimizer],
        inner_optimizer: Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer,
        params: Iterable[Any] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        grad_compression: object = "fp32",
        all_reduce_strategy: AllReduceStrategy | str = AllReduceStrategy.WAIT_FOR_ALL,
        timeout_waiting_for_peers: float | None = None,
        matchmaking_time: float | None = MATCHMAKING_S,
        outer_scheduler: None = None,
        **of_hivemind: object,
    ) -> None:
        _check(of_hivemind)
        if outer_scheduler is not None:
            raise UsageError(
                "outer_scheduler is not offered: a schedule of the outer step is a part of the run, the same on all "
                "peers: use dlc.DiLoCo(outer=dlc.OuterSpec(schedule=...))"
            )
        for make in (outer_optimizer, scheduler):
            if make is not None and not callable(make):
                raise TypeError("outer_optimizer and scheduler must be callables that make them")
        matchmaking_s = 0.0 if matchmaking_time is None else float(matchmaking_time)
        all_reduce_strategy = AllReduceStrategy(all_reduce_strategy)
        for name, number in (("batch_size", batch_size), ("num_inner_steps", num_inner_steps)):
            if number < 1:
                raise ValueError(f"{name} is {number}: it must be at least 1")
        patience_s = patience_of(all_reduce_strategy, timeout_waiting_for_peers, matchmaking_s)
        given, self._params = parameters_of(params)
        if isinstance(inner_optimizer, torch.optim.Optimizer):
            self.inner_optimizer = inner_optimizer
        elif callable(inner_optimizer):
            self.inner_optimizer = inner_optimizer(given)
        else:
            raise TypeError(
                f"inner_optimizer must make an optimizer of parameters, not {type(inner_optimizer).__name__}"
            )
        self.dht, self.run_id = dht, run_id
        self.num_inner_steps, self.batch_size = num_inner_steps, batch_size
        self.all_reduce_strategy, self.timeout_waiting_for_peers = all_reduce_strategy, timeout_waiting_for_peers
        self._peer, self._codec, self._patience_s = peer_of(dht), codec_of(grad_compression), patience_s
        self._view = FlatView(self._params)
        outer = OuterOptimizer(spec_of(outer_optimizer), self._view.tensors, self._read)
        outer.own, outer.when_loaded = self._place, self._loaded
        self.state_averager = StateAverager(outer, self.inner_optimizer, self._params)
        if scheduler is not None:
            self.state_averager.scheduler_inner_optimizer = scheduler(self.inner_optimizer)
        self.tracker = DiloCoProgressTracker(self._peer, run_id, batch_size, num_inner_steps, self._own)
        self._diloco: DiLoCo | None = None
        self._epochs_before = 0
        """Of a run that this one goes on from."""
        self._samples = self._made = 0
        self._asking = self._by_scaler = False
        """In `_is_unscaled`; in a step that `_step_by` has the scaler make."""
        self.inner_optimizer.register_step_post_hook(self._count)
        self._saved: Mapping[str, Any] | None = None

    # ---------------------------------------------------------------- training

    def step(  # type: ignore[override]  # with OpenDiLoCo's arguments
        self,
        closure: Callable[[], Tensor] | None = None,
        batch_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor | float | None:
        """One inner step, by `scaler` where given (one that it skips does not count), and the exchange that may be due.
        The gradients may be unscaled already, by `scaler.unscale_` of this optimizer or of the inner one.

        Returns the loss of `closure`. A first step that finds another model in the swarm takes that, and drops the
        gradients, which were not of it. Raises what `dlc.DiLoCo.step` raises; ValueError: closure and scaler.
        """
        if self._by_scaler:
            self.inner_optimizer.step()
            return None
        if scaler is not None and closure is not None:
            raise ValueError("a closure and a scaler cannot be used together")
        if self._diloco is None and self._take_swarms():
            log.info("this peer held other parameters than the swarm; its first gradients are dropped")
            if scaler is not None:
                with contextlib.suppress(RuntimeError):  # the caller has done it; one time the scaler needs
                    scaler.unscale_(self.inner_optimizer)
            return closure() if closure is not None else None
        diloco = self._joined()
        before, t, made = diloco.inner_step, diloco.t, self._made
        samples = self.batch_size if batch_size is None else batch_size
        self._samples = self._samples + samples if before else samples
        if self._samples:  # else this step has none, and weighs what the steps before did
            diloco.weight = self._samples / (before + 1)
        last = diloco.last_report
        inner: Any = self.inner_optimizer
        try:
            loss = self._step_by(scaler) if scaler is not None else inner.step(closure)
        finally:  # a step stays made where the round after it is interrupted, or fails
            if self._made == made:  # skipped by the scaler, or failed
                self._samples -= samples
            elif self.state_averager.scheduler_inner_optimizer is not None:
                self.state_averager.scheduler_inner_optimizer.step()
        if self._made != made:
            self._samples = self._samples if diloco.inner_step else 0
        report = diloco.last_report
        if diloco.t != t and report is not None and report is not last:
            log.info("%s", report.summary())
        self.tracker.stepped(report.seconds if report is not None and report is not last else 0.0)
        return loss

    @property
    def last_report(self) -> RoundReport | None:
        """Of the last round that counted this peer; what OpenDiLoCo does not tell."""
        return self._diloco.last_report if self._diloco is not None else None

    def load_state_from_peers(self, **of_hivemind: object) -> None:
        """Take the swarm's newest parameters; steps that are in no round yet are dropped. Blocks until they are here.

        The inner optimizer's moments stay this peer's own. Arguments of Hivemind's change nothing.
        """
        if self._diloco is None:
            self._take_swarms()
        else:
            self._samples = 0
            self._diloco.reload()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner_optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return [] if self._asking else self.inner_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner_optimizer.state

    @property
    def _inside(self) -> torch.optim.Optimizer:
        return self.inner_optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers train the parameters that they joined with."""
        raise UsageError("parameters cannot be added to a DiLoCoOptimizer: give all of them as params")

    @property
    def local_epoch(self) -> int:
        """Rounds in this peer's parameters, those of the run that was loaded included."""
        return self._epochs_before + (self._diloco.t if self._diloco is not None else 0)

    def shutdown(self) -> None:
        """Step the inner optimizer alone from now on; no round waits for this peer any more. It stays a member: leave
        it, or shut the `dht` down."""
        if self._diloco is not None:
            self._diloco.unfollow()

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Both optimizers' states and the epoch in OpenDiLoCo's form, with what dlc needs under "dlc" of the outer one:
        see `OuterOptimizer.state_dict`. Save it beside the model as it is now."""
        outer = self.state_averager.optimizer.state_dict()
        outer["state"]["local_epoch"] = outer["dlc"]["epoch"]
        return {"state_dict_outer": outer, "state_dict_inner": self.inner_optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, or OpenDiLoCo's; the model is to be loaded, too, before the next step.

        The outer part counts where a whole swarm begins anew; see `OuterOptimizer.load_state_dict`. Inner steps that
        were in no round go on where the outer parameters are the same; otherwise they are lost, which the log tells.
        """
        self.state_averager.optimizer.load_state_dict(state_dict["state_dict_outer"])
        self.inner_optimizer.load_state_dict(state_dict["state_dict_inner"])

    # ---------------------------------------------------------------- inside

    def _count(self, *_: object) -> None:
        self._made += not skipped(self.inner_optimizer)

    def _step_by(self, scaler: torch.amp.GradScaler) -> float | None:
        """A scaler knows by the optimizer what is unscaled: stepping the inner one, it would do again what the caller
        had done to this one, as OpenDiLoCo's programs do."""
        if not self._is_unscaled(scaler):
            return scaler.step(self.inner_optimizer)
        self._by_scaler = True
        try:
            return scaler.step(self)
        finally:
            self._by_scaler = False

    def _is_unscaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether the caller has done that to this optimizer: only then is it an error to do it again. It is tried
        without parameters, since they may have been unscaled as the inner one's."""
        self._asking = True
        try:
            scaler.unscale_(self)
        except RuntimeError:
            return True
        finally:
            self._asking = False
        return False

    def _own(self) -> Own:
        steps = self._diloco.inner_step if self._diloco is not None else 0
        return Own(self.local_epoch, steps, self._samples)

    def _read(self) -> tuple[int, list[Tensor]] | None:
        """The swarm's outer state as this peer holds it, once it does."""
        return self._diloco.outer_state.vectors() if self._diloco is not None else None

    def _place(self, held: tuple[int, list[Tensor]] | None) -> dict[str, Any]:
        """Of a state: what the model was trained from, if that is not what it is now, and by how many steps."""
        if self._saved is not None:  # was loaded, and nothing made of it yet
            return {**self._saved, "epoch": self._epochs_before}
        model = self._gathered()
        own = self._diloco.state_dict(inner=False) if self._diloco is not None else NOTHING_MADE
        here = self._diloco is None or held is None or held[0] == self._diloco.t  # or else another round is over
        return {
            "epoch": self._epochs_before + (held[0] if held is not None else 0),
            "steps": own["steps"] if here else 0,
            "lost": 0 if here else own["steps"],
            "samples": self._samples if here else 0,
            "residual": own["residual"],
            "theta": None if held is None or torch.equal(held[1][0], model) else held[1][0],
            "model": _digest(model),
        }

    def _loaded(self, outer: Mapping[str, Any]) -> None:
        """The outer state was taken back; OpenDiLoCo's has no place."""
        self._saved = outer.get("dlc") or None
        if self._diloco is None:
            epoch = outer["state"].get("local_epoch", (self._saved or {}).get("epoch", 0))
            self._epochs_before = int(epoch)
        else:
            self._go_on(self._gathered())

    def _gathered(self) -> Tensor:
        return self._view.gather(vectors.empty(self._view.numel))

    def _begins(self, model: Tensor) -> Tensor:
        """Outer parameters that a run begins with: those of the saved state, if the model is as it was there."""
        if self._saved is None or self._saved["theta"] is None:
            return model
        if self._saved["model"] != _digest(model):
            log.warning(
                "the model is not as it was when this state was saved: its own parameters are taken for the outer ones"
            )
            self._saved = {**self._saved, "theta": None}
            return model
        theta: Tensor = self._saved["theta"].cpu()
        return theta

    def _go_on(self, model: Tensor) -> None:
        """Take up the steps of the saved state, which have made this model of the outer parameters, if those are here;
        else they are lost."""
        diloco, saved, self._saved = self._joined(), self._saved, None
        self._samples = 0
        if saved is None:
            return
        theta = model if saved["theta"] is None else saved["theta"].cpu()
        steps, lost = int(saved["steps"]), int(saved["lost"])
        state = {"inner": None, "inner_step": 0, "residual": saved["residual"]}
        if steps and saved["model"] == _digest(model) and torch.equal(diloco.outer_state.vectors()[1][0], theta):
            image = bytes_tensor(diloco.outer_state.export())
            state |= {"local": model, "steps": steps, "outer": {"image": image}}
            self._samples = int(saved["samples"])
        else:
            lost += steps
        if lost:
            log.warning("%d inner steps that were in no round when this state was saved are lost", lost)
        diloco.load_state_dict(state)

    def _joined(self) -> DiLoCo:
        if self._diloco is None:
            raise UsageError("this optimizer has not joined its run yet")
        return self._diloco

    def _take_swarms(self) -> bool:
        """Join the run. True: the model has other parameters now."""
        before = self._gathered()
        begins = self._begins(before)
        outer, channel = self.state_averager.optimizer, self.run_id
        resume = None
        if outer.moments or begins is not before:
            began = OuterState(begins, outer.spec)
            if outer.moments:
                began.load_moments(outer.moments)
            resume = {"outer": {"t": began.t, "image": bytes_tensor(began.export())}}
        self._diloco = DiLoCo(
            self._params,
            self.inner_optimizer,
            self._peer,
            self.num_inner_steps,
            outer=outer.spec,
            codec=self._codec,
            channel=channel,
            patience_s=self._patience_s,
            resume=resume,
        )
        self._diloco.follow()
        others = not torch.equal(self._diloco.outer_state.vectors()[1][0], begins)
        if self._epochs_before and others and not self._diloco.t:
            log.warning(
                "the swarm has begun from the parameters of another peer, and not from the state that was loaded here, "
                "of epoch %d: to go on from that, start all peers again, each with a state of that epoch",
                self._epochs_before,
            )
        if self._diloco.t or others:
            self._epochs_before = 0  # of the run that lives
        self._go_on(before)
        return not torch.equal(before, self._gathered())


def _digest(model: Tensor) -> str:
    return blake3(model.view(torch.uint8).numpy().data, max_threads=blake3.AUTO).hexdigest()


def _check(of_hivemind: Mapping[str, object]) -> None:
    """Refuse what OpenDiLoCo refuses, and what it would pass on to nobody."""
    for name, value in of_hivemind.items():
        if name in OWN_ARGUMENTS:
            raise KeyError(f"{name} has no meaning here: use {OWN_ARGUMENTS[name]}")
        if name in FIXED and value is not None and bool(value) != FIXED[name]:
            raise ValueError(f"{name}={value!r} is not offered: leave it out")
        if name not in FIXED and name not in NEEDLESS:
            raise TypeError(f"DiLoCoOptimizer has no argument {name!r}")
