"""`Moshpit`: the mean of many peers by rounds in small groups, without a log.

    moshpit = dlc.Moshpit(peer, group_size=8)
    report = moshpit.average(list(model.parameters()))   # d rounds: exact where nobody fails (report.complete)
    report = moshpit.step(list(model.parameters()))      # one round, of a model that is trained on meanwhile

With N peers in groups of M a round costs each 2 (M - 1) / M vectors of traffic, however many peers there are, and
whoever fails costs its own group a moment (Ryabinin et al. 2021, arXiv 2103.03239). The grid: `dlc.comm.cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from dlc.arguments import above_zero_s, joined, number, seconds, whole
from dlc.collectives import refuse_sparse
from dlc.comm import vectors
from dlc.comm.board import TTL_S_MAX
from dlc.comm.calls import MISFIT, Call, GoneOn
from dlc.comm.cells import Cells, grid_of, lines_of
from dlc.comm.clock import clock
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import PeerId
from dlc.comm.meetings import BOARD_PREFIX, PATIENCE_S_MAX
from dlc.comm.mesh import Mesh
from dlc.comm.moshpit import Course, Leg
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.rotation import Turn, next_turn
from dlc.comm.seating import GROUP_MAX
from dlc.errors import RoundTimeout, UsageError
from dlc.flat import flatten_tensors, unflatten_into, writable_tensors
from dlc.mesh import EXCHANGE_S_MIN, Formed, GroupCall, check_gather, waited
from dlc.peer import Peer
from dlc.places import Places
from dlc.report import GroupReport, MoshpitReport

PLACE_S = TTL_S_MAX
"""A place is shown until it is withdrawn: who reads it passes over a peer that is dead or has left."""
NOT_THERE, GONE_ON = "did not come", "had gone on to a later round"


class Moshpit:
    """One peer's place on the grid; for one thread at a time.

    group_size:    about so many average together (8 where neither is given); dims: or so many rounds to the exact mean.
    matchmaking_s: whoever of a group has not come by then is not waited for.
    codec:         "fp32", "fp16", "bf16", "int8", "int4"; equal on all peers. What it rounds off of a peer's values is
                   lost in each round, unlike with `dlc.Gossip` and a run's strategy "moshpit": between two rounds what
                   changes by less than a step of the codec never adds up.

    All peers of one `name` give the same group_size or dims, and tensors of the same shapes. Left open until `close`:
    however long the pause between two rounds, this peer has its place on the grid as long as it is up. A peer has one
    of a name at a time (UsageError).
    """

    def __init__(
        self,
        peer: Peer,
        name: str = "moshpit",
        *,
        group_size: int | None = None,
        dims: int | None = None,
        matchmaking_s: float = 5.0,
        codec: str = "fp16",
    ) -> None:
        joined(peer)
        if group_size is not None and dims is not None:
            raise UsageError("give group_size or dims, not both: one follows from the other and the number of peers")
        group_size = None if group_size is None else whole("group_size", group_size, 2, GROUP_MAX)
        dims = None if dims is None else whole("dims", dims, 1)
        matchmaking_s = above_zero_s("matchmaking_s", matchmaking_s, PATIENCE_S_MAX)
        refuse_sparse(codec)
        self.peer, self.name, self.codec, self.matchmaking_s = peer, name, codec, matchmaking_s
        self.stopping: Callable[[], bool] | None = None
        """As of `dlc.mesh.GroupCall`, for each round."""
        self.without_mine = frozenset[int]()
        """Chunks of the last `step`'s mean to which this peer's values were added here, as they were, not encoded."""
        self._sides, self._course = (group_size, dims), Course(name, group_size, dims)
        self._mesh = peer.mesh
        self._key, self._places = f"moshpit/{name}", Places(peer, f"moshpit/{name}")
        self._misfits = set[PeerId]()
        """Who has been told of."""
        self._round = 0
        """Of `step`: the next one."""
        self._show_at = 0.0
        self._closed = False
        self._mesh.ask(lambda mesh, now: mesh.open(self._key, name))
        self._show()

    def average(
        self, tensors: Tensor | Sequence[Tensor], *, weight: float = 1.0, timeout_s: float = 60.0
    ) -> MoshpitReport:
        """Replace `tensors`, in place, by the weighted mean over all peers: one round along each axis of the grid.

        A round that gives no mean (nobody came, its time was over) is left out, and told; so is everybody who failed.
        timeout_s: of one round. Raises SwarmClosed; UsageError where there are fewer than 2^dims peers, or so many that
        the grid's groups would be larger than groups can be.
        """
        many, z, weight = self._checked(tensors, weight)
        timeout_s = seconds("timeout_s", timeout_s)
        try:
            mean, report = self._cycle(z, weight, timeout_s)
        finally:
            self._places.begin()
        unflatten_into(mean, many)
        return report

    def step(
        self,
        tensors: Tensor | Sequence[Tensor],
        *,
        weight: float = 1.0,
        gather: bytes = b"",
        timeout_s: float = 60.0,
    ) -> MoshpitReport:
        """Replace `tensors`, in place, by the weighted mean of the group of this round; the next is along another axis.

        Of vectors that change between the rounds: each counts with its own weight only. Errors as in `average`. A peer
        waits for `matchmaking_s` at most, twice that where others are in later rounds and it follows them; but in two
        of 16 cycles for as long as it takes those that are not much slower to come (comm/rotation.py). What came too
        late for the others is in this peer's own mean all the same, so that what it learned is not lost.
        gather: up to 32 KiB that all members of the group get: `report.rounds[0].gathered`.
        """
        check_gather(gather)
        many, z, weight = self._checked(tensors, weight)
        timeout_s = seconds("timeout_s", timeout_s)
        began, told = clock(), _Told()
        self._show()
        self.without_mine = frozenset()
        away_s, before, mates, met = self._places.comes(), self._round, frozenset[PeerId](), None
        try:
            while met is None:
                stop = self._stop(away_s)
                turn, mates = stop.turn, stop.turn.mates
                left_s = min(turn.patience_s, began + turn.patience_s + self.matchmaking_s - clock())
                if left_s <= 0:
                    told.failed.append("the others went on to later rounds, and were followed for long enough")
                    break
                before = turn.round + 1
                self._places.waits(turn)
                awaited = partial(self._still_awaited, turn, clock())
                call = self._call(stop.key, z, weight, stop.line, awaited, left_s, timeout_s)
                call.gather = gather
                met = self._meet(call, told, partial(self._formed, turn, told))
            if met is None or not met.members:
                told.absent = self._absent(turn, ())
            if met is not None:
                told.absent |= dict.fromkeys(met.misfits, MISFIT)
        finally:
            self._round = before
            self._places.trains(before, mates)
        if met is not None and met.report is not None:
            others = sum(share.weight for share in met.report.contributors if share.peer != self.peer.id)
            for chunk in met.without_mine:
                part = slice(*call.grid.span(chunk))
                met.mean[part].lerp_(z[part], weight / (weight + others))
            self.without_mine = met.without_mine
            unflatten_into(met.mean, many)
            weight = met.report.weight
        return told.report(self.name, stop.cycle, [stop.axis], stop.cells, weight, False, began)

    def close(self) -> None:
        """Be no part of the grid any more. Idempotent; no round can follow."""
        if self._closed:
            return  # another one may have the name by now
        self._closed = True
        self._mesh.act(lambda mesh, now: mesh.shut(self._key, now))
        self._places.close()

    # ---------------------------------------------------------------- inside

    def _checked(self, tensors: Tensor | Sequence[Tensor], weight: float) -> tuple[list[Tensor], Tensor, float]:
        """The tensors, all of them as one vector, and the weight; UsageError where they cannot be averaged."""
        if self._closed:
            raise UsageError(f"the Moshpit {self.name!r} is closed: make another dlc.Moshpit")
        self._mesh.check_may_wait()
        many = writable_tensors(tensors)
        if not sum(t.numel() for t in many):
            raise UsageError("averaging needs at least one element")
        if not (weight := number("weight", weight, 0, WEIGHT_MAX, "above 0 to 2^53")):
            raise UsageError("weight is 0: it must be above 0 and at most 2^53")
        return many, flatten_tensors(many), weight

    def _call(
        self,
        key: str,
        vector: Tensor,
        weight: float,
        line: tuple[PeerId, ...],
        expected: Callable[[], Collection[PeerId]],
        patience_s: float,
        timeout_s: float,
    ) -> Call:
        numel = vector.numel()
        return Call(
            key=key,
            grid=Grid(numel, usual_chunk_elems(numel, self.codec), self.codec),
            vector=vector,
            out=vectors.empty(numel),
            weight=weight,
            least=1,
            expected=expected,
            show_to=line,
            patience_s=patience_s,
            budget_s=max(EXCHANGE_S_MIN, timeout_s - self.matchmaking_s),
        )

    def _meet(self, call: Call, told: _Told, formed: Formed | None = None) -> _Met | None:
        """One round; None: it did not come to be, as the others are in later ones."""
        handle = GroupCall(self.peer, call.key, call, [], formed, self._misfits)
        handle.stopping = self.stopping
        report = None
        try:
            report = waited(handle)
        except RoundTimeout as error:
            if isinstance(error.__cause__, GoneOn):
                return None
            told.failed.append(str(error))
        finally:
            told.waiting_s += handle.waited_s
        if report is not None:
            told.rounds.append(report)
        assert call.out is not None
        return _Met(report, call.out, handle.without_mine, handle.group, handle.members, handle.misfits)

    def _members(self, mesh: Mesh) -> list[PeerId]:
        up = mesh.ground.members.up
        here = [posted.author for posted in mesh.board.get(self._key).values()]
        return sorted({self.peer.id, *(voter.peer for voter in here if up(voter))})

    def _show(self) -> None:
        """Tell everybody that this peer is here; again only now and then."""
        if clock() >= self._show_at:
            self._show_at = clock() + PLACE_S / 4
            self._mesh.act(lambda mesh, now: mesh.post(self._key, b"here", PLACE_S, now))

    # ---------------------------------------------------------------- whole cycles

    def _cycle(self, z: Tensor, weight: float, timeout_s: float) -> tuple[Tensor, MoshpitReport]:
        """The mean, and how it came about."""
        own, own_weight, began = z, weight, clock()
        self._course.begin_cycle()
        self._show()
        told = _Told()
        label, complete, cycle, axes, came, last = "", True, -1, list[int](), set[PeerId](), False
        while not last:
            leg = self._leg()
            if cycle not in (-1, leg.cycle):
                # The others are in a later averaging, in which each vector counts once, with its own weight.
                z, weight, label, complete = own, own_weight, "", False
                told.absent, came = {}, set()
            cycle = leg.cycle
            if not axes and (largest := leg.cells.group_max) > GROUP_MAX:
                raise UsageError(
                    f"{leg.cells.n} peers in {leg.cells.dims} dimensions make groups of up to {largest}; a group has "
                    f"at most {GROUP_MAX} members: give more dims, or a lower group_size"
                )
            unbroken = complete and leg.axis == len(axes)
            call = self._call(leg.key, z, weight, leg.peers, partial(self._awaited, leg), self.matchmaking_s, timeout_s)
            call.label, call.gather = label, leg.word(label) if unbroken else b""
            met = self._meet(call, told)
            if met is None:
                cycle = cycle if axes else -1
                continue
            came |= {self.peer.id, *met.members}
            told.absent |= dict.fromkeys(leg.peers, NOT_THERE) | dict.fromkeys(met.misfits, MISFIT)
            complete = unbroken and met.report is not None and met.report.complete and leg.whole(met.report.gathered)
            if met.report is not None:
                z, weight, label = met.mean, met.report.weight, met.group
            axes.append(leg.axis)
            last = self._course.passed()
        told.absent = {peer: why for peer, why in told.absent.items() if peer not in came}
        complete = complete and len(axes) == max(1, leg.cells.dims)
        return z, told.report(self.name, leg.cycle, axes, leg.cells, weight, complete, began)

    def _leg(self) -> Leg:
        """The next round, by who is there now and where others wait."""
        return self._mesh.ask(
            lambda mesh, now: self._course.leg(self._members(mesh), self.peer.id, self._waiting(mesh))
        )

    def _awaited(self, leg: Leg) -> frozenset[PeerId]:
        """On the driver thread."""
        return self._mesh.ask(lambda mesh, now: self._course.awaited(leg, self._waiting(mesh)))

    def _waiting(self, mesh: Mesh) -> dict[str, set[PeerId]]:
        """By key: which of the others wait under it."""
        up, waiting = mesh.ground.members.up, dict[str, set[PeerId]]()
        for key in mesh.board.keys(BOARD_PREFIX + self._course.prefix):
            authors = [posted.author for posted in mesh.board.get(key).values()]
            others = {author.peer for author in authors if author != self.peer.voter and up(author)}
            if others:
                waiting[key.removeprefix(BOARD_PREFIX)] = others
        return waiting

    # ---------------------------------------------------------------- single rounds

    def _stop(self, away_s: float) -> _Stop:
        """The next round, after so long a time of training."""

        def look(mesh: Mesh, now: float) -> _Stop:
            me, members = self.peer.id, self._members(mesh)
            cells = grid_of(len(members), *self._sides)
            lines = lines_of(cells, members, me)
            others = [tuple(peer for peer in line if peer != me) for line in lines]
            mates = {peer for line in others for peer in line}
            seen, d = self._places.seen(mesh), len(lines)
            turn = next_turn(self._round, lambda at: others[at % d], mates, d, seen, self.matchmaking_s, away_s)
            axis = turn.round % d
            line = ".".join(map(str, cells.line(members.index(me), axis)))
            key = f"moshpit/{self.name}#r{turn.round}.{axis}/{line}"
            return _Stop(turn, key, turn.round // d, axis, tuple(lines[axis]), cells)

        return self._mesh.ask(look)

    def _formed(self, turn: Turn, told: _Told, members: tuple[PeerId, ...]) -> None:
        """On the driver thread."""
        told.absent = self._absent(turn, members)
        self._places.averages(turn)

    def _still_awaited(self, turn: Turn, since: float) -> frozenset[PeerId]:
        """On the driver thread."""
        return turn.awaited(self._places.ask(), clock() - since) | {self.peer.id}

    def _absent(self, turn: Turn, members: Collection[PeerId]) -> dict[PeerId, str]:
        """Who was to come to this round and is not one of these, and why."""
        seen = self._places.ask()
        return {
            peer: GONE_ON if seen.last([peer]) > turn.round else NOT_THERE for peer in turn.others.difference(members)
        }


@dataclass(frozen=True)
class _Stop:
    """A round of `Moshpit.step`."""

    turn: Turn
    key: str
    """The group's: peers of the same line meet under it."""
    cycle: int
    axis: int
    line: tuple[PeerId, ...]
    cells: Cells


@dataclass(frozen=True)
class _Met:
    """A round that is over."""

    report: GroupReport | None
    """None: it gave no mean."""
    mean: Tensor
    without_mine: frozenset[int]
    """Chunks of it."""
    group: str
    members: tuple[PeerId, ...]
    misfits: frozenset[PeerId]


@dataclass
class _Told:
    """What a report will tell."""

    rounds: list[GroupReport] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    absent: dict[PeerId, str] = field(default_factory=dict)
    waiting_s: float = 0.0

    def report(
        self, name: str, cycle: int, axes: Sequence[int], cells: Cells, weight: float, complete: bool, began: float
    ) -> MoshpitReport:
        return MoshpitReport(
            name=name,
            cycle=cycle,
            axes=tuple(axes),
            sides=cells.sides,
            peers=cells.n,
            rounds=tuple(self.rounds),
            failed=tuple(self.failed),
            absent=dict(sorted(self.absent.items())),
            weight=weight,
            complete=complete,
            seconds=clock() - began,
            waiting_s=self.waiting_s,
        )
