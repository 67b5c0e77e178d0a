"""Channels: what a peer offers to rounds, and the replicated states that the rounds move.

A channel is a name. One with a state (`open`) replicates that state over all peers; one without is averaged once per
round, and nothing of it stays (`dlc.collectives`). Rounds of all channels are entries of one log, so they are decided
one after the other, however many offers are on their way.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from dlc.arguments import instance, seconds
from dlc.comm.driver import Driver
from dlc.comm.effects import Effect
from dlc.comm.encoded import Encoded
from dlc.comm.entries import LogState, Part
from dlc.comm.events import ContributionDropped, RoundDone, Waiting
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.log import Attached, Sink, counted_of
from dlc.comm.node import Node
from dlc.comm.reach import out_of_reach
from dlc.comm.roles import OBSERVER
from dlc.comm.shapes import LEASE_LEN_MAX
from dlc.comm.state import State
from dlc.comm.wire import pack
from dlc.drivercalls import DriverCalls
from dlc.errors import CheckpointError, DlcError, JoinError, SwarmClosed, UsageError
from dlc.handles import Checkpoint, Pending, Position
from dlc.report import waiting_text
from dlc.runspec import RunSpec

_MISSED = (
    "the run has ended, and everybody who has its model has left: it is in the state directories of those who were in "
    "it, as their newest checkpoint; with more rounds, one of them and this peer go on from there"
)


def has_seat(node: Node) -> bool:
    """Whether it votes; an observer never does, and needs no seat."""
    return node.members.own.role == OBSERVER or node.me in node.log.state.electorate


class Channels(DriverCalls):
    """The part of `dlc.Peer` that offers vectors to rounds."""

    spec: RunSpec
    """What all peers of the run agree on."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._pending: dict[str, Pending] = {}
        self._resumed: LogState | None = None
        """Of the checkpoint from which this peer resumed the run."""

    @property
    @abstractmethod
    def voter(self) -> Voter:
        """This process: peer id and incarnation."""

    @abstractmethod
    def _save_address_book(self) -> None:
        """Keep the addresses of all members for the next start."""

    def open(
        self,
        channel: str,
        state: State,
        *,
        codec: str,
        chunk_elems: int,
        lease_len: int = 0,
        timeout_s: float | None = None,
    ) -> Position:
        """Attach a replicated state: opens the channel, or replaces `state` by the swarm's.

        Returns when the state is in step and this peer, unless it is an observer, is a voter. Raises RoundTimeout after
        `timeout_s`, UsageError if a state is attached and in step already, or another channel of the run has leases and
        this one asks for them, CheckpointError if the swarm's is of another kind (tells what differs), JoinError if the
        run has ended (`RunSpec.over`) and nobody has been in reach for `timeouts.evict_s` who holds its state. After an
        error, and after `abandon`, one may try again, with another state.
        """
        grid = Grid(state.numel, chunk_elems, codec)
        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        if not 0 <= lease_len < LEASE_LEN_MAX:
            raise UsageError(
                f"lease_len is {lease_len}: give the blocks of one lease (data.lease_blocks, or a few rounds), "
                f"below {LEASE_LEN_MAX}, or 0 for a channel without"
            )

        def attach(node: Node, now: float) -> list[Effect]:
            before = node.log.attached.get(channel)
            if before is None or not node.log.holds(channel):
                return node.attach(channel, state, grid, lease_len, now)
            if before.abandoned:
                try:
                    return node.hand_on(channel, state, grid, lease_len, now)
                except CheckpointError as error:
                    raise _of_another_kind(channel, str(error)) from None
            raise UsageError(
                f"this peer has a state on channel {channel!r} already: "
                "give a second training another channel, or a Peer of its own"
            )

        missed_run = math.inf

        def ready(node: Node, now: float) -> bool:
            nonlocal missed_run
            if why := node.log.attached[channel].misfit:
                raise _of_another_kind(channel, why)
            running_s = node.ctx.running_s
            missed_run = min(missed_run, running_s) if _missed(node, channel, self.spec) else math.inf
            if running_s - missed_run >= node.members.t_evict_s:
                raise JoinError(_MISSED)
            return has_seat(node) and node.log.holds(channel)

        try:
            self._act(attach)
            self._wait(lambda: self._ask(ready), timeout_s, f"channel {channel!r} is not in step yet")
        except BaseException:
            self.abandon(channel, state)
            raise
        return self.position(channel)

    def abandon(self, channel: str, state: State) -> None:
        """Nobody uses this state any more. The peer still keeps it in step, as others may need it, until `open` puts
        another in its place. Nothing happens where it is not the channel's."""

        def mark(node: Node, now: float) -> None:
            attached = node.log.attached.get(channel)
            if attached is not None and attached.state is state:
                attached.abandoned = True

        with contextlib.suppress(SwarmClosed):
            self._ask(mark)

    def position(self, channel: str) -> Position:
        """Where the channel stands in the log; a channel that nobody opened is at round 0."""
        instance("channel", channel, str, "give its name")
        return self._ask(lambda node, now: _position(node, channel))

    def resumed_at(self, channel: str) -> int:
        """The round of the channel at which this peer resumed the run, as `join(resume=...)` had it, while it stands
        there: the state to `open` is the one that was saved with it. 0: it did not, or the run has gone on."""
        resumed = self._resumed
        if resumed is None or not resumed.round_of(channel):
            return 0
        here = self._ask(lambda node, now: node.log.state.base(channel))
        return resumed.round_of(channel) if here == resumed.base(channel) else 0

    def pull(self, channel: str, out: Tensor) -> Position:
        """Copy the channel's outer parameters (fp32) into `out`, together with the position they belong to."""

        def read(node: Node, now: float) -> Position:
            state: Any = _attached(node, channel).state
            node.ctx.at_length(lambda: state.read(out), 4 * out.numel())
            return _position(node, channel)

        return self._ask(read)

    def contribute(
        self,
        channel: str,
        vector: Tensor | Encoded,
        *,
        weight: float,
        upto: int = 0,
        norm: float = 0.0,
        after: int | None = None,
        patience_s: float = 0.0,
        filling: Filling | None = None,
    ) -> Pending:
        """Offer a frozen fp32 CPU vector to the next round of an open channel; it must not change until done. One that
        was encoded in the channel's grid (`dlc.comm.encoded.Encoded`) takes the memory of its payloads only.

        `upto`: the position in the lease up to which it was trained; 0 without one, or where it brings no samples that
        are not counted yet: each offer is numbered then.
        The same one, with the same weight, is not to be given to other values of the same round.
        `norm`: of the vector, which is then clipped to the median of the norms told for this round; 0: it is not.
        `after`: the round that the caller has seen last. If another one is past by now, nothing is offered: the
        Pending is done, and `overtaken`.
        `patience_s`: how long the round may wait for others that are alive and not ready; the longest that any peer
        names counts. 0: as long as it pays, by what they predict.
        `filling` (`dlc.comm.filling.Filling`): the vector is not final yet. It becomes so while the round goes on, from
        its end to its front, as `filling.reached` says. `filling.stop()` ends that for good: the means of what was not
        sent are those of the others. What takes much longer than `filling.expected_s` is left out in the same way.
        """
        grid = self._ask(lambda node, now: _attached(node, channel).grid)
        return self._offer(channel, vector, grid, weight, upto, patience_s, None, norm, after, filling)

    def counts(self, channel: str) -> bool:
        """For a state, in its `step`: whether the round that moves it is sure to count what this peer offered last.

        False where that is not known, as for rounds that this peer did not vote for, and at any other time.
        """
        return self._look(lambda node, now: _counts(node, channel))

    def withdraw(self, channel: str) -> bool:
        """Take back what was offered to the channel's next round, so that it may change and be offered again.

        False: nothing is offered, or a plan may name it already; then its round has to be waited for, and what is to
        become final meanwhile still may.
        """

        def act(node: Node, now: float) -> bool:
            planned = node.slot.plan is not None and node.slot.plan.entry.channel == channel
            if planned or not node.withdraw(channel):
                return False
            self._pending.pop(channel, None)
            return True

        return self._ask(act)

    def checkpoint(self, channel: str) -> Checkpoint:
        """A consistent copy of the channel's state and the log's, taken between two rounds."""

        def take(node: Node, now: float) -> Checkpoint:
            attached = _attached(node, channel)
            log_state = node.log.state
            images: list[memoryview] = []
            node.ctx.at_length(lambda: images.append(attached.state.export()), attached.state.image_bytes())
            return Checkpoint(
                pack(node.log.saved()), log_state.round_of(channel), log_state.tokens, attached.digest, images[0]
            )

        self._save_address_book()
        return self._ask(take)

    def _offer(
        self,
        channel: str,
        vector: Tensor | Encoded,
        grid: Grid,
        weight: float,
        upto: int,
        patience_s: float,
        sink: Sink | None,
        norm: float = 0.0,
        after: int | None = None,
        filling: Filling | None = None,
    ) -> Pending:
        if isinstance(vector, Encoded):
            if vector.grid != grid:
                raise UsageError(f"the contribution is encoded as {vector.grid}, its channel has {grid}")
        elif vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
            raise UsageError("a contribution must be a contiguous float32 vector on the CPU")
        if filling is not None and filling.numel != vector.numel():
            raise UsageError(f"a filling of {filling.numel} elements for a vector of {vector.numel()}")
        pending = Pending(channel, self._check_may_wait)
        weight, norm = float(weight), float(norm)  # an int has other bytes, and so an entry of another hash

        def act(node: Node, now: float) -> list[Effect]:
            if node.members.own.role == OBSERVER:
                raise UsageError("an observer takes part in no rounds: join as a trainer to be in the mean")
            if after is not None and node.log.state.round_of(channel) != after:
                pending.overtaken = True
                pending.finish(None, False)
                return []
            if channel in self._pending:  # this is a callback, and the end of that offer is still to be told
                raise UsageError(f"channel {channel!r} has a contribution in flight already: wait for its round first")
            pending.t = node.log.state.round_of(channel) + 1
            effects = node.contribute(
                channel,
                vector,
                grid,
                weight=weight,
                upto=upto,
                norm=norm,
                patience_s=patience_s,
                sink=sink,
                now=now,
                filling=filling,
            )
            self._pending[channel] = pending
            return effects

        try:
            self._act(act)
        except DlcError:
            raise  # refused
        except BaseException:  # an interruption, after which it may have been offered, or would be
            with contextlib.suppress(SwarmClosed):
                self._ask(lambda node, now: self._take_back(node, pending))
            raise
        if filling is not None and not pending.overtaken:
            filling.watch(grid.chunk_elems, lambda: self._tell(lambda node, now: node.filled(now)))
        return pending

    def _held_up(self) -> str:
        """What is known to hold up rounds and openings, after a colon: for who has waited in vain."""
        waiting = self._ask(lambda node, now: node.waits.why())
        return f": {why_of(waiting)}" if waiting is not None else ""

    def _take_back(self, node: Node, pending: Pending) -> None:
        if self._pending.get(pending.channel) is pending:
            del self._pending[pending.channel]
            node.withdraw(pending.channel)

    def _over(self, event: RoundDone | ContributionDropped) -> None:
        """Tell whoever waits for this round. On the driver thread."""
        if isinstance(event, ContributionDropped):
            if (dropped := self._pending.pop(event.channel, None)) is not None:
                dropped.finish(None, False)
            return
        pending = self._pending.get(event.report.channel)
        if pending is not None and pending.t == event.report.t:  # not offered by a callback, after that round
            self._pending.pop(event.report.channel, None)
            pending.misfit = "" if event.fits else event.grid
            pending.included = event.included
            # With an earlier offer of ours in it, the present one can be in no round any more without counting twice.
            pending.finish(None if event.older else event.report, event.counted)

    def _all_over(self, error: SwarmClosed) -> None:
        """No round will come any more."""
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread has told of the last one
                self._pending.popitem()[1].finish(None, False, error)


def _missed(node: Node, channel: str, spec: RunSpec) -> bool:
    """The run is over, and nobody in reach has its state, which is not in step here."""
    state = node.log.state
    over = spec.over(state.round_of(channel), state.tokens)
    return over is not None and channel in out_of_reach(node.ctx, node.log)


def why_of(waiting: Waiting) -> str:
    """For people."""
    return waiting_text(waiting.reason, waiting.peers, waiting.left_s, waiting.waited_s, waiting.advice)


def _of_another_kind(channel: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the run's state of channel {channel!r} is of another kind than the one given here: {why}; give "
        "all peers of a run the same model and outer optimizer; this one may open the channel again"
    )


def _counts(node: Node, channel: str) -> bool:
    """The head names the round already, whose results are those that I voted for."""
    mine, accepted = node.exchange.offered.get(channel), node.slot.accepted
    if mine is None or accepted is None or accepted[1].entry.hash != node.log.head:
        return False
    entry = accepted[1].entry
    part = Part(node.me, mine.ready.weight, mine.ready.upto)
    return entry.channel == channel and part in counted_of(entry, node.slot.accepted_results)


def _attached(node: Node, channel: str) -> Attached:
    if channel not in node.log.attached:
        raise UsageError(f"this peer has no state on channel {channel!r}: open the channel first")
    return node.log.attached[channel]


def _position(node: Node, channel: str) -> Position:
    state = node.log.state
    head, known = state.base(channel), state.channel(channel)
    elems = known.chunk_elems if known is not None and known.opened else 0
    return Position(state.round_of(channel), state.tokens, head, node.lease(), node.log.digest(channel), elems)
