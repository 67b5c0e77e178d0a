"""`DecentralizedAverager`: tensors that are averaged, now and then, with a group of other peers.

    averager = DecentralizedAverager(tensors, dht, start=True, prefix="mine")
    gathered = averager.step(weight=32, gather={"batch": 32})      # {peer id: what it gathered}
    with averager.get_tensors() as tensors: ...

A thin face: a step is a thread of this process that waits for a meeting and lets it average; sockets, processors and
memory are those of the `DHT`'s peer. What is different from Hivemind is on purpose:

- A group is complete as soon as everybody who averages under the prefix is here; `min_matchmaking_time` is the limit.
- A step that requires a trigger joins a group when it has it, not before; until then others wait as for a late peer.
- The mean is that of those who contributed; who is missing, and why, stands in `last_outcome` and in the log.
- A step that fails leaves the tensors unchanged, and says so by AllreduceException. Nothing is averaged in part unseen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dlc.arguments import finite, instance, seconds, whole
from dlc.comm import vectors
from dlc.comm.seating import GROUP_MAX
from dlc.compat.hivemind.averaging.allreduce import AllreduceException, AveragingMode
from dlc.compat.hivemind.averaging.announced import Announced, check_bits, infos_of
from dlc.compat.hivemind.averaging.carry import carry, same_bits
from dlc.compat.hivemind.averaging.control import AveragingStage, StepControl, waited
from dlc.compat.hivemind.averaging.directory import Entry, schema_of
from dlc.compat.hivemind.averaging.rotation import rotated
from dlc.compat.hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.p2p import PeerID
from dlc.compat.hivemind.swarm import Outcome, Parts, Terms, key_of
from dlc.compat.hivemind.utils.background import in_background
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.compat.hivemind.utils.timed_storage import get_dht_time
from dlc.errors import DlcError, SwarmClosed, UsageError
from dlc.flat import flatten_tensors, unflatten_into, writable_tensors

log = logging.getLogger(__name__)

EXCHANGE_S = 600.0
"""Limit of an exchange without allreduce_timeout: links and peers that fail are noticed long before."""
PATIENCE_S_MIN = 0.1
"""Even who has no time left tells that it is here."""

NO_COMPRESSION = NoCompression()


class DecentralizedAverager(Announced):
    """Averages `averaged_tensors` (fp32, bf16 or fp16; any device) in place, under the names and with the arguments of
    Hivemind.

    prefix: who has the same, and tensors of the same shapes, averages together. target_group_size: largest group, up to
    64 (more stands for that); None: no limit. initial_group_bits: where this peer stands on a grid of groups; only
    equal bits meet, and they rotate with every round. compression: of the rounds; state_compression: of the state for
    others; both must be equal on all peers. averaging_alpha: tensors move by this share of the way to the mean.
    client_mode: contributes, but computes nothing and gives no state. auxiliary: computes, and contributes nothing.

    Not needed, and of no effect: request_timeout, part_size_bytes, bandwidth (it is measured), min_vector_size,
    next_chunk_timeout, sender_timeout, reducer_timeout, declare_state_period, daemon, shutdown_timeout.

    UsageError: a dtype that cannot be averaged, no compression of Hivemind's, a mode that excludes another, or an
    argument of another type than Hivemind's.
    """

    serializer = MSGPackSerializer
    _keeps_unsaid = True
    """What compression rounds off of a tensor stays in it: what is averaged again and again would lose all that is
    below the resolution. False: all peers of a group have the mean in the same bits."""
    _scheme = ""
    """How it averages, where that is not this class's way: who has another one is not met."""

    def __init__(
        self,
        averaged_tensors: Sequence[Tensor],
        dht: DHT,
        *,
        start: bool,
        prefix: str,
        target_group_size: int | None = None,
        min_group_size: int = 2,
        initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        averaging_alpha: float = 1.0,
        part_size_bytes: int = 2**19,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        compression: CompressionBase = NO_COMPRESSION,
        state_compression: CompressionBase = NO_COMPRESSION,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None,
        min_vector_size: int = 0,
        auxiliary: bool = False,
        allow_state_sharing: bool | None = None,
        declare_state_period: float = 30.0,
        client_mode: bool | None = None,
        daemon: bool = True,
        shutdown_timeout: float = 5.0,
    ) -> None:
        instance("dht", dht, DHT, "give a hivemind.DHT")
        instance("prefix", prefix, str, "give the string under which peers average together")
        averaging_alpha = finite("averaging_alpha", averaging_alpha)
        if allreduce_timeout is not None:
            allreduce_timeout = seconds("allreduce_timeout", allreduce_timeout)
        client_mode = dht.client_mode if client_mode is None else client_mode
        _check(initial_group_bits, client_mode, auxiliary, target_group_size, min_group_size)
        if client_mode and allow_state_sharing:
            raise UsageError("a peer in client mode cannot share its state: leave allow_state_sharing out")
        if target_group_size is not None and target_group_size > GROUP_MAX:
            log.info("%s: target_group_size is %d, groups have up to %d members", prefix, target_group_size, GROUP_MAX)
            target_group_size = GROUP_MAX
        self.client_mode = client_mode
        self.mode = AveragingMode.CLIENT if client_mode else AveragingMode.AUX if auxiliary else AveragingMode.NODE
        self.target_group_size, self.min_group_size = target_group_size, min_group_size
        self.matchmaking_kwargs = {"min_matchmaking_time": min_matchmaking_time, "target_group_size": target_group_size}
        self.last_updated: float = -float("inf")
        """When a round last changed the tensors, as `get_dht_time` counts."""
        self.last_outcome: Outcome | None = None
        """Of the last round: who is in the mean, and who is missing."""
        self.next_round = -1
        """Number of the round that the next step joins, where rounds are numbered; see `Entry.round`."""
        for what, given in (("compression", compression), ("state_compression", state_compression)):
            if not isinstance(given, CompressionBase):
                raise UsageError(
                    f"{what} is {given!r:.60}: give an object of hivemind.compression, such as Float16Compression()"
                )
        self._matchmaking_s = seconds("min_matchmaking_time", min_matchmaking_time or 0.0)
        self._averaging_alpha, self._allreduce_timeout = averaging_alpha, allreduce_timeout
        tensors = _checked(averaged_tensors)
        self.total_size = sum(t.numel() for t in tensors)
        codecs = [compression.codec_for(info) for info in tensor_infos or infos_of(tensors)]
        full = [(i, codec) for i, (tensor, codec) in enumerate(zip(tensors, codecs, strict=True)) if tensor.numel()]
        self._of = {codec: [i for i, c in full if c == codec] for codec in sorted({c for _, c in full})}
        """Indices of the tensors that have elements, by codec."""
        self._averaging = threading.Lock()
        self._steps: set[StepControl] = set()
        share = not client_mode and not auxiliary if allow_state_sharing is None else allow_state_sharing
        entry = Entry(
            initial_group_bits,
            self.mode.value,
            schema_of(tensors, codecs, self._scheme),
            priority=0.0 if share else None,
        )
        super().__init__(tensors, dht, prefix, entry, state_compression, tensor_infos)
        if start:
            self.run_in_background()

    def shutdown(self) -> None:
        """Cancel the steps on their way, and be no averager any more; the DHT goes on. Idempotent."""
        for control in list(self._steps):
            control.cancel()
        super().shutdown()

    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: Literal[True] = True,
    ) -> dict[PeerID, Any]: ...

    @overload
    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        *,
        wait: Literal[False],
    ) -> StepControl: ...

    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> dict[PeerID, Any] | StepControl:
        """Find a group and average once. Returns {peer id: what it gathered}, or with wait=False a StepControl.

        gather: a small value for the others of the group. scheduled_time: until when a group waits for more members
        (`get_dht_time`); default: in `min_matchmaking_time` seconds. weight: in the mean; default 1. timeout: seconds;
        until then a step that failed is tried again, if allow_retries. require_trigger: the all-reduce waits for
        `StepControl.allow_allreduce`. AllreduceException: there was no group, or no mean.
        """
        if wait and require_trigger:
            raise UsageError("a step that waits cannot wait for a trigger, too: use wait=False")
        if self.mode is AveragingMode.AUX and weight is not None:
            log.warning("this averager is auxiliary: its weight changes nothing")
        now = get_dht_time()
        scheduled = now + self._matchmaking_s
        scheduled = scheduled if scheduled_time is None else seconds("scheduled_time", scheduled_time)
        deadline = now + seconds("timeout", timeout) if timeout is not None else float("inf")
        if not (scheduled < deadline or scheduled_time is None):
            raise UsageError(f"the step is scheduled for {scheduled - now:g} s from now, later than its timeout")
        control = StepControl(scheduled, deadline, allow_retries, 1.0 if weight is None else weight, self.next_round)
        self.directory.refresh()
        data = self.serializer.dumps(gather)
        if not require_trigger:
            control.allow_allreduce()
        self._steps.add(control)
        in_background(lambda: self._run(control, data), "step")
        if not wait:
            return control
        gathered: dict[PeerID, Any] = waited(control)
        return gathered

    def _run(self, control: StepControl, data: bytes) -> None:
        """The step, on a thread of its own."""
        try:
            while not control.done():
                try:
                    gathered = self._attempt(control, data)
                    control.stage = AveragingStage.FINISHED
                    if gathered is not None and not control.cancelled():
                        control.set_result(gathered)
                except (SwarmClosed, UsageError):
                    raise
                except DlcError as error:
                    if control.cancelled():
                        return
                    if not control.allow_retries or control.get_timeout() <= 0.0:
                        raise
                    log.warning("%s: %s; trying again", self.prefix, error)
        except BaseException as error:
            control.stage = AveragingStage.FINISHED
            if not control.cancelled():
                control.set_exception(error)
        finally:
            control.stage = AveragingStage.FINISHED
            self._steps.discard(control)

    def _attempt(self, control: StepControl, data: bytes) -> dict[PeerID, Any] | None:
        """One group and one all-reduce; None: cancelled."""
        if not control.triggered:
            control.stage = AveragingStage.AWAITING_TRIGGER
        if not control.wait_for_trigger():
            if control.cancelled():
                return None
            raise AllreduceException(f"{self.prefix}: the all-reduce was not allowed before its deadline")
        control.stage, control.began_matchmaking = AveragingStage.LOOKING_FOR_GROUP, True
        with self._averaging:
            before = self._snapshot()
            parts = list(before)
            outcome = self._average(control, parts, data)
            if outcome is None:
                if control.cancelled():
                    return None
                raise AllreduceException(f"{self.prefix}: fewer than {self.min_group_size} peers came together in time")
            if not control.set_running_or_notify_cancel():  # from here on it cannot be cancelled
                return None
            self._take(before, parts, outcome, control.number)
        return {PeerID(peer): self._gathered(peer, raw) for peer, raw in outcome.data.items()}

    def _gathered(self, peer: str, raw: bytes) -> Any:
        try:
            return self.serializer.loads(raw)
        except ValueError:
            log.warning("%s: what %s gave to be gathered cannot be read; None stands for it", self.prefix, peer[:8])
            return None

    def _average(self, control: StepControl, parts: Parts, data: bytes) -> Outcome | None:
        """Put the mean of each part in its place in the list; None: there was no group."""
        return self.dht.swarm.average(self._key(control), parts, self._terms(control, data))

    def _key(self, control: StepControl) -> str:
        """What those who may average together have in common."""
        return "/".join((key_of(self.prefix), self.entry.schema, self.entry.bits, str(control.number)))

    def _terms(self, control: StepControl, data: bytes) -> Terms:
        entry, directory = self.entry, self.directory
        wait_s = max(control.scheduled_time - get_dht_time(), self._matchmaking_s)

        def formed() -> None:
            control.stage, control.began_allreduce = AveragingStage.RUNNING_ALLREDUCE, True

        return Terms(
            target=self.target_group_size,
            minimum=self.min_group_size,
            data=data,
            weight=control.weight,
            contributes=self.mode is not AveragingMode.AUX,
            owns=self.mode is not AveragingMode.CLIENT,
            keeps_unsaid=self._keeps_unsaid,
            patience_s=max(min(wait_s, control.get_timeout()), PATIENCE_S_MIN),
            budget_s=EXCHANGE_S if self._allreduce_timeout is None else self._allreduce_timeout,
            expected=lambda: directory.expected(entry.bits, control.number),
            when_given_up=lambda end: control.add_done_callback(lambda _: end()),
            formed=formed,
        )

    def _snapshot(self) -> Parts:
        """The tensors as flat vectors, those of each codec in one. Nobody changes them: they are what is sent."""
        with self.get_tensors() as tensors:
            parts = [([tensors[i] for i in indices], codec) for codec, indices in self._of.items()]
            return [
                (flatten_tensors(many, vectors.recycled(sum(t.numel() for t in many))), codec) for many, codec in parts
            ]

    def _take(self, before: Parts, means: Parts, outcome: Outcome, number: int) -> None:
        """Tensors <- means of round `number`; what the caller has changed since the snapshot is kept on top."""
        self.last_outcome = outcome
        if outcome.missing:
            names = ", ".join(f"{peer[:8]} ({why})" for peer, why in outcome.missing.items())
            log.warning("%s: the mean lacks %s", self.prefix, names)
        bits = rotated(self.entry.bits, outcome.members, self.peer_id, self.target_group_size)
        self.announce(bits=bits, round=number + 1 if number >= 0 else number)
        if self.mode is AveragingMode.AUX:
            return
        with self.get_tensors() as tensors, torch.no_grad():
            taken: list[tuple[Tensor, Tensor]] = []
            for (old, codec), (mean, _) in zip(before, means, strict=True):
                many = [tensors[i] for i in self._of[codec]]
                if self._averaging_alpha != 1.0:
                    mean = torch.where(old.isfinite(), old + self._averaging_alpha * (mean - old), mean)
                sizes = [t.numel() for t in many]
                for tensor, was, new in zip(many, torch.split(old, sizes), torch.split(mean, sizes), strict=True):
                    now = _flat(tensor)
                    taken.append((tensor, new if same_bits(now, was) else carry(now.clone(), was, new)))
            for tensor, new in taken:  # after all were looked at: tied ones share what is written
                unflatten_into(new, [tensor])
            self.last_updated = get_dht_time()


def _flat(tensor: Tensor) -> Tensor:
    """As a fp32 CPU vector: itself where it is one, otherwise a copy."""
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.detach().view(-1) if plain else flatten_tensors([tensor])


def _checked(averaged: Sequence[Tensor]) -> tuple[Tensor, ...]:
    tensors = writable_tensors(averaged)
    if any(tensor.grad_fn is not None for tensor in tensors):
        raise UsageError("averaged_tensors must be parameters or tensors without a graph")
    if not sum(tensor.numel() for tensor in tensors):
        raise UsageError("averaged_tensors must hold at least one element")
    return tuple(tensors)


def _check(bits: str, client_mode: bool, auxiliary: bool, target: int | None, minimum: int) -> None:
    check_bits(bits)
    if client_mode and auxiliary:
        raise UsageError("a peer in client mode computes nothing, so it cannot be auxiliary")
    whole("min_group_size", minimum, 1)
    if target is not None and whole("target_group_size", target, 1) < minimum:
        raise UsageError(f"min_group_size is {minimum}, target_group_size {target}: it must be 1 ... target_group_size")
    if minimum > GROUP_MAX:
        raise UsageError(f"min_group_size is {minimum}: groups have up to {GROUP_MAX} members")


__all__ = ["AllreduceException", "AveragingMode", "DecentralizedAverager"]
