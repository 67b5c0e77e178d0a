"""A peer without a network: rounds of which it is the only contributor, and others' rounds when a test says so."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlc.comm.encoded import Encoded
from dlc.comm.events import RoundDone
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.ledger import AWAY_ENTRIES, Lease, Ledger
from dlc.comm.roles import TRAINER
from dlc.errors import RoundTimeout, SwarmClosed
from dlc.report import Missing, RoundReport, Share
from dlc.runspec import RunSpec
from dlc.train.outer import OuterState

ME, OTHER, THIRD = Voter("me", 1), Voter("other", 1), Voter("third", 1)


@dataclass(frozen=True)
class FakePosition:
    t: int
    tokens: float
    head: bytes
    lease: Lease | None
    digest: bytes
    chunk_elems: int = 0


@dataclass(frozen=True)
class FakeMember:
    id: str = "other"
    alive: bool = True
    left: bool = False
    away: bool = False
    depth: int = 0
    tokens: float = 0.0
    channels: tuple[str, ...] = ()
    me: bool = False
    role: str = TRAINER
    status: dict[str, Any] = field(default_factory=dict)


@dataclass
class FakePending:
    """Its round is over at the first `wait` after `slices` others."""

    commit: Callable[[], tuple[RoundReport | None, bool]]
    slices: int
    chunks: tuple[bool, ...] = ()
    """What `included` is if it is counted."""
    report: RoundReport | None = None
    counted: bool = False
    done: bool = False
    overtaken: bool = False
    included: tuple[bool, ...] = ()
    misfit: str = ""

    def wait(self, timeout_s: float | None = None) -> RoundReport | None:
        if self.slices > 0:
            self.slices -= 1
            raise RoundTimeout("not yet")
        if not self.done:
            self.done = True
            self.report, self.counted = self.commit()
            last_only = (*(False for _ in self.chunks[1:]), True)  # too little to be counted
            self.included = self.chunks if self.counted else last_only if self.report is not None else ()
        return self.report


@dataclass(frozen=True)
class FakeCheckpoint:
    log: bytes
    t: int
    tokens: float
    digest: bytes
    image: memoryview


class FakePeer:
    """`misses`: for each of the next contributions that is not counted, the reason; "dropped": by a new state.
    `slices`: for each of the next contributions, how often a wait for it is in vain. `planned`: it cannot be withdrawn.
    `lossy`: what is counted goes through the codec, chunk by chunk. `left_out`: the chunks that then go without us.
    `start_t`: the rounds of a run that was resumed, as they are told before the channel is open. `held`: joined
    with `hold`, it has heard of none of them before it has a seat.
    """

    def __init__(self, spec: RunSpec | None = None, start_t: int = 0) -> None:
        self.id = ME.peer
        self.role = "trainer"
        self.spec = spec or RunSpec()
        self.start_t = start_t
        self.held = False
        self.tokens = 0.0
        self.vectors: list[Tensor] = []
        """All that was offered."""
        self.counted: list[Tensor] = []
        self.weights: list[float] = []
        self.norms: list[float] = []
        self.patiences_s: list[float] = []
        self.uptos: list[int] = []
        self.misses: list[str] = []
        self.slices: list[int] = []
        self.fillings: list[Filling | None] = []
        """Of all that was offered."""
        self.fronts: list[int] = []
        """How they went on, one after the other."""
        self.planned = True
        self.lossy = False
        self.left_out: set[int] = set()
        self.withdrawn = 0
        self.counting = False
        """In the middle of a step by a round that counts us."""
        self._pending: FakePending | None = None
        self.others: list[FakeMember] = []
        self.said: list[dict[str, Any]] = []
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.left = False
        self.rounds, self.head = 0, bytes(2)
        self.round_s = 1000.0
        """From an offer to the commit, as it is told."""
        self.on_contribute: Callable[[], None] = lambda: None
        self.abandoned: list[OuterState] = []

    def open(
        self,
        channel: str,
        state: OuterState,
        *,
        codec: str,
        chunk_elems: int,
        lease_len: int = 0,
        timeout_s: float | None = None,
    ) -> FakePosition:
        self.state, self.ledger = state, Ledger(lease_len).seated([ME])
        self.grid = Grid(state.numel, chunk_elems, codec)
        return self.position(channel)

    def abandon(self, channel: str, state: OuterState) -> None:
        self.abandoned.append(state)

    def take_seat(self, timeout_s: float | None = None) -> None:
        self.held = False

    def position(self, channel: str) -> FakePosition:
        if not hasattr(self, "state"):
            return FakePosition(0 if self.held else self.start_t, self.tokens, self.head, None, b"")
        return FakePosition(self.state.t, self.tokens, self.head, self.ledger.lease(ME), self.state.digest())

    def resumed_at(self, channel: str) -> int:
        return 0

    def pull(self, channel: str, out: Tensor) -> FakePosition:
        self.state.read(out)
        return self.position(channel)

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
    ) -> FakePending:
        upto = upto or -len(self.vectors) - 1
        assert self.ledger.valid(ME, upto) and not self.left
        assert self._pending is None or self._pending.done, "a contribution is in flight already"
        self.on_contribute()
        if after is not None and after != self.state.t:
            return FakePending(lambda: (None, False), 0, overtaken=True)
        self.fillings.append(filling)
        unmade = filling is not None and isinstance(vector, Encoded)  # it has no values yet
        self.vectors.append(torch.full((vector.numel(),), math.nan) if unmade else self.elements(vector).clone())
        self.weights.append(weight)
        self.norms.append(norm)
        self.patiences_s.append(patience_s)
        self.uptos.append(upto)
        frozen, t = self.vectors[-1], self.state.t
        if filling is not None:
            self._front = filling.numel
            filling.watch(1, lambda: self._filled(filling, vector, frozen))

        def commit() -> tuple[RoundReport | None, bool]:
            if self.state.t != t:
                return self._passed, False
            whole = filling is None or filling.complete
            assert whole or (filling is not None and filling.stopped), "its backward is over"
            offered = self.elements(vector) if whole else frozen
            assert not whole or torch.equal(offered, frozen), "the vector changed while it was offered"
            reason = "late" if not whole else self.misses.pop(0) if self.misses else ""
            if reason == "dropped":
                return None, False
            if reason:
                return self.pass_round(reason=reason), False
            self.counting = True
            means = self.means(offered) if self.lossy else [(0, self.state.numel, offered)]
            self.state.step(self.state.t + 1, means)
            self.counting = False
            self.tokens += weight if upto > 0 or not self.ledger.length else 0.0
            self.ledger = self.ledger.committed([(ME, upto)]).seated([ME])
            self.counted.append(frozen)
            report = self.report((Share(ME.peer, weight, 1.0),), ())
            self.events.put(RoundDone(report, True, grid="", fits=True))
            return report, True

        chunks = tuple(chunk not in self.left_out for chunk in range(self.grid.n_chunks))
        self._pending = FakePending(commit, self.slices.pop(0) if self.slices else 0, chunks)
        return self._pending

    def elements(self, vector: Tensor | Encoded) -> Tensor:
        """Of an encoded one what is sent says."""
        if isinstance(vector, Tensor):
            return vector
        coder, chunks = self.grid.coder, range(self.grid.n_chunks)
        return torch.cat([coder.decode(vector.payload(chunk), self.grid.elems(chunk)) for chunk in chunks])

    def counts(self, channel: str) -> bool:
        return self.counting

    def _filled(self, filling: Filling, vector: Tensor | Encoded, frozen: Tensor) -> None:
        """What is final now; the rest still holds something else."""
        new = slice(filling.front, self._front)
        if filling.front < self._front:
            frozen[new], self._front = self.elements(vector)[new], filling.front
        self.fronts.append(filling.front)

    def means(self, vector: Tensor) -> list[tuple[int, int, Tensor | None]]:
        """What an owner makes of our contribution alone."""
        coder, means = self.grid.coder, list[tuple[int, int, Tensor | None]]()
        for chunk in range(self.grid.n_chunks):
            start, stop = self.grid.span(chunk)
            sent = coder.decode(coder.encode(vector[start:stop]), stop - start)
            means.append((start, stop, None if chunk in self.left_out else sent))
        return means

    def withdraw(self, channel: str) -> bool:
        if self.planned or self._pending is None or self._pending.done:
            return False
        self._pending = None
        self.withdrawn += 1
        return True

    def pass_round(self, update: Tensor | None = None, reason: str = "late") -> RoundReport:
        """A round without us."""
        self.state.step(self.state.t + 1, [(0, self.state.numel, update)])
        missing = (Missing(ME.peer, reason, 1.0),)  # type: ignore[arg-type]
        report = self.report((Share(OTHER.peer, 1.0, 1.0),), missing)
        self.events.put(RoundDone(report, False, grid="", fits=True))
        self._passed = report
        return report

    def lose_lease(self) -> None:
        """We are put out of the electorate for long, and back: our blocks are another's now."""
        for _ in range(AWAY_ENTRIES + 1):
            self.ledger = self.ledger.seated([OTHER])
        self.ledger = self.ledger.seated([OTHER, THIRD]).seated([ME, OTHER, THIRD])

    def report(self, contributors: tuple[Share, ...], missing: tuple[Missing, ...]) -> RoundReport:
        self.rounds += 1
        self.head = self.rounds.to_bytes(2, "big")
        head, seconds, weight = self.head.hex(), self.round_s, sum(share.weight for share in contributors)
        return RoundReport("train", self.state.t, head, contributors, missing, weight, 10, 20, seconds, seconds, 0.1, 1)

    def members(self, departed: bool = False) -> list[FakeMember]:
        return [FakeMember(ME.peer, me=True), *self.others]

    def describe(self, **changes: Any) -> None:
        if self.left:
            raise SwarmClosed("this peer has left")
        self.said.append(changes)

    def checkpoint(self, channel: str) -> FakeCheckpoint:
        return FakeCheckpoint(b"the log", self.state.t, self.tokens, self.state.digest(), self.state.export())

    def needed_by(self) -> list[str]:
        return []

    def leave(self, timeout_s: float = 5.0) -> None:
        self.left = True

    def theta(self) -> Tensor:
        out = torch.empty(self.state.size)
        self.state.read(out)
        return out
