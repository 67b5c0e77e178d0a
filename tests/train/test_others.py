"""When the others are ready, as far as one can know."""

from __future__ import annotations

from typing import Any

import pytest

from dlc.comm.roles import HELPER, TRAINER
from dlc.train.others import LOOK_EVERY_S, TOLD_AGE_S, Others
from dlc.train.telling import ENDS, SITS_OUT
from tests.train.fake_peer import FakeMember


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.members: list[FakeMember] = []
        self.others = Others(lambda: self.members, lambda: self.now)

    def tell(self, **statuses: dict[str, Any]) -> None:
        self.members = [FakeMember(name, status=status) for name, status in statuses.items()]
        self.now += LOOK_EVERY_S


def status(t: int = 3, inner: int = 2, of: int = 10, step_s: float = 1.0) -> dict[str, Any]:
    return {"t": t, "inner": inner, "of": of, "step_s": step_s}


def test_a_prediction_ages_until_something_new_is_told() -> None:
    world = World()
    world.tell(a=status())
    assert world.others.etas_s(3) == [8.0 - TOLD_AGE_S]
    world.now += 3.0
    assert world.others.etas_s(3) == pytest.approx([5.0 - TOLD_AGE_S])
    world.tell(a=status(inner=3))
    assert world.others.etas_s(3) == [7.0 - TOLD_AGE_S]
    world.now += 50.0
    assert world.others.etas_s(3) == [0.0]


def test_who_has_not_told_of_the_newest_round_begins_now() -> None:
    world = World()
    world.tell(a=status(t=2, inner=10), b=status(t=3, inner=10), c=status(t=4), d=status(t=1))
    assert world.others.etas_s(3) == [10.0, 0.0]  # who is ahead or far behind tells nothing


def test_who_sits_a_round_out_and_who_ends_have_nothing_for_it() -> None:
    world = World()
    idle = {"a": status() | {"phase": SITS_OUT}, "b": status() | {"phase": ENDS}, "c": status(t=9), "d": {"t": 3}}
    world.tell(**idle)
    assert world.others.offer_in_s(3) is None
    world.tell(**idle, e=status(inner=4), f=status(inner=9), g=status(t=2, of=2) | {"phase": SITS_OUT})
    assert world.others.offer_in_s(3) == 6.0 - TOLD_AGE_S


def test_where_most_of_the_others_are() -> None:
    world = World()
    world.tell(a=status(inner=1), b=status(inner=5), c=status(inner=6), d=status(t=9, inner=9))
    assert world.others.inner(3) == 5 + TOLD_AGE_S and world.others.inner(7) is None
    world.now += 2.5
    assert world.others.inner(3) == 7 + TOLD_AGE_S
    world.now += 100.0
    assert world.others.inner(3) == 10


def test_who_says_nothing_of_its_last_step_has_made_it() -> None:
    world = World()
    world.tell(a={"t": 3, "inner": 2})
    assert world.others.inner(3) == 2 and world.others.etas_s(3) == []


def test_something_may_come_until_all_have_said_that_they_have_nothing_for_that_round() -> None:
    world = World()
    assert not world.others.may_offer(3), "there is nobody"
    world.tell(a=status(), b={**status(), "phase": ENDS})
    assert world.others.may_offer(3)
    world.tell(a={**status(), "phase": ENDS}, b={**status(), "phase": ENDS})
    assert not world.others.may_offer(3) and world.others.may_offer(4), "of that they have said nothing"
    for role, may in ((TRAINER, True), (HELPER, False)):
        world.members[1:] = [FakeMember("c", role=role, status={})]
        world.now += LOOK_EVERY_S
        assert world.others.may_offer(3) is may, "a trainer has yet to tell where it is"


@pytest.mark.parametrize(
    "member",
    [
        FakeMember(alive=False, status=status()),
        FakeMember(left=True, status=status()),
        FakeMember(me=True, status=status()),
        FakeMember(status={}),
        FakeMember(status={**status(), "step_s": "1"}),
        FakeMember(status={**status(), "step_s": -1.0}),
        FakeMember(status={**status(), "step_s": float("nan")}),
        FakeMember(status={**status(), "step_s": float("inf")}),
        FakeMember(status={**status(), "t": True}),
        FakeMember(status={**status(), "inner": 1 << 60}),
    ],
)
def test_who_does_not_count(member: FakeMember) -> None:
    world = World()
    world.members = [member]
    assert world.others.etas_s(3) == []
