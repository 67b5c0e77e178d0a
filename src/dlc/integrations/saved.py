"""What a `DiLoCo` keeps beside the checkpoint of a framework, which itself holds the model and the inner optimizer.

    t           rounds in the parameters of the checkpoint
    steps       inner steps of the checkpoint that are in no round
    offered     those of them that are on their way to one
    held        of each fragment: those of its own that are in none
    local       the parameters as those made them, fp32; None where there are none
    start       what the parameters were when those began, fp32; None where that is theta, or there are none
    share       of the last mean that was this peer's, for overlap = "eager"
    residual    what int8, int4 or topk still owe; None with other codecs
    outer       theta and the outer moments of the swarm, and the log of the run: as of `DiLoCo.state_dict(outer=True)`

It is used where the run stands at the round at which it was saved: because the whole swarm was stopped, and the first
peer has joined with `resume=dlc.Resume.of(...)`. In a swarm that has gone on its state counts, not this one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from dlc.comm import vectors
from dlc.errors import CheckpointError, SwarmClosed, UsageError
from dlc.flat import FlatView
from dlc.integrations.options import KEYWORDS
from dlc.train.checkpoint import load_checkpoint, save_checkpoint
from dlc.train.diloco import DiLoCo
from dlc.train.resumed import rounds_made
from dlc.train.swarm import TrainPeer

log = logging.getLogger(__name__)

FILE = "dlc.safetensors"
"""In the folder of a checkpoint."""
VECTORS = ("residual", "local", "start")
State = dict[str, Any]


def state_of(diloco: DiLoCo) -> State | None:
    """What belongs into a checkpoint; None, with a warning, where the peer has left or stopped: then nobody knows the
    log any more."""
    try:
        return diloco.state_dict(outer=True, inner=False)
    except SwarmClosed as closed:
        log.warning("this checkpoint has no outer state (it has what is saved before peer.leave()): %s", closed)
        return None


def follow(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    peer: TrainPeer,
    sync_every: int,
    found: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> DiLoCo:
    """A `DiLoCo` that counts the steps of `inner`. found: the state in the checkpoint of which the framework resumes.

    `options["resume"]` goes before it, and errors as `dlc.DiLoCo` has it; with what was only found a run that nobody
    resumed begins anew, and the log says so.
    """
    given = options.get("resume")
    saved = given if given is not None else found
    resume = saved
    if given is None and found is not None and not _begun(peer, options):
        log.warning(
            "the checkpoint holds the outer state of round %d, but the run begins anew from its model alone: to go on "
            "with the outer momentum, join with resume=dlc.Resume.of(saved_state(checkpoint))",
            found["outer"]["t"],
        )
        resume = None
    diloco = DiLoCo(model, inner, peer, sync_every, **{**options, "resume": resume})
    if saved is not None and resume is not None:
        if diloco.t == saved.get("t"):
            diloco.load_state_dict({**saved, "inner": None})
        else:
            _tell_of_lost(saved, diloco.t)
    diloco.follow()
    return diloco


def _tell_of_lost(saved: Mapping[str, Any], t: int) -> None:
    """What the checkpoint had beyond the swarm's parameters, which are those of round t."""
    steps, offered = saved.get("steps", 0), saved.get("offered", 0)
    if lost := steps - offered:
        log.warning(
            "%d steps of the checkpoint were in no round and are lost: it is of round %d, and the swarm stands at "
            "round %d by now; with save_steps a multiple of sync_every none are",
            lost,
            saved["t"],
            t,
        )
    if offered:
        log.warning(
            "%d steps of the checkpoint were on their way to a round: it is of round %d, and the swarm stands at round "
            "%d by now; they are lost, unless a round between has counted them",
            offered,
            saved["t"],
            t,
        )


def _begun(peer: TrainPeer, options: Mapping[str, Any]) -> bool:
    """Whether the run has made a round on this channel."""
    return rounds_made(peer, options.get("channel", KEYWORDS["channel"].default), options.get("timeout_s")) > 0


def write(folder: Path, state: State, model: nn.Module) -> None:
    """Into the folder of a checkpoint with this model. CheckpointError: it could not be written."""
    outer = state["outer"]
    tensors = {"log": outer["log"], "image": outer["image"]}
    tensors |= {name: state[name] for name in VECTORS if state[name] is not None}
    meta = {"t": state["t"], "outer_t": outer["t"], "model": _digest(model)}
    meta |= {name: state[name] for name in ("inner_step", "steps", "offered", "held", "share")}
    save_checkpoint(folder / FILE, tensors, meta)


def read(folder: Path, model: nn.Module | None = None) -> State | None:
    """What `write` wrote; None: there is nothing, or it was saved beside other parameters than those of `model`.

    CheckpointError: it is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    tensors, meta = load_checkpoint(folder / FILE)
    if not {"log", "image"} <= tensors.keys() or not {"t", "outer_t", "model"} <= meta.keys():
        raise CheckpointError(f"{folder / FILE} is no state of a DiLoCo")
    if model is not None and meta["model"] != _digest(model):
        return None
    outer = {"t": meta["outer_t"], "log": tensors["log"], "image": tensors["image"]}
    steps = {name: meta.get(name, 0) for name in ("inner_step", "steps", "offered")}  # files of before have none
    held, share = meta.get("held", []), meta.get("share", 1.0)
    own = {name: tensors.get(name) for name in VECTORS}
    return {"inner": None, "t": meta["t"], "outer": outer, **steps, "held": held, "share": share, **own}


def demand(state: State | None, checkpoint: str | Path) -> State:
    """UsageError where there is none."""
    if state is None:
        raise UsageError(f"{checkpoint} has no outer state of dlc; it is the model of one peer, to begin a run with")
    return state


def _digest(model: nn.Module) -> str:
    """Of the trainable parameters, as they are: tells one checkpoint from another of the same name."""
    view = FlatView.of(model)
    return blake3(
        view.gather(vectors.empty(view.numel)).view(torch.uint8).numpy().data, max_threads=blake3.AUTO
    ).hexdigest()
