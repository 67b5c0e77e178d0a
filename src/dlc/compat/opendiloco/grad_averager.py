"""`DiLoCoGradAverager`: pseudo-gradients averaged into the gradients of an outer optimizer that the caller steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlc.compat.opendiloco.strategy import codec_of, peer_of
from dlc.errors import DlcError, RoundTimeout, UsageError
from dlc.handles import Reduction
from dlc.peer import Peer

MATCHMAKING_S = 5.0
ALLREDUCE_S = 60.0
NEEDLESS = frozenset(
    "client_mode auxiliary start target_group_size initial_group_bits shutdown_timeout next_chunk_timeout "
    " sender_timeout reducer_timeout request_timeout part_size_bytes bandwidth min_vector_size "
    "allow_state_sharing declare_state_period".split()
)
"""Of Hivemind's averager, taken and not used: all peers of the run are one group, so none is too large for it."""


class Control:
    """One averaging, planned or on its way: what `step(wait=False)` and `schedule_step` return."""

    def __init__(self, timeout_s: float | None, least: int = 1) -> None:
        self.timeout_s, self._least = timeout_s, least
        self._reduction: Reduction | None = None
        self._result: dict[str, None] | None = None

    @property
    def triggered(self) -> bool:
        """The pseudo-gradients were offered."""
        return self._reduction is not None

    def done(self) -> bool:
        """`result` would return, or raise, at once."""
        return self._reduction is not None and self._reduction.done

    def begin(self, reduction: Reduction) -> None:
        """Its one use."""
        self._reduction = reduction

    def result(self, timeout: float | None = None) -> dict[str, None]:
        """Wait for the mean, and write it into the gradients. Who is in it, by peer id.

        RoundTimeout: not within `timeout` seconds (None: those of the step); it can be waited for again. Or fewer than
        `min_group_size` peers came, whose mean the gradients are then. UsageError: not begun yet.
        """
        if self._reduction is None:
            raise UsageError("nothing is on its way: pass this control to step()")
        report = self._reduction.wait(self.timeout_s if timeout is None else timeout)
        if len(report.contributors) < self._least:
            raise RoundTimeout(f"{len(report.contributors)} peers came, fewer than min_group_size={self._least}")
        return {share.peer: None for share in report.contributors}

    def cancel(self) -> bool:
        """The gradients are the caller's again, unchanged. False: it is over, or was never begun."""
        return self._reduction is not None and self._reduction.cancel()


class DiLoCoGradAverager:
    """`main_parameters`: what the inner steps move. `offloaded_optimizer`: the outer one, over copies on the CPU.

    Its parameters' gradients become the mean of (outer parameter - main parameter) over the peers of `dht`'s run that
    call `step` with the same `prefix`; those that are not ready within `min_matchmaking_time` seconds are left out.
    Where fewer than `min_group_size` (1, not Hivemind's 2) have come, `step` raises RoundTimeout. The outer step is the
    caller's; `DiLoCoOptimizer` needs none of this.

    KeyError, ValueError, TypeError: as OpenDiLoCo, an argument is not offered, or unknown.
    """

    def __init__(
        self,
        main_parameters: Sequence[torch.nn.Parameter],
        offloaded_optimizer: torch.optim.Optimizer,
        *,
        dht: object,
        prefix: str,
        warn: bool = True,
        compression: object = "fp32",
        min_matchmaking_time: float = MATCHMAKING_S,
        allreduce_timeout: float | None = ALLREDUCE_S,
        min_group_size: int = 1,
        averaging_alpha: float = 1.0,
        **of_hivemind: Any,
    ) -> None:
        if of_hivemind.get("client_mode") or of_hivemind.get("auxiliary"):
            raise KeyError("client_mode and auxiliary are not offered by DiLoCoGradAverager")
        if averaging_alpha != 1.0:
            raise ValueError(f"averaging_alpha={averaging_alpha} is not offered: the gradients become the mean")
        if "averaged_grads" in of_hivemind:
            raise KeyError("averaged_grads is not offered: the gradients of offloaded_optimizer are averaged")
        if unknown := of_hivemind.keys() - NEEDLESS:
            raise TypeError(f"DiLoCoGradAverager has no argument {sorted(unknown)[0]!r}")
        if not isinstance(main_parameters, list | tuple):
            raise ValueError("main_parameters must be a list or a tuple: an iterator would be used up")
        peer = peer_of(dht)
        if not isinstance(peer, Peer):
            raise UsageError(f"dht must be, or hold as .peer, a dlc.Peer, not {type(dht).__name__}")
        self.main_parameters, self.offloaded_optimizer = list(main_parameters), offloaded_optimizer
        self.prefix = prefix
        self._last: Control | None = None
        """Of the last averaging that was begun."""
        self._peer, self._codec = peer, codec_of(compression)
        self._patience_s, self._timeout_s, self._least = min_matchmaking_time, allreduce_timeout, min_group_size
        self._outer = [p for group in offloaded_optimizer.param_groups for p in group["params"]]
        shapes = [tuple(p.shape) for p in self.main_parameters]
        if [tuple(p.shape) for p in self._outer] != shapes:
            raise ValueError("main_parameters and the parameters of offloaded_optimizer must have the same shapes")
        self._grads()

    @property
    def peer_id(self) -> str:
        return self._peer.id

    @contextlib.contextmanager
    def get_tensors(self) -> Iterator[list[Tensor]]:
        """The gradients; not while an averaging is on its way."""
        yield self._grads()

    def _grads(self) -> list[Tensor]:
        """Of the outer parameters; zeros where there is none, as after the `zero_grad` of their optimizer."""
        for p in self._outer:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return [p.grad for p in self._outer]

    @torch.no_grad()
    def compute_and_load_pseudo_grad_into_averager(self) -> None:
        """Gradients <- outer parameters - main parameters."""
        for outer, main, grad in zip(self._outer, self.main_parameters, self._grads(), strict=True):
            torch.sub(outer.detach(), main.detach().to(outer.device), out=grad)

    def schedule_step(self, scheduled_time: float | None = None, timeout: float | None = None) -> Control:
        """For a later `step(control=...)`. There is nothing to prepare, so the time changes nothing."""
        return Control(self._timeout_s if timeout is None else timeout, self._least)

    def step(
        self, control: Control | None = None, timeout: float | None = None, wait: bool = True
    ) -> dict[str, None] | Control:
        """Average the pseudo-gradients; without `wait`, return the control to wait with. Who is in, by peer id.

        RoundTimeout: not within `timeout` seconds; RoundLost: the others went on while this peer was away; SwarmClosed:
        it has left. Where the caller has no control, the averaging is given up then, or where the wait is interrupted;
        the gradients are this peer's own, and the next step averages anew. UsageError, with nothing done: the control
        was used already, or the step before is still on its way.
        """
        if control is not None and control.triggered:
            raise UsageError("this control was used already: schedule another step")
        if self._last is not None and not self._last.done():
            raise UsageError("the averaging before is on its way, and sends the gradients: wait for it first")
        given, control = control, control if control is not None else self.schedule_step(timeout=timeout)
        self.compute_and_load_pseudo_grad_into_averager()
        control.begin(
            self._peer.all_reduce(
                self._grads(),
                name=f"{self.prefix}/gradients",
                codec=self._codec,
                patience_s=self._patience_s,
                async_op=True,
            )
        )
        self._last = control
        if not wait:
            return control
        return control.result(timeout) if given is not None else _waited(control, timeout)

    def notify_used_averaged_gradients(self) -> None:
        """There is nothing to note."""

    def shutdown(self) -> None:
        """The peer stays."""


def _waited(control: Control, timeout_s: float | None) -> dict[str, None]:
    """Its result; where there is none in time, or the wait is interrupted, it is given up: nobody else has it."""
    try:
        return control.result(timeout_s)
    except RoundTimeout:
        if control.cancel():
            raise
        return control.result(0)  # it was decided at the last moment, or by too few
    except DlcError:
        raise  # it is over
    except BaseException:  # Ctrl-C, or what else a signal's handler raises
        control.cancel()
        raise
