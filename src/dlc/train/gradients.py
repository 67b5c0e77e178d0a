"""The gradient of a step as one flat vector, which becomes final from its end to its front while backward runs.

    parameters     first ... last        backward makes their gradients from the last to the first
    vector        [     |######]         copied whenever a piece is together; the `Filling` tells the peer

A backward is offered in this way once one was watched: it shows how long it takes, and whether each gradient is left
alone once it is made. Where one is not (a part of the model that runs a backward of its own within it, a hook that
changes gradients), the vector is final at the end of backward, and offered then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dlc.comm.filling import Filling
from dlc.errors import DlcError
from dlc.flat import finite, flatten_tensors

EXPECTED_KEPT = 0.5
"""What a backward is expected to take is at least this part of what was expected of the one before."""
EXPECTED_S_MIN = 1e-3


class Gradients:
    """Of these parameters, leaves of one device, in the order of the vector. `piece_elems`: copied at once, if there
    are so many. `begin` comes right before the last backward of a step, `end` after it; `drop` where it failed."""

    def __init__(self, tensors: Sequence[Tensor], piece_elems: int, clock: Callable[[], float]) -> None:
        self._tensors, self._piece_elems, self._clock = list(tensors), piece_elems, clock
        self._starts = list(accumulate((t.numel() for t in tensors), initial=0))
        self._expected_s = 0.0
        """0: none was watched, or what was seen forbids it."""
        self._lock = threading.Lock()
        """Backward may run on several threads."""
        self._vector: Tensor | None = None
        """None: this is not the last backward of a step, or none at all."""
        self._filling: Filling | None = None
        self._made: list[tuple[Tensor, int] | None] = []
        """Each gradient and its version, as it was made."""
        self._left, self._uncopied = 0, 0
        """Parameters before this one may lack their gradients; are not copied."""
        self._sound, self._since = True, 0.0
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._hooked, i))  # type: ignore[no-untyped-call]
            for i, tensor in enumerate(tensors)
        ]

    def begin(self, vector: Tensor) -> Filling | None:
        """The next backward is written into `vector` (fp32, CPU, 1-D). The Filling with which it may be offered; None:
        it is final at its end only."""
        with self._lock:
            self._left = self._uncopied = len(self._tensors)
            self._made = [None] * self._left
            self._sound, self._since, self._vector = True, self._clock(), vector
            self._filling = Filling(self._starts[-1], self._expected_s) if self._expected_s else None
            return self._filling

    def _hooked(self, i: int, tensor: Tensor) -> None:
        """The gradient of parameter i has been made."""
        if self._vector is None or tensor.grad is None:
            return
        with self._lock:
            if self._made[i] is None:  # what comes after the first time is noticed at the end
                self._made[i] = (tensor.grad, tensor.grad._version)
            while self._left and self._made[self._left - 1] is not None:
                self._left -= 1
            lacking = self._starts[self._uncopied] - self._starts[self._left]
            if self._filling is not None and self._sound and (lacking >= self._piece_elems or not self._left):
                self._copy(self._left)

    def _copy(self, first: int) -> None:
        """Of the parameters from `first` on, what is not copied yet. Nothing was trained on one without a gradient."""
        assert self._vector is not None
        tensors = self._tensors[first : self._uncopied]
        if tensors and tensors[0].device.type == "cuda":
            torch.cuda.synchronize(tensors[0].device)  # whatever stream made them
        start, stop = self._starts[first], self._starts[self._uncopied]
        part = self._vector[start:stop]
        flatten_tensors([torch.zeros_like(t) if t.grad is None else t.grad for t in tensors], part)
        self._uncopied = first
        self._sound = self._sound and (start == stop or finite(part))
        if self._filling is not None and self._sound:
            self._filling.reached(start)
        elif self._filling is not None:
            self._filling.stop()

    def end(self) -> bool:
        """Backward is over: the rest is copied. False: an element is not finite.

        DlcError: a gradient was changed after it had been offered; what was sent of it cannot be taken back.
        """
        with self._lock:
            alone = all(made is None or _unchanged(t, *made) for t, made in zip(self._tensors, self._made, strict=True))
            if self._filling is not None and not alone:
                self._drop()
                raise DlcError(
                    "a gradient changed after backward had made it, while it was offered already: the model must not "
                    "begin to change gradients, or to run a backward within its backward, in the middle of a training"
                )
            self._copy(0)
            took_s = max(self._clock() - self._since, EXPECTED_S_MIN)
            self._expected_s = max(took_s, EXPECTED_KEPT * self._expected_s) if alone else 0.0
            sound = self._sound
            self._drop()
            return sound

    def drop(self) -> None:
        """There is no end: what is not final will never be. Does nothing after `end`."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._filling is not None:
            self._filling.stop()
        self._vector, self._filling, self._made = None, None, []

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()


def _unchanged(tensor: Tensor, made: Tensor, version: int) -> bool:
    return tensor.grad is made and made._version == version
