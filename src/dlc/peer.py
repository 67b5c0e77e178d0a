"""`Peer`: one member of a swarm, as a library object. Everything else in dlc is built on it.

A peer owns one driver thread, which owns the sockets and the protocol machines; the methods here hand work to that
thread and wait. Joining has two steps: the lobby finds out what the run is (the RunSpec comes from the swarm), then a
node takes part in it. All methods are thread-safe. A forked child must not use its parent's peer.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from dlc.comm.driver import Driver, clock
from dlc.comm.effects import Effect
from dlc.comm.entries import LogState
from dlc.comm.events import BadImage, BulkLost, ContributionDropped, RoundDone, SelfReplaced, Waiting
from dlc.comm.framing import run_tag
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import Voter
from dlc.comm.lobby import Lobby
from dlc.comm.node import Node, NodeConfig
from dlc.comm.security import LinkSecurity, load_run_key
from dlc.comm.service import Service, ServiceNews
from dlc.comm.state import State
from dlc.comm.timeouts import Timeouts
from dlc.comm.transport import Transport
from dlc.comm.wire import pack, unpack
from dlc.errors import RoundTimeout, SwarmClosed, UsageError
from dlc.flat import flatten_tensors
from dlc.handles import Checkpoint, Means, Pending, Position, Reduction, Resume
from dlc.joining import Introduction, Reception, addresses_of, introduce
from dlc.report import RoundReport, waiting_text
from dlc.runspec import RunSpec
from dlc.served import Served, Stopped
from dlc.statedir import Ephemeral, PeerState, StateDir
from dlc.survey import Member, member_of, status

__all__ = ["Checkpoint", "Member", "Peer", "Pending", "Position", "Reduction", "Resume", "status"]

log = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", bound=Service)

PATIENCE_SHARE = 0.5
"""A library all-reduce starts without the others after this share of its time limit; the rest is for the exchange."""
BARRIER_SHARE = 0.75
"""A barrier gives the others this share of its time limit; the rest is for learning who did not come."""

REPLACED = (
    "another process with this peer's identity is newer, so this one has stopped: "
    "give each peer a state directory of its own"
)


class Peer:
    """See `Peer.join`. Use as a context manager, or call `leave`."""

    def __init__(self, driver: Driver, intro: Introduction, on_event: Callable[[object], None] | None) -> None:
        self._driver, self._intro = driver, intro
        self._on_event = on_event
        self._node: Node | None = None
        self._pending: dict[str, Pending] = {}
        self._flat: dict[str, Tensor] = {}
        self._listeners: list[Callable[[ServiceNews], None]] = []
        """Told on the driver thread what services say."""
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self.spec = RunSpec()
        driver.on_event = self._event
        driver.on_stop = self._stopped

    # ---------------------------------------------------------------- joining

    @classmethod
    def join(
        cls,
        peers: Sequence[str] | str = (),
        *,
        run: str | None = None,
        key: str | bytes | Path | None = None,
        spec: RunSpec | None = None,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        state_dir: PeerState | Path | str | None = None,
        found: bool = False,
        insecure: bool = False,
        role: str = "trainer",
        hold: bool = False,
        join_timeout_s: float | None = None,
        resume: Resume | None = None,
        on_event: Callable[[object], None] | None = None,
        timeouts: Timeouts | None = None,
        log: bool = True,
    ) -> Peer:
        """Join the run that `peers` (HOST:PORT) belong to; without `peers`, found one.

        key: the run key (its text, its 32 bytes, or the path of its file). spec: None takes the swarm's. state_dir:
        identity and address book; None keeps them in memory only. hold: return as soon as the RunSpec is known and
        take a seat with `open`; otherwise return as a voter. timeouts: None takes those of the RunSpec; others must be
        the same on every peer. log: False takes part without the replicated log, for what needs no rounds of all
        (`dlc.Group`, `dlc.Gossip`, `dlc.Moshpit`): nothing is founded or voted for, and one peer alone may begin; the
        same on all peers of a run. Raises JoinError (unreachable, wrong key, other RunSpec)
        and UsageError (port taken, no key beyond loopback).
        """
        listed = addresses_of(peers)
        security = LinkSecurity.derive(load_run_key(key), "") if key is not None else None
        state = StateDir(state_dir) if isinstance(state_dir, str | Path) else state_dir or Ephemeral()
        voter = Voter(state.identity.peer, state.next_incarnation(secrets.randbits(32)))
        ident = f"{voter.peer}.{voter.inc}".encode()
        # Who goes on from a checkpoint has its RunSpec: it need not wait in the lobby for those that it knew.
        awaited = _known_addresses(state) if resume is not None and not listed and not found else listed
        transport = Transport(listen, security=security, insecure=insecure, ident=ident, bulk_port=_bulk_port(listen))
        intro = Introduction(state, voter, transport.host, transport.control_port, transport.bulk_port, advertise, role)
        driver = Driver(transport, voter, lambda event: None)
        peer = cls(driver, intro, on_event)
        own = spec.to_bytes() if spec is not None else b""
        lobby = Lobby(intro.record(), run or (spec.run if spec else ""), own, spec.hash if spec else b"", listed)
        try:
            reception = introduce(driver, lobby, listed, spec, run, security is not None, join_timeout_s)
            peer._take_part(reception, awaited, found or not awaited, resume, timeouts, log)
            if log and not hold:
                peer._seat(join_timeout_s)
        except BaseException:
            peer._shut(0.0)
            raise
        return peer

    def _take_part(
        self,
        reception: Reception,
        listed: tuple[str, ...],
        founder: bool,
        resume: Resume | None,
        timeouts: Timeouts | None,
        with_log: bool,
    ) -> None:
        """Leave the lobby: from here on a Node is driven."""
        intro, spec = self._intro, reception.spec
        self.spec = spec
        record = intro.record(reception.observed_host)
        resumed = unpack(resume.log, LogState) if resume is not None else None
        floors = timeouts or spec.timeouts.floors()
        config = NodeConfig(spec.run, spec.hash, spec.to_bytes(), listed, founder, floors, log=with_log)

        def start(now: float) -> None:
            self._node = Node(
                record,
                config,
                sign=intro.sign,
                verify=intro.verify,
                rng=random.Random(secrets.randbits(64)),
                now=now,
                resumed=resumed,
            )
            for address, welcome in reception.answers.items():
                if welcome.record is not None:
                    self._node.slot.answers[address] = welcome.record.voter.peer
            self._driver.install(self._node, run_tag(spec.run, spec.hash), self._node)
            self._perform(self._node.tick(now))
            for met in reception.records:
                self._perform(self._node.members.learn(met, now))

        self._driver.ask(start)

    def _seat(self, timeout_s: float | None) -> None:
        """Wait until this peer is a voter whose channels are in step."""

        def seated() -> bool:
            return self._ask(lambda node, now: self.voter in node.log.state.electorate and node.log.synced)

        self._wait(seated, timeout_s, "this peer has no seat in the swarm yet")

    # ---------------------------------------------------------------- machines outside the log

    def serve(self, make: Callable[[Node], S]) -> Served[S]:
        """Let the driver thread carry a machine beside the log; `make(node)` creates it there."""

        def start(node: Node, now: float) -> S:
            service = make(node)
            node.services.add(service)
            return service

        return Served(self, self._ask(start))

    # ---------------------------------------------------------------- who and where

    @property
    def voter(self) -> Voter:
        return self._intro.voter

    @property
    def id(self) -> str:
        return self._intro.voter.peer

    @property
    def address(self) -> str:
        """HOST:PORT that others dial."""
        return self._ask(lambda node, now: node.members.own.control[0])

    @property
    def run(self) -> str:
        return self.spec.run

    @property
    def state_path(self) -> Path | None:
        return self._intro.state.path

    def members(self) -> list[Member]:
        """Everyone known, this peer included, as seen from here."""
        return self._ask(
            lambda node, now: [
                member_of(r, node.members.alive(r.voter), r.voter == node.me) for r in node.members.records()
            ]
        )

    def describe(
        self, *, speed: float | None = None, eta_s: float | None = None, status: dict[str, Any] | None = None
    ) -> None:
        """Tell others my speed (tokens/s), the seconds until my next contribution, and a small status for people."""
        changes: dict[str, Any] = {}
        if speed is not None:
            changes["speed"] = float(speed)
        if eta_s is not None:
            changes["eta_s"] = float(eta_s)
        if status is not None:
            changes["status"] = json.dumps(status).encode()
        self._act(lambda node, now: node.describe(now, **changes))

    # ---------------------------------------------------------------- channels with state

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

        Returns when the state is in step and this peer is a voter. Raises RoundTimeout after `timeout_s`, UsageError
        if a state is attached and in step already; after a RoundTimeout one may try again.
        """
        grid = Grid(state.numel, chunk_elems, codec)

        def attach(node: Node, now: float) -> list[Effect]:
            if channel in node.log.attached and node.log.is_open(channel) and node.log.synced:
                raise UsageError(
                    f"this peer has a state on channel {channel!r} already: "
                    "give a second training another channel, or a Peer of its own"
                )
            return node.attach(channel, state, grid, lease_len, now)

        self._act(attach)

        def ready() -> bool:
            return self._ask(
                lambda node, now: (
                    self.voter in node.log.state.electorate and node.log.is_open(channel) and node.log.synced
                )
            )

        self._wait(ready, timeout_s, f"channel {channel!r} is not in step yet")
        return self.position(channel)

    def position(self, channel: str) -> Position:
        return self._ask(lambda node, now: _position(node, channel))

    def pull(self, channel: str, out: Tensor) -> Position:
        """Copy the channel's outer parameters (fp32) into `out`, together with the position they belong to."""

        def read(node: Node, now: float) -> Position:
            state: Any = node.log.attached[channel].state
            state.read(out)
            return _position(node, channel)

        return self._ask(read)

    def contribute(
        self,
        channel: str,
        vector: Tensor,
        *,
        weight: float,
        upto: int = 0,
        norm: float = 0.0,
        after: int | None = None,
    ) -> Pending:
        """Offer a frozen fp32 CPU vector to the next round of an open channel; it must not change until done.

        `norm`: of the vector, which is then clipped to the median of the norms told for this round; 0: it is not.
        `after`: the round that the caller has seen last. If another one is past by now, nothing is offered: the
        Pending is done, and `overtaken`.
        """
        grid = self._ask(lambda node, now: node.log.attached[channel].grid)
        return self._offer(channel, vector, grid, weight, upto, 0.0, None, norm, after)

    def withdraw(self, channel: str) -> bool:
        """Take back what was offered to the channel's next round, so that it may change and be offered again.

        False: nothing is offered, or a plan may name it already; then its round has to be waited for.
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
            attached = node.log.attached[channel]
            log_state = node.log.state
            return Checkpoint(
                pack(log_state), log_state.round_of(channel), log_state.tokens, attached.digest, attached.state.export()
            )

        self._save_address_book()
        return self._ask(take)

    # ---------------------------------------------------------------- library all-reduce

    @overload
    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        name: str = "default",
        codec: str = "fp16",
        timeout_s: float = 60.0,
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
        async_op: Literal[True],
    ) -> Reduction: ...

    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        name: str = "default",
        codec: str = "fp16",
        timeout_s: float = 60.0,
        async_op: bool = False,
    ) -> RoundReport | Reduction:
        """Replace `tensors` (fp32, bf16, fp16; CPU or CUDA), in place, by their weighted mean over the peers.

        All peers call it with the same shapes and the same `name`. Peers that are not ready within half of `timeout_s`
        are left out and named in the report. Raises RoundTimeout (the tensors are unchanged), SwarmClosed, UsageError.

        codec: "fp32", "fp16", "bf16", "int8" or "int4". The last two round each contribution, and the mean, to steps of
        1/127 and 1/7 of the greatest of 256 elements. Unlike `DiLoCo`, this call keeps nothing of that for the next.

        async_op: return a handle at once. The tensors belong to the round until its `wait` has returned: before that
        they are neither to be changed nor to be read. One call of a name may be on its way at a time; those of other
        names go beside it.
        """
        many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not many or not sum(t.numel() for t in many):
            raise UsageError("all_reduce needs at least one element")
        if not weight >= 0 or weight == float("inf"):
            raise UsageError(f"weight is {weight}: it must be a finite number that is not negative")
        reduction = self._reduce(name, many, weight, codec, PATIENCE_SHARE * timeout_s)
        return reduction if async_op else _waited(reduction, timeout_s)

    def barrier(self, name: str = "default", *, timeout_s: float = 60.0) -> None:
        """Wait until all trainers of the run that are alive have called it with this name.

        RoundTimeout: some have not; it names them, where they are known.
        """
        reduction = self._reduce(f"barrier/{name}", [torch.zeros(1)], 1.0, "fp32", BARRIER_SHARE * timeout_s)
        report = _waited(reduction, timeout_s)
        absent = [missing.peer[:8] for missing in report.missing if missing.reason in ("late", "not ready")]
        if absent:
            raise RoundTimeout(f"barrier {name!r}: {', '.join(absent)} did not come within {timeout_s:g} s")

    def _reduce(self, name: str, many: list[Tensor], weight: float, codec: str, patience_s: float) -> Reduction:
        vector, own = self._flat_of(name, many)
        grid = Grid(vector.numel(), usual_chunk_elems(vector.numel()), codec)
        pending = self._offer(name, vector, grid, weight, 0, patience_s, Means(vector))

        def cancel() -> bool:
            def act(node: Node, now: float) -> bool:
                if pending.done:
                    return False
                if node.withdraw(name):
                    self._pending.pop(name, None)
                return True  # or else it may be decided with what was sent, but the caller's memory is his again

            return self._ask(act)

        def keep() -> None:
            self._flat[name] = vector

        return Reduction(pending, vector, many if own else [], codec, cancel, keep)

    def _flat_of(self, name: str, many: list[Tensor]) -> tuple[Tensor, bool]:
        """One fp32 CPU vector with the values of `many`, and whether it is memory of our own.

        A single tensor of that form is used as it is. Other vectors are kept from round to round: a fresh one costs
        more in page faults than the copy itself.
        """
        (first, *rest) = many
        if not rest and first.dtype == torch.float32 and first.device.type == "cpu" and first.is_contiguous():
            return first.detach().view(-1), False
        kept = self._flat.pop(name, None)
        numel = sum(t.numel() for t in many)
        return flatten_tensors(many, kept if kept is not None and kept.numel() == numel else None), True

    def _offer(
        self,
        channel: str,
        vector: Tensor,
        grid: Grid,
        weight: float,
        upto: int,
        patience_s: float,
        sink: Means | None,
        norm: float = 0.0,
        after: int | None = None,
    ) -> Pending:
        if vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
            raise UsageError("a contribution must be a contiguous float32 vector on the CPU")
        pending = Pending(channel)
        weight, norm = float(weight), float(norm)  # an int has other bytes, and so an entry of another hash

        def act(node: Node, now: float) -> list[Effect]:
            if after is not None and node.log.state.round_of(channel) != after:
                pending.overtaken = True
                pending.finish(None, False)
                return []
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
            )
            self._pending[channel] = pending
            return effects

        self._act(act)
        return pending

    # ---------------------------------------------------------------- leaving

    def leave(self, timeout_s: float = 5.0) -> None:
        """Announce the leave, deliver what is queued, and end the driver thread. Idempotent."""
        if self._closed:
            return
        if self._driver.running and self._node is not None:
            try:
                self._save_address_book()
                self._act(lambda node, now: node.leave(now))
            except SwarmClosed:
                log.debug("the driver had ended before the leave")
        self._shut(timeout_s)

    close = leave

    def _shut(self, timeout_s: float) -> None:
        self._closed = True
        self._driver.stop(max(timeout_s, 0.1))
        self._stopped()
        self._intro.state.close()

    def _stopped(self) -> None:
        """The driver has ended: nobody may wait for it any more."""
        for listener in tuple(self._listeners):
            listener(Stopped(self._closed_error()))
        while self._pending:
            self._pending.popitem()[1].finish(None, False, self._closed_error())
        with self._changed:
            self._changed.notify_all()

    def _closed_error(self) -> SwarmClosed:
        """Why nothing more can come of this peer."""
        error = self._driver.error
        if isinstance(error, SwarmClosed):
            return SwarmClosed(str(error))
        return SwarmClosed(f"the peer stopped on an error: {error}" if error else "the peer has left")

    def _save_address_book(self) -> None:
        known = self._ask(lambda node, now: [r for r in node.members.records() if r.voter != node.me])
        book = {r.voter.peer: {"addresses": list(r.control), "left": r.left} for r in known}
        try:
            self._intro.state.save_address_book(book)
        except OSError as error:  # a full disk: the run is worth more than the address book
            log.warning("the address book could not be written (%s); the old one stays", error)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    # ---------------------------------------------------------------- inside

    def _ask(self, fn: Callable[[Node, float], T]) -> T:
        """Run `fn(node, now)` on the driver thread."""
        if os.getpid() != self._pid:
            raise UsageError("a forked process must not use its parent's peer; join in the child instead")

        def run(now: float) -> T:
            if self._node is None:
                raise SwarmClosed("the peer is not part of a run")
            return fn(self._node, now)

        return self._driver.ask(run)

    def _act(self, fn: Callable[[Node, float], list[Effect]]) -> None:
        self._ask(lambda node, now: self._perform(fn(node, now)))

    def _perform(self, effects: list[Effect]) -> None:
        self._driver.perform(effects)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Wait until `condition` holds; it is looked at again after every event."""
        deadline = None if timeout_s is None else clock() + timeout_s
        while not condition():
            if self._driver.error is not None or self._closed:
                raise self._closed_error()
            left = 0.25 if deadline is None else min(0.25, deadline - clock())
            if left <= 0:
                raise RoundTimeout(f"{what} after {timeout_s:g} s")
            with self._changed:
                self._changed.wait(left)

    def _event(self, event: object) -> None:
        """On the driver thread."""
        if isinstance(event, RoundDone):
            pending = self._pending.pop(event.report.channel, None)
            if pending is not None:
                pending.misfit = "" if event.fits else event.grid
                pending.included = event.included
                pending.finish(event.report, event.counted)
        elif isinstance(event, ContributionDropped):
            pending = self._pending.pop(event.channel, None)
            if pending is not None:
                pending.finish(None, False)
        elif isinstance(event, SelfReplaced):
            self._driver.stop(0.0, SwarmClosed(REPLACED))
        elif isinstance(event, BulkLost):
            names = ", ".join(v.peer[:8] for v in event.voters)
            log.warning("%s answers pings, but its bulk does not pass: is its second port (control + 1) open?", names)
        elif isinstance(event, BadImage):
            log.warning("the state that %s sent is not the one it named; another is asked", event.donor.peer[:8])
        elif isinstance(event, Waiting):
            log.warning("waiting: %s", waiting_text(event.reason, event.peers, event.left_s))
        elif isinstance(event, ServiceNews):
            for listener in tuple(self._listeners):
                listener(event)
            return
        if self._on_event is not None:
            self._on_event(event)
        with self._changed:
            self._changed.notify_all()


def _waited(reduction: Reduction, timeout_s: float) -> RoundReport:
    """The report; after a time-out or Ctrl-C nothing of the reduction touches the caller's tensors any more."""
    try:
        return reduction.wait(timeout_s)
    except RoundTimeout:
        if reduction.cancel():
            raise
        return reduction.wait(0)  # committed at the last moment
    except KeyboardInterrupt:
        reduction.cancel()
        raise


def _position(node: Node, channel: str) -> Position:
    state = node.log.state
    head = state.base(channel)
    return Position(state.round_of(channel), state.tokens, head, node.lease(), node.log.digest(channel))


def _known_addresses(state: PeerState) -> tuple[str, ...]:
    """A peer that goes on from a checkpoint without --peers looks for those that it knew and that had not left."""
    book = state.load_address_book()
    return tuple(known["addresses"][0] for known in book.values() if known["addresses"] and not known["left"])


def _bulk_port(listen: str) -> int:
    """The port after the control port, so that a firewall needs two neighbours; a free one where that is free."""
    port = listen.rpartition(":")[2]
    return int(port) + 1 if port.isdigit() and 0 < int(port) < 65535 else 0
