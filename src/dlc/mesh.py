"""Averaging without the replicated log: `Group`, an all-reduce among some of the peers, or among those who show up.

    group = dlc.Group(peer, "weights", target_size=4)
    report = group.all_reduce(tensors, weight=samples)      # in place; report.contributors, report.missing

Nothing here needs a seat, a vote or an order of events, so `Peer.join(log=False)` is enough.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, overload

import torch
from blake3 import blake3
from torch import Tensor

from dlc.arguments import above_zero_s, instance, joined, number, seconds
from dlc.collectives import refuse_sparse
from dlc.comm import vectors
from dlc.comm.calls import MISFIT, Call, GroupDone, GroupFailed, GroupFormed, MeetingFailed, Outcome
from dlc.comm.clock import clock
from dlc.comm.effects import Effect
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.meetings import GATHER_BYTES_MAX, PATIENCE_S_MAX
from dlc.comm.mesh import Mesh
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.seating import GROUP_MAX
from dlc.comm.service import ServiceNews
from dlc.errors import DlcError, RoundTimeout, SwarmClosed, UsageError
from dlc.flat import flatten_tensors, unflatten_into, writable_tensors
from dlc.handles import FORKED, Flag, Unpicklable
from dlc.peer import Peer
from dlc.report import Absent, GroupReport, Share
from dlc.served import Stopped

log = logging.getLogger(__name__)

Stage = Literal["waiting", "running", "done", "failed"]
Formed = Callable[[tuple[str, ...]], None]

EXCHANGE_S_MIN = 2.0
"""An exchange has at least this long, however little a time limit leaves of it."""
STOP_LOOK_S, STOP_S = 0.1, 5.0
"""Between two looks at `GroupCall.stopping`; and how long an exchange that has begun goes on after it."""


class GroupCall(Unpicklable):
    """An all-reduce on its way; for one thread. The tensors belong to it until `wait` has returned."""

    def __init__(
        self,
        peer: Peer,
        name: str,
        call: Call,
        tensors: list[Tensor],
        formed: Formed | None = None,
        warned: set[str] | None = None,
    ) -> None:
        """warned: of which misfits no warning is due any more; the others are added to it."""
        self._mesh, self._name, self._call, self._tensors, self._formed = peer.mesh, name, call, tensors, formed
        self._peer, self._warned = peer.id, set[str]() if warned is None else warned
        self._since = clock()
        self._began = self._ended = 0.0
        self._over, self._ending = Flag(), threading.Lock()
        self._pid = os.getpid()
        self._outcome: Outcome | None = None
        self._report: GroupReport | None = None
        self._error: DlcError | None = None
        self.stopping: Callable[[], bool] | None = None
        """Looked at by `wait`: from true on the call is given up, at once while it waits for others to come."""
        self.members: tuple[str, ...] = ()
        """Peer ids of the group, once it is formed."""
        self.misfits: frozenset[str] = frozenset()
        """Peer ids of those who came with another number of elements, or another codec, and so are not in it."""
        try:
            self._mesh.act(self._meet)
        except DlcError:
            raise  # refused
        except BaseException:  # an interruption, after which others would wait for it, and its key be taken
            with contextlib.suppress(SwarmClosed):
                self.cancel()
            raise

    def _meet(self, mesh: Mesh, now: float) -> list[Effect]:
        """On the driver thread. What is told of this key before is of an earlier call: nothing of it is heard."""
        effects = mesh.meet(self._call, now)
        self._mesh.listen(self._told)
        return effects

    @property
    def stage(self) -> Stage:
        """Waiting for the others, averaging, or over."""
        if self._over.is_set():
            return "failed" if self._error is not None else "done"
        return "running" if self.members else "waiting"

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    @property
    def waited_s(self) -> float:
        """Seconds until the group was formed; until the end where none was; until now."""
        return (self._began or self._ended or clock()) - self._since

    def wait(self, timeout_s: float | None = None) -> GroupReport:
        """Wait for the mean and write it into the tensors. Every further call returns the same report.

        RoundTimeout: after `timeout_s` it is still on its way (wait again or `cancel`); or it has ended without a mean,
        and says why: the tensors are unchanged. SwarmClosed: this peer has left. UsageError: in a forked child.
        """
        if os.getpid() != self._pid:
            raise UsageError(FORKED)
        if timeout_s is not None:
            timeout_s = min(seconds("timeout_s", timeout_s), threading.TIMEOUT_MAX)
        if not self.done:
            self._mesh.check_may_wait()
        if not self._comes(timeout_s):
            others = ", ".join(peer[:8] for peer in self.members if peer != self._peer)
            how_far = f"it averages with {others}" if others else "too few have come to form it yet"
            raise RoundTimeout(f"the group {self._name!r} is not done within {timeout_s:g} s: {how_far}")
        if self._error is not None:
            raise self._error
        if self._report is None:
            assert self._outcome is not None
            if self._call.out is not None and self._tensors:
                unflatten_into(self._call.out, self._tensors)
            self._report = self._made(self._outcome)
        return self._report

    def _comes(self, timeout_s: float | None) -> bool:
        """Whether it is over within that time."""
        if self.stopping is None:
            return self._over.wait(timeout_s)
        end, stop_at = math.inf if timeout_s is None else clock() + timeout_s, math.inf
        while not self._over.wait(min(STOP_LOOK_S, max(0.0, end - clock()))):
            if (now := clock()) >= end:
                return False
            if self.stopping():
                stop_at = min(stop_at, now + STOP_S) if self.members else now
                if now >= stop_at:
                    self.cancel()
        return True

    def cancel(self) -> None:
        """Give it up, if it is not over: the tensors are the caller's again, unchanged; others may count them."""
        self._mesh.act(lambda mesh, now: mesh.give_up(self._call, now))
        if not self._over.is_set():
            self._end(RoundTimeout(f"the all-reduce of the group {self._name!r} was cancelled"))

    @property
    def mean(self) -> Tensor | None:
        """Of `Group.begin`, once `wait` has returned: the mean, flat fp32 on the CPU, which is the caller's. None: none
        was wanted."""
        return self._call.out

    @property
    def grid(self) -> Grid:
        """How the vector is cut and encoded."""
        return self._call.grid

    @property
    def without_mine(self) -> frozenset[int]:
        """Once `wait` has returned: chunks of the mean that are without what this peer contributed."""
        return frozenset(self._outcome.without_mine if self._outcome is not None else ())

    @property
    def group(self) -> str:
        """A name that only this group of this key has; empty before there is a mean."""
        return f"{self._outcome.leader}/{self._outcome.nonce}" if self._outcome is not None else ""

    def _told(self, news: ServiceNews) -> None:
        """On the driver thread. A callback may have made this call before the end of the one before it was told."""
        if isinstance(news, GroupFormed) and news.call is self._call:
            self._began, self.misfits, self.members = clock(), news.misfits, news.peers
            if more := news.misfits - self._warned:
                self._warned |= more
                others = ", ".join(sorted(peer[:8] for peer in more))
                log.warning("the group %r averages without %s, who %s", self._name, others, MISFIT)
            formed = self._formed
            if formed is not None:
                try:
                    formed(news.peers)
                except BaseException:  # on the driver's thread, which is not the caller's to end
                    log.exception("the callback `formed` of the group %r failed", self._name)
        elif isinstance(news, GroupDone) and news.call is self._call:
            self._outcome = news.outcome
            self._end(None)
        elif isinstance(news, MeetingFailed | GroupFailed) and news.call is self._call:
            error = RoundTimeout(f"no mean of the group {self._name!r}: {news.why} (the tensors are unchanged)")
            error.__cause__ = news.cause if isinstance(news, MeetingFailed) else None
            self._end(error)
        elif isinstance(news, Stopped):
            self._end(news.error)

    def _end(self, error: DlcError | None) -> None:
        if not self._ending.acquire(blocking=False):  # it is cancelled and the peer leaves, on two threads
            return
        self._error = error
        self._ended = clock()
        self._mesh.unlisten(self._told)
        # Nobody looks at these any more: a vector, and what may hold this call in turn, so that it would stay for long.
        self._call.vector = self._call.expected = self._formed = None
        self._over.set()

    def _made(self, outcome: Outcome) -> GroupReport:
        known, seats = outcome.known, {seat.voter.peer: seat for seat in outcome.seats}
        included = {p: n for p, n in outcome.included.items() if n}
        n_chunks = self._call.grid.n_chunks
        return GroupReport(
            name=self._name,
            contributors=tuple(Share(p, seats[p].weight, n / known) for p, n in sorted(included.items())),
            missing=tuple(
                Absent(p, why, 1.0 - included.get(p, 0) / known) for p, why in sorted(outcome.missing.items())
            ),
            gathered={p: seat.gather for p, seat in seats.items()},
            owned={p: seat.chunks / n_chunks for p, seat in seats.items() if seat.chunks},
            lost=dict(outcome.lost),
            weight=sum(seats[p].weight for p in included),
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            seconds=self._ended - self._since,
            waiting_s=self.waited_s,
        )


def waited(call: GroupCall) -> GroupReport:
    """As `GroupCall.wait`, without a time limit. An interruption cancels the call: others would wait for this peer, and
    its key be taken."""
    try:
        return call.wait()
    except DlcError:
        raise  # it is over
    except BaseException:
        call.cancel()
        raise


def check_gather(gather: object) -> None:
    """UsageError: the members of a group cannot get it."""
    if not isinstance(gather, bytes):
        raise UsageError(f"gather is {type(gather).__name__}: it must be bytes")
    if len(gather) > GATHER_BYTES_MAX:
        raise UsageError(f"gather has {len(gather)} bytes; up to {GATHER_BYTES_MAX} are handed round")


def _ids(peers: Sequence[str]) -> tuple[str, ...]:
    """Sorted, each once. UsageError: they are no ids."""
    many = () if isinstance(peers, str) or not isinstance(peers, Iterable) else tuple(peers)
    if not many or not all(isinstance(peer, str) for peer in many):
        raise UsageError(f"peers is {peers!r:.60}: give a list of the members' ids, as in [peer.id, ...]")
    return tuple(sorted(set(many)))


class Group:
    """An all-reduce among a named set of peers, or among those who show up under one name.

    name:          peers meet under it. Several groups of one name form side by side where `target_size` says so.
    peers:         ids of the members, this one among them; all of them name the same. None: whoever shows up. Where
                   all of them are there and have weight 0, a call ends at once: RoundTimeout.
    target_size:   a group begins as soon as it has so many; None: as soon as all of `peers`, or else all trainers, who
                   live are there: a helper is waited for where it is named. Where peers of one name give several, that
                   of the one that forms the group counts.
    min_size:      fewer are no group for this peer, whatever the others say: RoundTimeout.
    matchmaking_s: who has not come by then is not waited for; a week at most.
    codec:         "fp32", "fp16", "bf16", "int8", "int4", as in `Peer.all_reduce`; equal on all peers. What it rounds
                   off is lost: of parameters that are averaged again and again, changes below its step never add up.
    expected:      called now and then, on the peer's thread: ids of those to wait for, with or without a target_size.
                   What it raises ends the call: RoundTimeout, of which it is the `__cause__`.
    formed:        called with the members as soon as a group is formed, on the peer's thread: it must be quick. What it
                   raises is logged.
    owns:          False: a client, whose link carries its own vector only; others reduce.

    Any number of groups of different names may average at the same time; one name does so once at a time.
    """

    def __init__(
        self,
        peer: Peer,
        name: str,
        *,
        peers: Sequence[str] | None = None,
        target_size: int | None = None,
        min_size: int = 2,
        matchmaking_s: float = 5.0,
        codec: str = "fp16",
        owns: bool = True,
        expected: Callable[[], Collection[str]] | None = None,
        formed: Formed | None = None,
    ) -> None:
        joined(peer)
        if peers is not None:
            peers = _ids(peers)
            if peer.id not in peers:
                raise UsageError(f"the group {name!r} names {len(peers)} peers, but not this one ({peer.id})")
        for what, value, kind in (
            ("target_size", target_size or 0, int),
            ("min_size", min_size, int),
            ("owns", owns, bool),
        ):
            if not isinstance(value, kind):
                raise UsageError(f"{what} is {type(value).__name__}: it must be {kind.__name__}")
        if expected is not None and not callable(expected):
            raise UsageError(f"expected is {type(expected).__name__}: it must be a function; for a list there is peers")
        if target_size is not None and not max(1, min_size) <= target_size <= GROUP_MAX:
            raise UsageError(f"target_size is {target_size}: it must be {max(1, min_size)} (min_size) to {GROUP_MAX}")
        if not 1 <= min_size <= GROUP_MAX:
            raise UsageError(f"min_size is {min_size}: it must be 1 to {GROUP_MAX}")
        matchmaking_s = above_zero_s("matchmaking_s", matchmaking_s, PATIENCE_S_MAX)
        instance("name", name, str, "give the string under which the peers meet")
        refuse_sparse(codec)
        self.peer, self.name, self.codec, self.owns = peer, name, codec, owns
        self.target_size, self.min_size, self.matchmaking_s = target_size, min_size, matchmaking_s
        self.peers = peers
        self._expected = self.peers if expected is None else expected
        self._formed = formed
        self._key = name
        if self.peers is not None:
            self._key += "/" + blake3("\0".join(self.peers).encode()).hexdigest(8)

    @overload
    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        gather: bytes = b"",
        tag: str = "",
        label: str = "",
        contributes: bool = True,
        receives: bool = True,
        timeout_s: float = 60.0,
        async_op: Literal[False] = False,
    ) -> GroupReport: ...

    @overload
    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        gather: bytes = b"",
        tag: str = "",
        label: str = "",
        contributes: bool = True,
        receives: bool = True,
        timeout_s: float = 60.0,
        async_op: Literal[True],
    ) -> GroupCall: ...

    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        gather: bytes = b"",
        tag: str = "",
        label: str = "",
        contributes: bool = True,
        receives: bool = True,
        timeout_s: float = 60.0,
        async_op: bool = False,
    ) -> GroupReport | GroupCall:
        """Replace `tensors` (fp32, bf16, fp16; CPU or CUDA), in place, by their weighted mean over the group.

        Who fails in the middle is left out of what it had not given, and named in the report. Raises RoundTimeout (no
        group, or no mean in time: the tensors are unchanged), SwarmClosed, UsageError.

        gather:      up to 32 KiB that all members get, in the report.
        tag:         only calls of an equal tag meet: a step number, say.
        label:       members with an equal label bring the same vector, and share one weight (Moshpit's grids).
        contributes: False: an auxiliary, which reduces for the others; its tensors tell the sizes only.
        receives:    False: the mean is not wanted here, and the tensors stay as they are; the report tells of those
                     elements that this peer reduced. It returns when nobody needs anything of it any more.
        async_op:    return a `GroupCall` at once.
        """
        many = writable_tensors(tensors)
        if not async_op:
            self.peer.mesh.check_may_wait()
        numel = sum(t.numel() for t in many)
        vector = flatten_tensors(many, vectors.recycled(numel)) if contributes else None
        handle = self._begin(vector, numel, many, weight, gather, tag, label, receives, False, timeout_s)
        return handle if async_op else waited(handle)

    def begin(
        self,
        vector: Tensor,
        *,
        weight: float = 1.0,
        gather: bytes = b"",
        contributes: bool = True,
        receives: bool = True,
        keeps_unsaid: bool = False,
        timeout_s: float = 60.0,
    ) -> GroupCall:
        """As `all_reduce` with async_op, of one flat fp32 vector on the CPU, and without copies of it: it is sent from
        where it lies, others may ask for it after the end, too, so nobody may ever change it again. The mean is another
        vector, `GroupCall.mean`.

        keeps_unsaid: what the codec rounds off of `vector` is added to that mean, and so stays with this peer: of what
        is averaged again and again all would be lost that is below the codec's resolution. Peers' means differ by it.
        """
        instance("vector", vector, Tensor, "give one flat torch tensor")
        plain = vector.dtype == torch.float32 and vector.device.type == "cpu" and vector.is_contiguous()
        if contributes and not (plain and vector.dim() == 1):
            raise UsageError(
                f"vector is {vector.dtype} of shape {tuple(vector.shape)} on {vector.device}: it must be a flat, "
                "contiguous one of float32 on the CPU; all_reduce takes others, too"
            )
        flat = vector if contributes else None
        return self._begin(flat, vector.numel(), [], weight, gather, "", "", receives, keeps_unsaid, timeout_s)

    def _begin(
        self,
        vector: Tensor | None,
        numel: int,
        many: list[Tensor],
        weight: float,
        gather: bytes,
        tag: str,
        label: str,
        receives: bool,
        keeps_unsaid: bool,
        timeout_s: float,
    ) -> GroupCall:
        """The mean of `vector` (None: not contributed), of so many elements, into `many`."""
        if not numel:
            raise UsageError("all_reduce needs at least one element")
        weight, timeout_s = number("weight", weight, 0, WEIGHT_MAX, "0 to 2^53"), seconds("timeout_s", timeout_s)
        check_gather(gather)
        call = Call(
            key=f"{self._key}#{tag}" if tag else self._key,
            grid=Grid(numel, usual_chunk_elems(numel, self.codec, self.peer.spec.chunk_elems), self.codec),
            vector=vector,
            out=vectors.recycled(numel) if receives else None,
            keeps_unsaid=keeps_unsaid and self.codec != "fp32",
            weight=weight,
            owns=self.owns,
            label=label,
            target=self.target_size or 0,
            least=self.min_size,
            expected=self._expected,
            show_to=self.peers if self.target_size is None else None,
            patience_s=self.matchmaking_s,
            budget_s=max(EXCHANGE_S_MIN, timeout_s - self.matchmaking_s),
            gather=gather,
        )
        return GroupCall(self.peer, self.name, call, many, self._formed)
