"""`Gossip`: averaging with a few neighbours at a time, without rounds, barriers or a log.

    gossip = dlc.Gossip(peer, graph="random-pairs")
    for step, batch in enumerate(loader):
        ...
        if step % every == 0:
            report = gossip.step(list(model.parameters()))

Each step gives shares of this peer's mass to its neighbours, takes in what came from others, and writes the estimate of
the mean into the tensors (push-sum; `dlc.comm.gossip` says what happens to a share that gets lost).
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from dlc.arguments import joined, number, seconds
from dlc.collectives import refuse_sparse
from dlc.comm.board import DIRECT_MAX, TTL_S_MAX
from dlc.comm.clock import clock
from dlc.comm.detours import Detours
from dlc.comm.effects import Effect
from dlc.comm.gossip import Arrivals, GossipNews, absorb, give_away
from dlc.comm.gossip import Gossip as Machine
from dlc.comm.graphs import GRAPHS
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import Voter
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Place
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.service import ServiceNews
from dlc.comm.sketch import Trail, from_bytes, sketch, to_bytes
from dlc.comm.strides import Strides
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError, UsageError
from dlc.flat import finite, flatten_tensors, unflatten_into, writable_tensors
from dlc.handles import Flag
from dlc.peer import Peer
from dlc.report import GossipReport
from dlc.served import Stopped

T = TypeVar("T")

WEIGHT_MIN = 2.0**-20
"""Who holds less gives nothing more away before something comes: its neighbours have what it had."""

T_MAX = 1 << 53
"""Nobody makes so many steps: what comes after could not be told at some time."""


class Gossip:
    """One peer's place in a gossip; for one thread at a time.

    graph:  "random-pairs" (each step another partner, both give half), "ring" or "exponential": see `dlc.comm.graphs`.
    codec:  "fp32", "fp16", "bf16", "int8", "int4"; what it rounds off stays with the giver, so no mean moves by it.
    weight: of this peer's vector in the mean that all approach.
    seed:   of the pairs; equal on all peers.

    All peers of one `name` pass tensors of the same shapes. Left open until `close`: however long the pause between two
    steps, the others give to this peer as long as it is up. A peer has one of a name at a time (UsageError).
    """

    def __init__(
        self,
        peer: Peer,
        name: str = "gossip",
        *,
        graph: str = "random-pairs",
        codec: str = "fp16",
        weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        joined(peer)
        if graph not in GRAPHS:
            raise UsageError(f"there is no graph {graph!r}; known: {', '.join(GRAPHS)}")
        limits = "2^-20 to 2^53; only the ratios of the weights matter"
        weight = number("weight", weight, WEIGHT_MIN, WEIGHT_MAX, limits)
        refuse_sparse(codec)
        self.peer, self.name, self.graph, self.codec, self.seed = peer, name, graph, codec, seed
        self.weight = weight
        """Of push-sum, that this peer holds now."""
        self.t, self.t_max = 0, T_MAX
        """The step that was made last; and the last that there can be: who tells of one after it is not followed."""
        self.stopping: Callable[[], bool] | None = None
        """Looked at while a step waits: from true on it waits no longer."""
        self._key = f"gossip/{name}"
        self._mesh = peer.mesh
        self._machine: Machine | None = None
        self._grid: Grid | None = None
        self._news = Flag()
        self._error: BaseException | None = None
        self._closed = False
        self._bytes = (0, 0)
        self._trail = Trail()
        self._strides = Strides()
        self._detours = Detours(graph, peer.voter, seed)
        self._written: Tensor | None = None
        """What the last step has written into the tensors."""
        self._owed = 0.0
        """Weight that is to be given up, once there is so much."""
        self._unsaid: Tensor | None = None
        """By how much the estimate was more than that; None: by nothing, as all of them are fp32."""
        self._mesh.ask(lambda mesh, now: mesh.open(self._key, name))
        self._mesh.listen(self._told)
        self._mesh.ask(lambda mesh, now: mesh.will_gossip(name, True))
        self._post(b"")

    # ---------------------------------------------------------------- a step

    def step(self, tensors: Tensor | Sequence[Tensor], *, wait_s: float = 10.0, keep_s: float = 60.0) -> GossipReport:
        """Give shares to this step's neighbours, take in what came, and write the estimate into `tensors`, in place.

        What the tensors changed by since the last step is this peer's own work: it enters the mean with the weight that
        this peer has with all that came by now. What tensors of bf16 or fp16 cannot say of the estimate is kept here.

        wait_s: how long to wait for the gifts of those who give to this peer in this step, while they are up, and for
        its own to be taken by those who are up. 0: take what is there; what comes later is taken in by the next step.
        keep_s: a gift of which nothing has gone to its taker for so long is withdrawn, and comes back; one that gets on
        goes on into later steps. Nothing is given to a peer before its last gift is settled.
        Raises UsageError (other shapes than before; NaN or Inf; closed): nothing was given or taken then. After Ctrl-C,
        or SwarmClosed, the tensors hold what this peer has by then: no mass is lost, the next step goes on from there.
        """
        if self._closed:
            raise UsageError(f"the gossip {self.name!r} is closed, and its mass is gone: make another dlc.Gossip")
        self._mesh.check_may_wait()
        began, wait_s, keep_s = clock(), seconds("wait_s", wait_s), seconds("keep_s", keep_s)
        many = writable_tensors(tensors)
        if not sum(t.numel() for t in many):
            raise UsageError("there is nothing to average: the tensors have no element")
        z = flatten_tensors(many)
        if not finite(z):
            raise UsageError("the tensors hold NaN or Inf, which no neighbour would take: nothing was given or taken")
        machine, grid = self._begun(z.numel())
        members = self._members()
        every = 1 + len(members) // DIRECT_MAX  # the more peers, the less often each tells all others
        self.t = max([self.t + 1, *(place.t for place in members.values() if place.t <= self.t_max)])
        self._strides.step({voter: place.made for voter, place in members.items()}, every)
        took: dict[str, float] = {}
        returned: dict[str, str] = {}
        everybody = sorted([*members, self.peer.voter])
        apart = set(self._mesh.ask(lambda mesh, now: mesh.ground.apart()))

        own: Tensor | None = None
        begun = False

        def exchange() -> tuple[Arrivals, list[tuple[Voter, float]]]:
            nonlocal own, begun
            own, self._written, begun, held = self._written, None, True, self.weight
            if own is not None:
                own.neg_().add_(z)
            if self._unsaid is not None:
                z.add_(self._unsaid)
            arrivals = self._absorb(machine, grid, z, took, returned)
            came = sum(share.weight for share in (*arrivals.taken, *arrivals.returned))
            if own is not None and came:  # it was made by the whole of this peer, what was on its way here included
                z.add_(own, alpha=came / (held + came))
            return arrivals, self._give(machine, grid, z, everybody, apart, keep_s)

        try:
            try:
                before, gave = _unbroken(exchange)
                self._open_links(machine, everybody, apart)
                waited = clock()
                self._wait(machine, self._givers(everybody, apart, took), wait_s)
                waited = clock() - waited
                after = _unbroken(lambda: self._absorb(machine, grid, z, took, returned))
            finally:
                if begun:
                    self._write(z, many, own)
        except BaseException:
            if begun:  # Ctrl-C may have come in the midst of that, and the weight is what it is by now
                self._write(z, many, own)
            raise
        mine = sketch(z, self.seed)
        self._trail.add(self.t, mine)
        if self._strides.made % every == 0:
            self._post(to_bytes(mine))
        others = [(place.t, from_bytes(place.sketch)) for place in members.values()]
        bytes_before, self._bytes = self._bytes, (machine.bytes_sent, machine.bytes_received)
        return GossipReport(
            name=self.name,
            t=self.t,
            peers=len(members) + 1,
            gave={voter.peer: weight for voter, weight in gave},
            took=took,
            returned=returned,
            unsettled=self._ask(lambda: sum(share.weight for share in machine.unsettled)),
            weight=self.weight,
            overdrawn=before.overdrawn + after.overdrawn,
            unsure=before.unsure + after.unsure,
            distance=self._trail.distance(others),
            bytes_sent=self._bytes[0] - bytes_before[0],
            bytes_received=self._bytes[1] - bytes_before[1],
            seconds=clock() - began,
            waiting_s=waited,
        )

    def close(self) -> None:
        """Take part no longer: the mass that this peer holds is gone from the mean of the others, and what it has given
        that nobody has taken yet, which is withdrawn (`GossipReport.unsettled`). Who leaves without this stays until
        that is taken. The others' weights stay right: it is the mean of what they hold. Idempotent."""
        if self._closed:
            return  # another one may have the name by now
        self._closed = True
        self._mesh.unlisten(self._told)
        machine = self._machine
        if machine is not None:
            self._mesh.act(lambda mesh, now: mesh.with_gossip(machine, machine.close, now))
        self._mesh.ask(lambda mesh, now: mesh.will_gossip(self.name, False))
        self._mesh.act(lambda mesh, now: mesh.shut(self._key, now))

    # ---------------------------------------------------------------- mass

    def _write(self, z: Tensor, many: list[Tensor], memory: Tensor | None) -> None:
        """The estimate into the tensors, and keep what they don't say of it. A second time changes nothing."""
        unflatten_into(z, many)
        written = flatten_tensors(many, memory)
        fp32 = {t.dtype for t in many} == {torch.float32}
        self._written, self._unsaid = written, None if fp32 else z - written

    def _absorb(
        self, machine: Machine, grid: Grid, z: Tensor, took: dict[str, float], returned: dict[str, str]
    ) -> Arrivals:
        """Take in what came and what came back, and give up what has to be; returns all that."""
        arrivals: Arrivals = self._ask(machine.arrivals)
        for share in arrivals.taken:
            self.weight = absorb(grid, z, self.weight, share)
            took[share.peer.peer] = took.get(share.peer.peer, 0.0) + share.weight
            self._detours.came(share.peer, share.step)
        for share in arrivals.returned:
            self.weight = absorb(grid, z, self.weight, share)
            returned[share.peer.peer] = share.why
        self._owed += arrivals.overdrawn
        given_up = min(self._owed, max(0.0, self.weight - WEIGHT_MIN))
        self.weight, self._owed = self.weight - given_up, self._owed - given_up
        return arrivals

    def _give(
        self, machine: Machine, grid: Grid, z: Tensor, members: list[Voter], apart: set[Voter], keep_s: float
    ) -> list[tuple[Voter, float]]:
        shares = self._detours.gives(members, self.t, apart)
        if not shares or self.weight < WEIGHT_MIN:
            return []
        due = [(voter, share) for voter, share in shares if self._strides.due(voter)]
        free = set(self._ask(lambda: [voter for voter, _ in due if machine.free(voter)]))
        gifts = [(voter, self.weight * share) for voter, share in due if voter in free]
        if not gifts:
            return []
        payloads, self.weight = give_away(grid, z, self.weight, sum(weight for _, weight in gifts))

        def give(mesh: Mesh, now: float) -> list[Effect]:
            return mesh.with_gossip(machine, lambda: machine.give(gifts, self.t, payloads, keep_s), now)

        self._mesh.act(give)
        for voter, _ in gifts:
            self._strides.gave(voter)
        return gifts

    def _open_links(self, machine: Machine, everybody: list[Voter], apart: set[Voter]) -> None:
        """To those who will be given to by the next step."""
        shares = self._detours.ahead(everybody, self.t + 1, apart)
        next_to = frozenset(voter.peer for voter, _ in shares)
        self._ask(lambda: setattr(machine, "next_to", next_to))

    def _givers(self, everybody: list[Voter], apart: set[Voter], took: dict[str, float]) -> list[Voter]:
        """Whose gifts of this step are to come still. A function of its own, since Python 3.12.1 and 3.13.0 may pass by
        the `finally` of whoever runs a filtered comprehension as Ctrl-C comes."""
        return [v for v in self._detours.waits_for(everybody, self.t, apart) if v.peer not in took]

    def _wait(self, machine: Machine, givers: list[Voter], wait_s: float) -> None:
        """For the gifts of this step to this peer, and for its own to be settled: not for one that is withdrawn, whose
        taker may be down for long."""
        end = clock() + wait_s

        def waiting() -> bool:
            """Whoever stands at this step already, or further, and gives me nothing, will not do so any more."""
            behind = {v for v, place in self._members().items() if place.t < self.t}
            return self._ask(
                lambda: (
                    bool(machine.wanted)
                    or any((v in behind or v in machine.coming) and not machine.arrived_from(v, self.t) for v in givers)
                )
            )

        while self._error is None and clock() < end and not (self.stopping and self.stopping()) and waiting():
            self._news.wait(min(0.25, max(0.0, end - clock())))
            self._news.clear()

    # ---------------------------------------------------------------- the others

    def _members(self) -> dict[Voter, Place]:
        """Who gossips under this name and is up, this peer not among them."""
        found: dict[Voter, Place] = {}

        def read(mesh: Mesh, now: float) -> None:
            for posted in mesh.board.get(self._key).values():
                if posted.author != self.peer.voter and mesh.ground.members.up(posted.author):
                    try:
                        found[posted.author] = unpack(posted.value, Place)
                    except ProtocolError:
                        mesh.ground.dropped[posted.author.peer, "a place that cannot be"] += 1

        self._mesh.ask(read)
        return found

    def _post(self, projection: bytes) -> None:
        """Shown until it is withdrawn: who reads it passes over a peer that is dead or has left."""
        value = pack(Place(self.t, self.weight, projection, self._strides.made))
        self._mesh.act(lambda mesh, now: mesh.post(self._key, value, TTL_S_MAX, now))

    def _begun(self, numel: int) -> tuple[Machine, Grid]:
        if self._machine is None:
            grid = Grid(numel, usual_chunk_elems(numel, self.codec), self.codec)

            def begin(mesh: Mesh, now: float) -> None:  # Ctrl-C may end the wait for it
                if self._machine is None:
                    self._grid, self._machine = grid, mesh.gossip(self.name, grid)

            self._mesh.ask(begin)
        assert self._machine is not None and self._grid is not None
        if numel != self._grid.numel:
            raise UsageError(f"the tensors have {numel} elements, those of the steps before {self._grid.numel}")
        return self._machine, self._grid

    def _ask(self, fn: Callable[[], T]) -> T:
        return self._mesh.ask(lambda mesh, now: fn())

    def _told(self, news: ServiceNews) -> None:
        """On the driver thread."""
        if isinstance(news, Stopped):
            self._error = news.error
        if isinstance(news, Stopped) or (isinstance(news, GossipNews) and news.name == self.name):
            self._news.set()


def _unbroken(change: Callable[[], T]) -> T:
    """Run this to its end, and wait for it even after Ctrl-C: half of it would be mass that nobody has. A second Ctrl-C
    ends that wait, too.

    On a thread of its own, as handlers of signals run on the main one.
    """
    begun, done, over = threading.Lock(), Future[T](), Flag()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            done.set_result(change())
        except BaseException as error:
            done.set_exception(error)
        over.set()

    try:
        _thread.start_new_thread(run, ())  # that of `threading` waits for the thread in a way that Ctrl-C breaks
        over.wait()
    except BaseException:
        if not begun.acquire(blocking=False):  # or else it never begins
            over.wait()
        raise
    return done.result()
