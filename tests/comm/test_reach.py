"""The state of one channel is gone with those who held it: the rest of the run goes on."""

from __future__ import annotations

import pytest

from dlc.comm.entries import OPEN
from dlc.comm.reach import in_step, out_of_reach
from dlc.comm.waiting import CONTACT_S
from dlc.sim.schedule import SECOND, TRAIN
from dlc.sim.world import KINDS, Process
from tests.comm.test_waiting import Stay, votes

LOST = "the run's state of channel 'second' is held by nobody"


def bring(world: Stay, process: Process, kind: tuple[int, int] = KINDS[0]) -> None:
    """It opens the second channel, with a state of this kind."""
    process.host.kind = kind
    grid, state = world.grid_of(process.host, SECOND), world.first_state(process.host, SECOND)
    world.act(process, lambda now: process.node.attach(SECOND, state, grid, 0, now))


def two_channels(*roles: str) -> Stay:
    """All vote, and nobody has brought the second state yet."""
    names = [f"p{i}" for i in range(1 + len(roles))]
    world = Stay(*roles, bare=tuple((name, SECOND) for name in names), channels=(TRAIN, SECOND))
    world.until(lambda: len(world.running()) == len(names) and all(map(votes, world.running())))
    return world


@pytest.mark.parametrize("how", ["leave", "crash"])
def test_the_others_go_on_without_a_state_that_went_with_its_holder(how: str) -> None:
    """Nobody took over from a coordinator while it lacked a state, whatever others it held."""
    world = two_channels("trainer", "trainer")
    for process, kind in zip(world.running(), KINDS, strict=True):
        bring(world, process, kind)
    world.until(lambda: all(p.node.log.is_open(SECOND) for p in world.running()))
    holder = next(p for p in world.running() if p.node.log.holds(SECOND))
    left = [p for p in world.running() if p is not holder]
    world.until(lambda: not any(in_step(p.node.ctx, p.node.log) for p in left))
    getattr(world, how)(holder)
    rounds = left[0].node.log.state.round_of(TRAIN)
    world.until(lambda: min(p.node.log.state.round_of(TRAIN) for p in left) >= rounds + 5, 40.0)
    assert all(out_of_reach(p.node.ctx, p.node.log) == {SECOND} for p in left)
    world.until(lambda: all(world.said(p, LOST) for p in left), CONTACT_S)
    late = world.newcomer(left[0].host.name)
    bring(world, late, left[0].host.kind)
    world.until(lambda: votes(late), 40.0)
    assert late.node.log.holds(TRAIN) and not late.node.log.holds(SECOND)


def test_an_opening_whose_first_state_is_gone_is_not_waited_for_without_end() -> None:
    """One has voted for it, for want of use for that state, so it may be decided; who brought none, or could get none,
    never voted, and every round of the run waited."""
    world = two_channels("trainer", "trainer")
    *pair, bare = world.running()
    for process, kind in zip(pair, KINDS, strict=False):
        bring(world, process, kind)

    def misfits() -> list[Process]:
        """Who has voted for the opening without a use for its state."""
        slots = ((p, p.node.slot.accepted) for p in pair if p.node.log.attached[SECOND].misfit)
        return [p for p, accepted in slots if accepted is not None and accepted[1].entry.kind == OPEN]

    world.until(misfits)
    (misfit,) = misfits()
    assert not any(p.node.log.is_open(SECOND) for p in world.running())
    world.crash(next(p for p in pair if p is not misfit))
    t_evict_s, crashed = bare.node.members.t_evict_s, world.now
    world.until(lambda: bare.node.log.is_open(SECOND), 2 * t_evict_s)
    assert world.now - crashed > t_evict_s / 2, "the giver was waited for"
    rounds = bare.node.log.state.round_of(TRAIN)
    world.until(lambda: min(p.node.log.state.round_of(TRAIN) for p in (misfit, bare)) >= rounds + 5, 40.0)
