"""`Moshpit`: the mean of many peers by rounds in small groups, without a log.

    moshpit = dlc.Moshpit(peer, group_size=8)
    report = moshpit.average(list(model.parameters()))   # d rounds: exact where nobody fails (report.complete)
    report = moshpit.step(list(model.parameters()))      # one round, of a model that is trained on meanwhile

With N peers in groups of M a round costs each 2 (M - 1) / M vectors of traffic, however many peers there are, and
whoever fails costs its own group a moment (Ryabinin et al. 2021, arXiv 2103.03239). The grid: `dlc.comm.cells`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from dlc.collectives import refuse_sparse
from dlc.comm import vectors
from dlc.comm.board import TTL_S_MAX
from dlc.comm.clock import clock
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import PeerId
from dlc.comm.meetings import BOARD_PREFIX, GROUP_MAX, Call, GoneOn
from dlc.comm.mesh import Mesh
from dlc.comm.moshpit import Course, Leg
from dlc.comm.reducer import WEIGHT_MAX
from dlc.errors import RoundTimeout, UsageError
from dlc.flat import flatten_tensors, unflatten_into, writable_tensors
from dlc.mesh import EXCHANGE_S_MIN, GroupCall
from dlc.peer import Peer
from dlc.report import GroupReport, MoshpitReport

PLACE_S = TTL_S_MAX
"""A place is shown until it is withdrawn: who reads it passes over a peer that is dead or has left."""


class Moshpit:
    """One peer's place on the grid; for one thread at a time.

    group_size:    about so many average together (8 where neither is given); dims: or so many rounds to the exact mean.
    matchmaking_s: whoever of a group has not come by then is not waited for.
    codec:         "fp32", "fp16", "bf16", "int8", "int4"; equal on all peers.

    All peers of one `name` give the same group_size or dims, and tensors of the same shapes. Left open until `close`:
    however long the pause between two rounds, this peer has its place on the grid as long as it is up.
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
        if group_size is not None and dims is not None:
            raise UsageError("give group_size or dims, not both: one follows from the other and the number of peers")
        if group_size is not None and not 2 <= group_size <= GROUP_MAX:
            raise UsageError(f"group_size is {group_size}: it must be 2 to {GROUP_MAX}")
        if dims is not None and dims < 1:
            raise UsageError(f"dims is {dims}: it must be at least 1")
        if not matchmaking_s > 0:
            raise UsageError(f"matchmaking_s is {matchmaking_s}: it must be above 0")
        refuse_sparse(codec)
        self.peer, self.name, self.codec, self.matchmaking_s = peer, name, codec, matchmaking_s
        self._course = Course(name, group_size, dims)
        self._mesh = peer.mesh
        self._key = f"moshpit/{name}"
        self._show_at = 0.0
        self._show()

    def average(
        self, tensors: Tensor | Sequence[Tensor], *, weight: float = 1.0, timeout_s: float = 60.0
    ) -> MoshpitReport:
        """Replace `tensors`, in place, by the weighted mean over all peers: one round along each axis of the grid.

        A round that gives no mean (nobody came, its time was over) is left out, and told; so is everybody who failed.
        timeout_s: of one round. Raises SwarmClosed; UsageError where there are fewer than 2^dims peers, or so many that
        the grid's groups would be larger than groups can be.
        """
        self._course.begin_cycle()
        return self._go(tensors, weight, timeout_s, whole=True)

    def step(
        self, tensors: Tensor | Sequence[Tensor], *, weight: float = 1.0, timeout_s: float = 60.0
    ) -> MoshpitReport:
        """Replace `tensors`, in place, by the weighted mean of the group of this round; the next is along another axis.

        Of vectors that change between the rounds: each counts with its own weight only. Errors as in `average`.
        """
        return self._go(tensors, weight, timeout_s, whole=False)

    def close(self) -> None:
        """Be no part of the grid any more."""
        self._mesh.act(lambda mesh, now: mesh.withdraw(self._key, now))

    # ---------------------------------------------------------------- inside

    def _go(self, tensors: Tensor | Sequence[Tensor], weight: float, timeout_s: float, whole: bool) -> MoshpitReport:
        many = writable_tensors(tensors)
        numel = sum(t.numel() for t in many)
        if not numel:
            raise UsageError("averaging needs at least one element")
        if not 0 < weight <= WEIGHT_MAX:
            raise UsageError(f"weight is {weight}: it must be above 0 and at most 2^53")
        weight = float(weight)
        began, grid, z = clock(), Grid(numel, usual_chunk_elems(numel), self.codec), flatten_tensors(many)
        self._show()
        rounds, failed, axes = list[GroupReport](), list[str](), list[int]()
        label, complete, last = "", whole, False
        own, own_weight, cycle = z, weight, -1
        while not last:
            leg = self._leg()
            if cycle not in (-1, leg.cycle):
                # The others are in a later averaging, in which each vector counts once, with its own weight.
                z, weight, label, complete = own, own_weight, "", False
            cycle = leg.cycle
            if whole and not axes and (largest := leg.cells.group_max) > GROUP_MAX:
                raise UsageError(
                    f"{leg.cells.n} peers in {leg.cells.dims} dimensions make groups of up to {largest}; a group has "
                    f"at most {GROUP_MAX} members: give more dims, or a lower group_size"
                )
            unbroken = complete and leg.axis == len(axes)
            call = Call(
                key=leg.key,
                grid=grid,
                vector=z,
                out=vectors.empty(numel),
                weight=weight,
                label=label,
                least=1,
                expected=partial(self._awaited, leg),
                show_to=leg.peers,
                patience_s=self.matchmaking_s,
                budget_s=max(EXCHANGE_S_MIN, timeout_s - self.matchmaking_s),
                gather=leg.word(label) if unbroken else b"",
            )
            handle = GroupCall(self.peer, leg.key, call, [])
            try:
                report = handle.wait()
            except RoundTimeout as error:
                if isinstance(error.__cause__, GoneOn):
                    cycle = cycle if axes else -1
                    continue
                failed.append(str(error))
                unbroken = False
            except KeyboardInterrupt:
                handle.cancel()
                raise
            else:
                assert call.out is not None
                rounds.append(report)
                unbroken = unbroken and report.complete and leg.whole(report.gathered)
                z = call.out
                if whole:
                    weight, label = report.weight, handle.group
            axes.append(leg.axis)
            complete = unbroken
            last = self._course.passed() or not whole
        unflatten_into(z, many)
        return MoshpitReport(
            name=self.name,
            cycle=leg.cycle,
            axes=tuple(axes),
            sides=leg.cells.sides,
            peers=leg.cells.n,
            rounds=tuple(rounds),
            failed=tuple(failed),
            weight=weight if whole or not rounds else rounds[0].weight,
            complete=complete and len(axes) == max(1, leg.cells.dims),
            seconds=clock() - began,
        )

    def _leg(self) -> Leg:
        """The next round, by who is there now and where others wait."""

        def look(mesh: Mesh, now: float) -> Leg:
            up = mesh.ground.members.up
            here = [p.author for p in mesh.board.get(self._key).values() if up(p.author)]
            members = sorted({self.peer.id, *(voter.peer for voter in here)})
            return self._course.leg(members, self.peer.id, self._waiting(mesh))

        return self._mesh.ask(look)

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

    def _show(self) -> None:
        """Tell everybody that this peer is here; again only now and then."""
        if clock() >= self._show_at:
            self._show_at = clock() + PLACE_S / 4
            self._mesh.act(lambda mesh, now: mesh.post(self._key, b"here", PLACE_S, now))
