"""What `outer_loop` keeps of a contribution on its way to a round, and what it tells of it afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlc.arguments import function, real, seconds
from dlc.comm.encoded import Encoded
from dlc.comm.reducer import WEIGHT_MAX
from dlc.errors import DlcError, UsageError
from dlc.report import RoundReport
from dlc.train.swarm import Pending


class NotFinite(DlcError):
    """The inner steps ended in NaN or Inf; nothing was offered, and the model is the swarm's again."""


class Work(NamedTuple):
    """What a pseudo-gradient was trained on."""

    blocks: Sequence[int] = ()
    """Positions of the data source, in order of use; empty on a channel without leases."""
    upto: int = 0
    """The lease position after them."""


class Offer(NamedTuple):
    """A frozen d on its way to a round, or a fragment of it."""

    pending: Pending
    fragment: int
    d: Tensor | None
    """Packed. None: no step was made since it was measured, so it is base - local still."""
    sent: Tensor | Encoded
    """What was offered: d itself, encoded where d is not kept; with feedback d and the residual."""
    work: Work


class Settled(NamedTuple):
    """What became of an offer."""

    report: RoundReport | None
    """Of the round that ended; None: this peer's state was replaced, or a round had passed before the offer."""
    counted: bool
    """The offered work is part of that round."""
    kept: bool
    """What is not counted is still local progress; otherwise it was dropped."""


def norm_of(d: Tensor) -> float:
    """Euclidean, summed in float64: the squares of the vector that most needs clipping overflow float32."""
    return float(torch.linalg.vector_norm(d, dtype=torch.float64))


def share_of(report: RoundReport, peer: str) -> float:
    """Its part of the weight of the mean."""
    return next((share.weight for share in report.contributors if share.peer == peer), 0.0) / report.weight


def step_weight(weight: float, steps: int) -> float:
    """Of one inner step of so many that a round has. UsageError: a round would refuse that, or wait for ever where all
    give 0."""
    if not 0 < (given := real(weight)) <= WEIGHT_MAX / steps:
        raise UsageError(f"the weight of a step must be above 0, and that of a round at most 2^53, not {weight!r}")
    return given


def check_terms(hook: object, patience_s: float) -> None:
    """UsageError now, and not at the first round, whose inner steps it would cost."""
    if hook is not None:
        function("pseudo_gradient_hook", hook)
    if not 0 <= seconds("patience_s", patience_s) < math.inf:
        raise UsageError(f"patience_s is {patience_s!r}: it must be a number of seconds, 0 for as long as it pays")
