"""Where a trainer's inner steps run: the model of the run, its flat view and its inner loops.

`Engine` is one device of this process. A site of several processes has another with the same face: `site.SiteEngine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlc.flat import FlatView
from dlc.runspec import RunSpec
from dlc.train.flops import Utilisation
from dlc.train.inner import InnerLoop, evaluate
from dlc.train.setup import check_causal, inner_loop_of, model_of, utilisation_of


class Engine:
    """The model of `spec` for `device`; it is moved there by the first inner loop.

    micro_batch: sequences that go through it at once, where fewer than `inner.batch_size` fit this device; 0: so many.

    ConfigError: the model cannot be built, or is none that predicts the next token.
    """

    def __init__(self, spec: RunSpec, device: torch.device, micro_batch: int = 0) -> None:
        self.spec, self.device = spec, device
        self.batch_size = min(spec.inner.batch_size, micro_batch or spec.inner.batch_size)
        self.model = model_of(spec)
        check_causal(self.model)
        self.view = FlatView.of(self.model)

    def inner_loop(self) -> InnerLoop:
        """A new one, with a fresh optimizer."""
        return inner_loop_of(self.spec, self.model, self.device)

    def utilisation(self) -> Utilisation:
        """What MFU is counted by."""
        return utilisation_of(self.spec, self.model, self.device)

    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Mean next-token loss in nats per token."""
        return evaluate(self.model, batches, self.device)

    def whole_model(self) -> nn.Module:
        """The model with all its parameters in this process, to be written into a folder."""
        return self.model
