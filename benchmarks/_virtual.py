"""Peers of one process without a network: rounds of the true codec, reducer and outer step, at the cost of arithmetic.

Each worker is a thread, and one runs at a time: it goes on until it waits for a round, and the last to offer makes the
mean. Who asks without waiting is told that the round is not over, so that a mean comes as late as its options allow.
Nothing depends on the order in which threads run.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from dlc.comm.encoded import Encoded, payload_of
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.ledger import Lease
from dlc.comm.reducer import ChunkReducer, Workspace
from dlc.comm.state import State
from dlc.errors import RoundTimeout
from dlc.handles import Position
from dlc.report import RoundReport, Share

T = TypeVar("T")
Means = list[tuple[int, int, Tensor | None]]


def mean_of(vectors: Sequence[Tensor | Encoded], weights: Sequence[float], grid: Grid) -> Means:
    """What the owners of the chunks would send back."""
    roster = tuple(Part(Voter(f"{i:02d}", 1), weight, 0) for i, weight in enumerate(weights))
    workspace, means = Workspace(grid), Means()
    for chunk in range(grid.n_chunks):
        start, stop = grid.span(chunk)
        reducer = ChunkReducer(grid, chunk, roster)
        for index, vector in enumerate(vectors):
            reducer.offer(index, payload_of(vector, grid, chunk))
        payload, _ = reducer.close(workspace)
        mean = grid.coder.decode_result(payload, stop - start) if memoryview(payload).nbytes else None
        means.append((start, stop, mean))
    return means


class Stopped(Exception):
    """Another worker ended with an error."""


class Swarm:
    """n workers, all in every round."""

    def __init__(self, n: int) -> None:
        self.turn = threading.Condition()
        """Held by the worker that runs."""
        self.peers = [VirtualPeer(self, f"{index:02d}") for index in range(n)]
        self.image: memoryview | None = None
        self.failed: BaseException | None = None

    def run(self, work: Callable[[VirtualPeer, int], T]) -> list[T]:
        """What each worker returns; the first error of one ends them all."""
        results: dict[int, T] = {}

        def worker(index: int) -> None:
            with self.turn:
                try:
                    results[index] = work(self.peers[index], index)
                except BaseException as error:  # it is raised again below
                    self.failed = self.failed or error
                    self.turn.notify_all()

        threads = [threading.Thread(target=worker, args=(index,), daemon=True) for index in range(len(self.peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return [results[index] for index in range(len(self.peers))]

    def offered(self) -> None:
        """Close the round once all are in it."""
        offers = [peer.offer for peer in self.peers]
        if any(offer is None or offer.means is not None for offer in offers):
            return
        waiting = [offer for offer in offers if offer is not None]
        means = mean_of([o.vector for o in waiting], [o.weight for o in waiting], self.peers[0].grid)
        for offer in waiting:
            offer.means = means
        self.turn.notify_all()


@dataclasses.dataclass
class Offered:
    """A contribution; its peer applies the round when it asks for it."""

    peer: VirtualPeer
    vector: Tensor | Encoded
    weight: float
    means: Means | None = None
    report: RoundReport | None = None
    counted: bool = False
    overtaken: bool = False
    included: tuple[bool, ...] = ()
    misfit: str = ""

    def wait(self, timeout_s: float | None = None) -> RoundReport | None:
        swarm = self.peer.swarm
        if timeout_s == 0.0 and self.report is None:
            raise RoundTimeout("a worker that does not wait hears of no round")
        while self.means is None:
            if swarm.failed is not None:
                raise Stopped("another worker failed") from swarm.failed
            swarm.turn.wait()
        if self.report is None:
            self.report, self.counted = self.peer.apply(self.means), True
            self.included = (True,) * len(self.means)
        return self.report


class VirtualPeer:
    """What a `DiLoCo` needs of a peer. `on_round`: called with the state after each of its rounds."""

    role = "trainer"

    def __init__(self, swarm: Swarm, peer_id: str) -> None:
        self.swarm, self.id = swarm, peer_id
        self.offer: Offered | None = None
        self.tokens, self.sent_bytes, self.rounds = 0.0, 0, 0
        self.on_round: Callable[[State], None] = lambda state: None

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
        self.state, self.grid = state, Grid(state.numel, chunk_elems, codec)
        self.swarm.image = self.swarm.image if self.swarm.image is not None else state.export()
        state.restore(self.swarm.image)
        return self.position(channel)

    def abandon(self, channel: str, state: State) -> None:
        """Nobody opens it again."""

    def describe(self, **_: object) -> None:
        """Nobody listens."""

    def position(self, channel: str) -> Position:
        lease: Lease | None = None
        return Position(self.rounds, self.tokens, self.rounds.to_bytes(4, "big"), lease, self.state.digest())

    def resumed_at(self, channel: str) -> int:
        return 0

    def pull(self, channel: str, out: Tensor) -> Position:
        self.state.read(out)  # type: ignore[attr-defined]
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
        filling: object | None = None,
    ) -> Offered:
        if norm or filling is not None:
            raise NotImplementedError("the virtual swarm does not clip, and takes whole vectors")
        self.offer = Offered(self, vector, weight)
        chunks = (self.grid.span(chunk) for chunk in range(self.grid.n_chunks))
        self.sent_bytes += sum(self.grid.coder.wire_bytes(stop - start) for start, stop in chunks)
        self.swarm.offered()
        return self.offer

    def counts(self, channel: str) -> bool:
        return True  # every round has all workers in it

    def withdraw(self, channel: str) -> bool:
        return False

    def apply(self, means: Means) -> RoundReport:
        shares = tuple(Share(p.id, p.offer.weight, 1.0) for p in self.swarm.peers if p.offer is not None)
        self.rounds += 1
        self.state.step(self.rounds, means)
        weight = sum(share.weight for share in shares)
        self.tokens += weight
        self.on_round(self.state)
        head = self.rounds.to_bytes(4, "big").hex()
        return RoundReport("train", self.rounds, head, shares, (), weight, 0, 0, 0.0, 0.0, 0.0, 1)
