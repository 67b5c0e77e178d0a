"""A trained model from a checkpoint, a peer's state directory, a model folder, or a name on the hub."""

from __future__ import annotations

import dataclasses
import os

from torch import nn

from dlc.flat import FlatView
from dlc.runspec import BYTES, RunSpec
from dlc.train import saves
from dlc.train.model import load_model
from dlc.train.outer import theta_of
from dlc.train.saves import Saved, check_same_model
from dlc.train.setup import model_of
from dlc.train.shelf import expanded, has_tokenizer


@dataclasses.dataclass(frozen=True)
class Restored:
    """A model, and what is known of it."""

    model: nn.Module
    origin: str
    tokenizer: str
    """As `data.tokenizer`."""
    spec: RunSpec | None
    """Of the run that made it; None for a model folder or a name."""
    t: int | None
    """The round after which it was saved."""
    data: str = ""
    """As `Saved.data`."""


def restore(target: str) -> Restored:
    """Load it. UsageError: there is nothing of the kind, or not all of it. CheckpointError: it is of another model than
    its run names."""
    path = expanded(target)
    exists = os.path.exists(path)  # False, too, where this user may not look
    if os.path.isfile(path / "config.json") or not exists:
        tokenizer = target if not exists or has_tokenizer(path) else BYTES
        return Restored(load_model(target, whole=True), target, tokenizer, None, None)
    return of_checkpoint(saves.chosen(path, None))


def of_checkpoint(saved: Saved) -> Restored:
    """The model of a checkpoint; what was not trained comes from the spec."""
    model = model_of(saved.spec)
    view = FlatView.of(model)
    check_same_model(saved, view)
    view.scatter(theta_of(saved.image))
    return Restored(model, str(saved.path), saved.spec.data.tokenizer, saved.spec, saved.t, saved.data)
