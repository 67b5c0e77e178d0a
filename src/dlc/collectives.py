"""Collectives: what the peers of a run compute together in one call, without a state that stays.

Each call is a round of a channel of its own name. Several names may be on their way at once: their offers wait for the
others side by side, and the rounds themselves, bulk included, come one after the other in the order of the log.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from dlc.arguments import instance, number, seconds
from dlc.channels import Channels
from dlc.comm import vectors
from dlc.comm.clock import clock
from dlc.comm.codecs import DENSE, get_codec
from dlc.comm.driver import Driver
from dlc.comm.encoded import Encoded, part_elems
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.node import Node
from dlc.comm.reducer import WEIGHT_MAX
from dlc.errors import DlcError, RoundTimeout, SwarmClosed, UsageError
from dlc.exact import Exact
from dlc.flat import device_of, flatten_tensors, parts_of_many, writable_tensors
from dlc.handles import Announced, Means, Pending, Reduction, no_round
from dlc.report import RoundReport

PATIENCE_SHARE = 0.5
"""A library all-reduce starts without the others after this share of its time limit; the rest is for the exchange."""
PATIENCE_S_MIN, PATIENCE_S_MAX = 1e-3, 30 * 86400.0
"""No patience at all would stand for another rule, that of training; endless patience is no number for a message."""
BARRIER_SHARE = 0.75
"""A barrier gives the others this share of its time limit; the rest is for learning who did not come."""


def refuse_sparse(codec: str) -> None:
    """Raises UsageError for a codec that only works where its residual is kept from call to call."""
    if get_codec(codec, DENSE).sparse:
        raise UsageError(
            f"{codec!r} sends a few elements and leaves the others for the next round, of which this call knows "
            "nothing: use it with DiLoCo, or take another codec"
        )


class Collectives(Channels):
    """The part of `dlc.Peer` that computes with the others, call by call."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._flat: dict[str, Tensor] = {}
        self._given_up: dict[str, Pending] = {}
        """Calls whose round may still be decided with what they sent."""

    @overload
    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        name: str = "default",
        codec: str = "fp16",
        timeout_s: float = 60.0,
        patience_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> RoundReport: ...

    @overload
    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        name: str = "default",
        codec: str = "fp16",
        timeout_s: float = 60.0,
        patience_s: float | None = None,
        async_op: Literal[True],
        expected_s: float = 0.0,
    ) -> Reduction: ...

    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        name: str = "default",
        codec: str = "fp16",
        timeout_s: float = 60.0,
        patience_s: float | None = None,
        async_op: bool = False,
        expected_s: float = 0.0,
    ) -> RoundReport | Reduction:
        """Replace `tensors` (fp32, bf16, fp16; CPU or CUDA), in place, by their weighted mean over the peers.

        All peers call it with the same shapes, in the same order, and the same `name`; of the shapes only the number of
        all elements is checked. Peers that are not ready within `patience_s` (None: half of `timeout_s`) are left out
        and named in the report. Raises RoundTimeout or RoundLost (the tensors are unchanged), SwarmClosed, UsageError.

        Where nobody's values of a chunk are in the mean, because they are not finite or have weight 0, each peer keeps
        its own there; the report is not `complete` then. After a RoundTimeout the round may still be decided without
        this call: the next one of that name waits for that within its own `timeout_s`, and with async_op it raises
        RoundTimeout at once.

        weight: of this peer's tensors. Where all give 0 nothing is averaged: the tensors are unchanged, and the report
        names no contributor.

        name: 1 to 128 bytes; a run can have 1024 different ones, so leave step numbers out. UsageError: it is the
        `channel` of a `DiLoCo`.

        codec: "fp32", "fp16", "bf16", "int8" or "int4". The last two round each contribution, and the mean, to steps of
        1/127 and 1/7 of the greatest of 256 elements. Unlike `DiLoCo`, this call keeps nothing of that for the next.
        "fp16" keeps 11 bits of what is at least 2^-28 of the greatest element of its chunk, and nothing below 2^-39 of
        it; where that is between 1 and 65504, of what is at least 6e-5, and nothing below 3e-8. "bf16" keeps 8 bits of
        everything.

        async_op: return a handle at once. The tensors belong to the round until its `wait` has returned: before that
        they are neither to be changed nor to be read. One call of a name may be on its way at a time; those of other
        names go beside it.

        expected_s: with async_op; above 0 the call announces tensors that will hold their values in about so many
        seconds, when the handle's `ready` is called. The peers agree on the round meanwhile, which takes a round trip
        between the farthest of them. Who is not ready after three times as long may be left out of the mean, and is
        named in the report.
        """
        if not 0 <= seconds("expected_s", expected_s) < math.inf:
            raise UsageError(f"expected_s is {expected_s}: it must be seconds until the tensors are ready, or 0")
        if expected_s and not async_op:
            raise UsageError("expected_s announces tensors: it needs async_op=True, and `ready` of the handle")
        many = writable_tensors(tensors)
        if not many or not sum(t.numel() for t in many):
            raise UsageError("all_reduce needs at least one element")
        weight = number("weight", weight, 0, WEIGHT_MAX, "0 to 2^53")
        timeout_s = seconds("timeout_s", timeout_s)
        patience_s = _patience_s(PATIENCE_SHARE * timeout_s if patience_s is None else patience_s)
        begun = clock()
        if not async_op:
            self._check_may_wait()
        self._await_given_up(name, 0.0 if async_op else timeout_s)
        reduction = self._reduce(name, many, weight, codec, patience_s, expected_s)
        return reduction if async_op else self._waited(reduction, name, begun, timeout_s)

    def barrier(self, name: str = "default", *, timeout_s: float = 60.0) -> None:
        """Wait until all trainers of the run that are alive have called it with this name. One whose `join` has not
        returned yet is not waited for, though it may be among the `members` already.

        RoundTimeout: some have not within three quarters of `timeout_s`; it names them, where they are known. The rest
        of the time is for learning who they are. RoundLost: this peer was away meanwhile.
        """
        report = self._waited_for(f"barrier/{name}", vectors.zeros(1), 1.0, timeout_s, BARRIER_SHARE)
        absent = [missing.peer[:8] for missing in report.missing if missing.reason in ("late", "not ready")]
        if absent:
            within_s = BARRIER_SHARE * timeout_s
            raise RoundTimeout(f"barrier {name!r}: {', '.join(absent)} did not come within {within_s:g} s")

    def broadcast_state(
        self, state: Mapping[str, Tensor], source: str, *, name: str = "default", timeout_s: float = 60.0
    ) -> RoundReport:
        """Overwrite `state`, in place, by that of the member `source` (a peer id), bit for bit.

        All peers call it with the same names, shapes and dtypes (any dtype, CPU or CUDA) and the same `source`, which
        gives its own values. They are checked against a hash that the source sends with them. The report's `missing`
        names the members that were not there, and so may hold something else.

        It goes the way of an all-reduce, so each peer sends about 4/3 of the state's bytes. Raises RoundTimeout (the
        source was not there, or not all of its state came), RoundLost, UsageError (other names, shapes or dtypes),
        SwarmClosed; in all cases `state` is unchanged.
        """
        instance("source", source, str, "give the id of the peer whose state all are to have, such as peer.id")
        exact = Exact(state)
        mine = source == self.voter.peer
        vector = exact.pack() if mine else vectors.zeros(exact.numel)
        report = self._waited_for(f"state/{name}", vector, float(mine), timeout_s, PATIENCE_SHARE)
        givers = [share.peer[:8] for share in report.contributors if share.weight]
        if len(givers) > 1:
            raise UsageError(
                f"several peers gave their state ({', '.join(givers)}), and nothing was changed: all must name the "
                "same source"
            )
        share = next((share.fraction for share in report.contributors if share.peer == source), 0.0)
        if share < 1.0:
            why = next((missing.reason for missing in report.missing if missing.peer == source), "no member of the run")
            part = f"only {share:.1%} of the state of {source[:8]} came" if share else f"{source[:8]} gave no state"
            raise RoundTimeout(f"{part} ({why}); nothing was changed: call again, or name another source")
        exact.unpack(vector, source)
        return report

    def _waited_for(
        self, name: str, vector: Tensor, weight: float, timeout_s: float, patience_share: float
    ) -> RoundReport:
        """An all-reduce of `vector`, in fp32, in its own memory."""
        begun, timeout_s = clock(), seconds("timeout_s", timeout_s)
        self._check_may_wait()
        self._await_given_up(name, timeout_s)
        reduction = self._reduce(name, [vector], weight, "fp32", _patience_s(patience_share * timeout_s))
        return self._waited(reduction, name, begun, timeout_s)

    def _waited(self, reduction: Reduction, name: str, begun: float, timeout_s: float) -> RoundReport:
        """The report, if it comes in the caller's time; after a time-out, Ctrl-C or what else a signal's handler raises
        nothing of the reduction touches the caller's tensors any more."""
        try:
            try:
                return reduction.wait(max(0.0, begun + timeout_s - clock()))
            except RoundTimeout:
                late = no_round(name, timeout_s, self._held_up())
            if reduction.cancel():
                raise late
            return reduction.wait(0)  # committed at the last moment
        except DlcError:
            raise  # it is over
        except BaseException:
            reduction.cancel()
            raise

    def _await_given_up(self, name: str, timeout_s: float) -> None:
        """RoundTimeout: the round of an earlier call of that name, which was given up, is not over by then."""
        pending = self._given_up.get(name)
        if pending is None:
            return
        with contextlib.suppress(SwarmClosed):  # which the call itself will tell
            try:
                pending.wait(max(timeout_s, 0.0))
            except RoundTimeout:
                raise RoundTimeout(
                    f"the round of an earlier call of {name!r}, which was given up, is still on its way, as others "
                    "may have what it sent; call again later, or with another name"
                ) from None
        self._given_up.pop(name, None)

    def _reduce(
        self, name: str, many: list[Tensor], weight: float, codec: str, patience_s: float, expected_s: float = 0.0
    ) -> Reduction:
        refuse_sparse(codec)
        numel, device = sum(t.numel() for t in many), device_of(many)
        grid = Grid(numel, usual_chunk_elems(numel, codec, self.spec.chunk_elems), codec)
        encoded = not expected_s and _encoded_there(grid, device)
        vector, own = self._flat_of(name, many, copy=not (expected_s or encoded))
        sent = Encoded(grid, parts_of_many(many, part_elems(grid, device), device)) if encoded else vector
        announced = Announced(vector, many, own, expected_s) if expected_s else None
        filling = announced.filling if announced is not None else None
        means = Means(vector)
        pending = self._offer(name, sent, grid, weight, 0, patience_s, announced or means, filling=filling)

        def cancel() -> bool:
            def act(node: Node, now: float) -> bool:
                if pending.done or name not in node.exchange.offered:  # or is about to be told that it is over
                    return False
                if node.withdraw(name):
                    self._pending.pop(name, None)
                else:
                    self._given_up[name] = pending
                return True  # or else it may be decided with what was sent, but the caller's memory is his again

            try:
                return self._ask(act)
            except SwarmClosed:
                return False  # no round will come: `wait` tells

        def keep() -> None:
            self._flat[name] = vector

        holes = means.holes if encoded else ()
        return Reduction(pending, vector, many if own else [], grid, cancel, keep, self._held_up, announced, holes)

    def _flat_of(self, name: str, many: list[Tensor], copy: bool) -> tuple[Tensor, bool]:
        """One fp32 CPU vector for the values of `many`, with them if `copy`, and whether it is memory of our own.

        A single tensor of that form is used as it is, if other threads may write it. Other vectors are kept from round
        to round: a fresh one costs more in page faults than the copy itself.
        """
        (first, *rest) = many
        plain = type(first) in (Tensor, nn.Parameter) and first.device.type == "cpu" and not first.is_inference()
        if not rest and plain and first.dtype == torch.float32 and first.is_contiguous():
            return first.detach().view(-1), False
        kept = self._flat.pop(name, None)
        numel = sum(t.numel() for t in many)
        vector = kept if kept is not None and kept.numel() == numel else vectors.empty(numel)
        return (flatten_tensors(many, vector) if copy else vector), True


def _encoded_there(grid: Grid, device: torch.device) -> bool:
    """Whether tensors of that device are encoded before they come to the host, as that makes less of them."""
    return device.type != "cpu" and grid.total_wire_bytes < 4 * grid.numel


def _patience_s(asked_s: float) -> float:
    """As others take it. UsageError: it is no time."""
    return min(max(seconds("patience_s", asked_s), PATIENCE_S_MIN), PATIENCE_S_MAX)
