"""What a `Peer` hands out: positions, checkpoints, and handles on contributions that are on their way."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from dlc.comm import vectors
from dlc.comm.clock import clock
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.ledger import Lease
from dlc.errors import DlcError, RoundLost, RoundTimeout, UsageError
from dlc.flat import flatten_tensors, unflatten_into
from dlc.report import RoundReport

FORKED = "a forked process cannot use its parent's peer: join in the child, or call this in the parent"


class Unpicklable:
    """Base of what is of use in its own process only."""

    def __reduce__(self) -> NoReturn:
        """For `pickle` and `copy.deepcopy`, and so for workers that are spawned."""
        raise TypeError(
            f"a {type(self).__name__} can be neither pickled nor copied, as it holds a peer of this process: "
            "keep it out of what goes to another process, and let that one join with a peer of its own"
        )


LOOK_S = 1.0
"""How often who waits for a flag looks at it: another who waits may have been interrupted as it passed the gate."""


class Flag:
    """A `threading.Event` that Ctrl-C may interrupt anybody's wait for.

    One of those has a lock that its waiter lets go of after an interruption, whether it had taken it again or not: then
    it is that of the thread that sets the event, which fails in the middle of that. Here no thread takes a lock that
    another one needs to go on.
    """

    def __init__(self) -> None:
        self._up = False
        self._gate = threading.Lock()
        """Open, or about to be, where it is up."""
        self._gate.acquire()

    def is_set(self) -> bool:
        """As of a `threading.Event`."""
        return self._up

    def set(self) -> None:
        """As of a `threading.Event`."""
        self._up = True
        self._open()

    def clear(self) -> None:
        """As of a `threading.Event`; for the one thread that waits."""
        self._up = False
        self._gate.acquire(blocking=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """As of a `threading.Event`."""
        end = math.inf if timeout_s is None else clock() + timeout_s
        while not self._up and (left_s := end - clock()) > 0:
            self._gate.acquire(timeout=min(left_s, LOOK_S))
        if self._up:
            self._open()  # for whoever waits as well
        return self._up

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self._gate.release()


@dataclass(frozen=True)
class Position:
    """Where a channel stands in the log, at one moment."""

    t: int
    """Rounds applied."""
    tokens: float
    """Committed by all peers together."""
    head: bytes
    """Hash of the channel's last round, as in its report; of its opening before that."""
    lease: Lease | None
    """What this peer may train; None without leases or without a seat."""
    digest: bytes
    """BLAKE3 of the channel's state."""
    chunk_elems: int = 0
    """Elements per chunk in all of its rounds; 0 while nobody has opened it, and without a log."""


@dataclass(frozen=True)
class Checkpoint:
    """A consistent snapshot of one channel and of the log it belongs to."""

    log: bytes
    t: int
    tokens: float
    digest: bytes
    image: memoryview


class Resume(NamedTuple):
    """What `Peer.join` needs of a saved checkpoint."""

    log: bytes

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Resume:
        """From what `DiLoCo.state_dict(outer=True)` gave; UsageError where it has no outer part."""
        return cls(outer_part(state)["log"].cpu().numpy().tobytes())  # a checkpoint may be loaded onto a GPU


def outer_part(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a saved `DiLoCo` holds of the swarm; UsageError where it was saved without."""
    if "outer" not in state:
        raise UsageError("this state has no outer part to resume from: save state_dict(outer=True)")
    part: Mapping[str, Any] = state["outer"]
    return part


def no_round(channel: str, within_s: float, why: str = "") -> RoundTimeout:
    return RoundTimeout(f"no round of {channel!r} was committed within {round(within_s, 1) or within_s:g} s{why}")


class Pending(Unpicklable):
    """A contribution on its way: done when a round of its channel was committed, with or without it."""

    def __init__(self, channel: str, check_may_wait: Callable[[], None]) -> None:
        """`check_may_wait`: raises where a wait could have no end."""
        self.channel, self._check_may_wait = channel, check_may_wait
        self.t = 0
        """Round of the channel that ends it; 0: nothing was offered."""
        self.report: RoundReport | None = None
        self.counted = False
        self.included: tuple[bool, ...] = ()
        """For each chunk of the round's grid, whether this contribution is in its mean; empty where it is in none."""
        self.misfit = ""
        """What the round averaged, where that was not what this contribution has."""
        self.error: DlcError | None = None
        self.overtaken = False
        """Nothing was offered, because a round had been committed that the caller had not seen."""
        self._event = Flag()
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        """`wait` returns, or raises, at once."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> RoundReport | None:
        """The round's report; None if it was dropped: this peer's state was replaced, or its samples went to others.

        Raises RoundTimeout after `timeout_s`, SwarmClosed if the peer left, UsageError in a forked child, and in a
        callback of `on_event` where it is not done.
        """
        if os.getpid() != self._pid:
            raise UsageError(FORKED)
        if not self.done:
            self._check_may_wait()
        if not self._event.wait(timeout_s):
            raise no_round(self.channel, timeout_s or 0.0)
        if self.error is not None:
            raise self.error
        return self.report

    def finish(self, report: RoundReport | None, counted: bool, error: DlcError | None = None) -> None:
        self.report, self.counted, self.error = report, counted, error
        self._event.set()


class Reduction(Unpicklable):
    """An all-reduce on its way: what `Peer.all_reduce(..., async_op=True)` returns. For one thread."""

    def __init__(
        self,
        pending: Pending,
        vector: Tensor,
        out: list[Tensor],
        grid: Grid,
        cancel: Callable[[], bool],
        keep: Callable[[], None],
        held_up: Callable[[], str],
        announced: Announced | None = None,
        holes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`out`: the tensors, where `vector` is memory of our own; `held_up`: for the message of a RoundTimeout, why;
        `announced`: the tensors may not hold their values yet; `holes`: once the round is over, what has no mean, where
        `vector` does not hold the values of the tensors."""
        self._pending, self._vector, self._out, self._grid = pending, vector, out, grid
        self._cancel, self._keep, self._held_up, self._announced, self._holes = cancel, keep, held_up, announced, holes
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._cancelled or self._pending.done

    @property
    def report(self) -> RoundReport | None:
        """Of the round, once it is over. The tensors are written by `wait`, not before."""
        return self._pending.report

    def ready(self) -> None:
        """The tensors of a call with `expected_s` hold their values now; they are not to be changed before `wait`.

        Of any other call they did from the beginning, and of one that is over or cancelled nothing is taken any more.
        """
        if self._announced is not None and not self.done:
            self._announced.ready()

    def wait(self, timeout_s: float | None = None) -> RoundReport:
        """Wait for the round, and write the mean into the tensors. Every further call returns the same report.

        RoundTimeout after `timeout_s`: it is still on its way, so wait again or `cancel`; it says what holds the round
        up, where that is known. RoundLost: this peer was away, and the others have gone on. SwarmClosed: it has left.
        UsageError: cancelled, others have other shapes or codecs, or the tensors were announced and are not `ready`.
        In all these cases the tensors are unchanged, but those of a call on its way are not the caller's yet.
        """
        if self._cancelled:
            raise UsageError(f"the all-reduce {self._pending.channel!r} was cancelled")
        if self._announced is not None and not (self._announced.given or self._pending.done):
            name = self._pending.channel
            raise UsageError(f"the all-reduce {name!r} was announced: call ready() once its tensors hold their values")
        try:
            report = self._pending.wait(timeout_s)
        except RoundTimeout as late:
            raise RoundTimeout(f"{late}{self._held_up()}") from None
        if report is None:
            raise RoundLost(
                f"the others have gone on from this round of {self._pending.channel!r} while this peer was away, or "
                "decided it with the values of an earlier call that had timed out; the tensors are unchanged: call "
                "again"
            )
        if self._pending.misfit:
            raise UsageError(
                f"the round averaged {self._pending.misfit}, but this call has {self._grid}: all "
                "peers must pass the same shapes and codec (the tensors are unchanged)"
            )
        if self._announced is not None and self._announced.missed:
            self._announced.write()
        elif self._out:
            _fill(self._vector, self._holes, self._out)
            unflatten_into(self._vector, self._out)
            self._out = []
            self._keep()
        return report

    def cancel(self) -> bool:
        """Give the call up: the tensors are the caller's again, unchanged, though others may count what was sent.

        False: it is over already, and `wait` tells how.

        A round may have begun with this call's offer where this peer has not heard of it yet. A call of the same name
        made at once gets that round's report, which names this peer as late, its own values not being those of the
        offer; it names no contributor where all did the same.
        """
        self._cancelled = self._cancelled or self._cancel()
        return self._cancelled


class Announced:
    """The values of a call that names a round before it has them; and its means, if the round goes on without them.

    They would be written over a contribution that its caller still works on: memory of their own is taken then.
    """

    def __init__(self, vector: Tensor, many: list[Tensor], copies: bool, expected_s: float) -> None:
        """`copies`: `vector` is not the memory of `many`."""
        self.filling = Filling(vector.numel(), expected_s)
        self.given = self.missed = False
        self._vector, self._many, self._copies = vector, many, copies
        self._means = vector
        self._holes: list[tuple[int, int]] = []

    def ready(self) -> None:
        """On the caller's thread. Where it is interrupted, or the copy fails, it may be called again."""
        if not self.filling.complete:
            if self._copies:
                flatten_tensors(self._many, self._vector)
            self.given = True
            self.filling.reached(0)

    @property
    def out(self) -> Tensor:
        """Where the means go, asked for once, on the driver's thread, when the round is decided. `Sink`."""
        self.missed = not self.filling.complete
        if self.missed:
            self._means = vectors.empty(self._vector.numel())
        return self._means

    def step(self, t: int, means: Iterator[tuple[int, int, Tensor | None]]) -> None:
        """`Sink`."""
        self._holes = [(start, stop) for start, stop, mean in means if mean is None]

    def write(self) -> None:
        """The means of a round that went on without the values, into the tensors; where there are none, these stay."""
        if self._means is not self._vector:
            _fill(self._means, self._holes, self._many)
            unflatten_into(self._means, self._many)
            self._means = self._vector


class Means:
    """Writes the means of one library round into `out`: over the contribution itself, of which nothing is sent after
    the commit, or elsewhere."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.holes: list[tuple[int, int]] = []
        """What has no mean, and stays as it is in `out`."""

    def step(self, t: int, means: Iterator[tuple[int, int, Tensor | None]]) -> None:
        self.holes += [(start, stop) for start, stop, mean in means if mean is None]  # others are in their place


def _fill(means: Tensor, holes: Sequence[tuple[int, int]], many: list[Tensor]) -> None:
    """Where there is no mean, the values of the tensors."""
    if holes:
        whole = flatten_tensors(many)
        for start, stop in holes:
            means[start:stop] = whole[start:stop]
