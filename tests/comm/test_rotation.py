"""Groups that change from round to round, with training between: peers that have come apart find each other again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dlc.comm.board import TTL_S_MAX
from dlc.comm.calls import GoneOn
from dlc.comm.meetings import LINGER_S
from dlc.comm.rotation import (
    AWAY_S_MAX,
    EXCHANGE_S_MAX,
    OF_CYCLES,
    PATIENT,
    ROUND_MAX,
    Place,
    Seen,
    Turn,
    next_turn,
)
from dlc.comm.wire import unpack
from dlc.moshpit import Moshpit
from dlc.places import Places
from dlc.sim.meshnet import Host, MeshNet
from tests.comm.netpeer import NetPeer
from tests.comm.stepper import InPairs, OnGrid, Stepper, Way

PHASE_S = 10.0
LINES = [("b",), ("c",)]
"""Of a: on a grid of 2 x 2 with b, c, d."""


def trains(round_: int, away_s: float = PHASE_S) -> Place:
    return Place(round_, False, False, away_s, 0.0)


def waits(round_: int, away_s: float = PHASE_S) -> Place:
    return Place(round_, True, False, away_s, 0.0)


def averages(before: int, exchange_s: float) -> Place:
    return Place(before, False, True, PHASE_S, exchange_s)


def turn(places: dict[str, Place], at: int = 0, late: tuple[str, ...] = (), line: str = "") -> Turn:
    """Of a, that is ready to wait for 4 s, and has trained for 10 s; on one line with these, or by LINES."""
    lines = [tuple(line)] if line else LINES
    mates = {peer for others in lines for peer in others}
    return next_turn(at, lambda i: lines[i % len(lines)], mates, len(lines), Seen(places, late), 4.0, PHASE_S)


def test_who_comes_goes_where_one_of_its_mates_waits_and_not_where_all_others_of_the_group_have_passed() -> None:
    assert turn({}).others == {"b"} and turn({}, 1).others == {"c"} and turn({}).mates == {"b", "c"}
    assert turn({"b": trains(0), "c": trains(1)}).round == 0
    assert turn({"c": waits(5)}).round == 5, "on the other line"
    assert turn({"d": waits(5)}).round == 0, "on no line of mine"
    assert turn({"b": trains(1), "c": trains(1)}).round == 1
    assert turn({"b": trains(7), "c": trains(6)}).round == 7
    assert turn({"b": trains(7)}).round == 1, "c may be at any round"
    assert turn({"b": trains(2), "c": trains(9), "d": trains(9)}, 3, line="bcd").round == 3
    assert next_turn(4, lambda at: (), (), 1, Seen({}), 4.0, PHASE_S).others == frozenset()


def test_who_waits_goes_on_where_one_waits_further_and_where_it_is_left_alone() -> None:
    here = turn({}, line="bcd")

    def awaited(places: dict[str, Place], waited_s: float = 0.0) -> frozenset[str]:
        return here.awaited(Seen(places), waited_s)

    assert awaited({}) == {"b", "c", "d"}
    assert awaited({"b": trains(1), "c": waits(0)}) == {"c", "d"}
    with pytest.raises(GoneOn):
        awaited({"b": waits(1)})
    with pytest.raises(GoneOn):
        awaited(dict.fromkeys("bcd", trains(2)))
    assert awaited({"other": waits(9)}) == {"b", "c", "d"}
    assert awaited({}, 4.0) == frozenset(), "the usual time is over"


def test_in_patient_cycles_those_who_are_not_much_slower_are_waited_for_until_they_can_be_there() -> None:
    at = PATIENT[0]
    places = {"b": trains(at, 14.0), "c": trains(0, 16.0), "d": trains(at + 1, 9.0), "e": trains(0, 1.0)}
    here = turn(places, at, line="bcde")
    assert (here.quick, here.patience_s) == ({"b", "e"}, 18.0), "c is slower by more than a half, d has passed"
    assert here.awaited(Seen(places), 3.9) == {"b", "c", "e"}
    assert here.awaited(Seen(places), 4.1) == {"b", "e"}
    assert here.awaited(Seen(places, ("b",)), 4.1) == {"e"}
    assert here.awaited(Seen({"e": places["e"]}), 4.1) == {"e"}, "b has taken its place back"
    assert turn(places, at, ("b",), "bcde").quick == {"e"}
    assert turn({"b": averages(at, 30.0)}, at, line="b").patience_s == 4.0 + 30.0 + PHASE_S, "then it trains"
    assert not turn({"b": Place(0, False, False, 0.0, 0.0)}, at, line="b").quick, "its pace is not known yet"
    for at in range(2 * OF_CYCLES):
        assert bool(turn({"b": trains(0)}, at, line="b").quick) == (at % OF_CYCLES in PATIENT)
        assert bool(turn({"b": trains(0)}, 2 * at).quick) == (at % OF_CYCLES in PATIENT), "two rounds are a cycle"


def test_who_has_trained_half_as_long_again_as_before_is_late_and_nonsense_is_not_sound() -> None:
    assert not trains(3).late(14.9) and trains(3).late(15.1) and not waits(3).late(100.0)
    assert not averages(3, 20.0).late(44.9) and averages(3, 20.0).late(45.1)
    assert trains(ROUND_MAX).sound
    nonsense = (trains(-1), trains(ROUND_MAX + 1), trains(0, -1.0), trains(0, float("nan")), averages(0, float("nan")))
    assert not any(place.sound for place in nonsense)


def test_nobody_is_waited_for_longer_than_a_wish_to_meet_can_be_shown() -> None:
    """A member that said it averages for thirty years ended each patient round of the others with an error."""
    assert not any(place.sound for place in (averages(0, 1e9), averages(0, float("inf")), trains(0, 1e9)))
    slowest = Place(2 * PATIENT[0], False, True, AWAY_S_MAX, EXCHANGE_S_MAX)
    assert slowest.sound
    here = next_turn(slowest.round, lambda at: ("b",), ("b",), 2, Seen({"b": slowest}), 4.0, AWAY_S_MAX)
    assert here.quick == {"b"} and here.patience_s + LINGER_S < TTL_S_MAX / 2


def test_who_trains_for_longer_than_others_believe_shows_as_much_as_they_do() -> None:
    net = MeshNet(1, ordered=True)
    (host,) = net.add(1)
    places = Places(NetPeer(net, host), "m")  # type: ignore[arg-type]
    places._left_at -= 3 * AWAY_S_MAX
    assert places.comes() >= 3 * AWAY_S_MAX, "it knows better itself"
    places.trains(1, ())
    (shown,) = host.mesh.board.get("place/m").values()
    place = unpack(shown.value, Place)
    assert place.sound and place.away_s == AWAY_S_MAX


def test_rounds_that_all_have_passed_are_not_counted_through_one_by_one() -> None:
    """It took minutes, on the driver's thread, until a peer was at the others' ten-millionth round."""
    asked = list[int]()

    def group(at: int) -> tuple[str, ...]:
        asked.append(at)
        return ("b",) if at % 2 else ("c",)

    far = {"b": trains(10**7), "c": trains(10**12)}
    assert next_turn(0, group, ("b", "c"), 2, Seen(far), 1.0, 1.0).round == 10**7 + 1
    assert next_turn(0, lambda at: ("c",), ("b", "c"), 1, Seen(far), 1.0, 1.0).round < 2 * 10**7
    assert len(asked) < 10


@pytest.mark.parametrize("waits_there", [True, False])
def test_nobody_follows_one_to_the_last_round_that_there_is(waits_there: bool) -> None:
    """All went there, and from then on nobody could see where another was."""
    net = MeshNet(1, ordered=True)
    hosts = net.add(2)
    pits = [Moshpit(NetPeer(net, host), "m", group_size=2) for host in hosts]  # type: ignore[arg-type]
    mates = frozenset(host.name for host in hosts)
    pits[1]._places._show(Place(ROUND_MAX, waits_there, False, PHASE_S, 0.0), mates)
    pits[0]._places.trains(0, mates)
    net.run(1.0)
    turn = pits[0]._stop(PHASE_S).turn
    assert turn.round == 0 and turn.others == {hosts[1].name}


def test_the_rounds_of_moshpit_go_along_one_axis_after_the_other_of_the_grid_of_those_who_are_up() -> None:
    net = MeshNet(1, ordered=True)
    hosts = net.add(4)
    pits = [Moshpit(NetPeer(net, host), "m", group_size=2) for host in hosts]  # type: ignore[arg-type]
    net.run(1.0)
    names = [host.name for host in hosts]
    first = pits[0]._stop(0.0)
    assert (first.cycle, first.axis, first.line) == (0, 0, (names[0], names[1]))
    pits[0]._round += 1
    second = pits[0]._stop(0.0)
    assert (second.cycle, second.axis, second.line) == (0, 1, (names[0], names[2])) and second.key != first.key
    assert second.turn.mates == {names[1], names[2]}
    pits[3].close()
    net.run(1.0)
    third = pits[0]._stop(0.0)
    assert (third.axis, third.cycle, third.cells.sides) == (0, 1, (3,)), "three peers have one axis"


def stepper_of(net: MeshNet, host: Host, patience_s: float, dims: int, phase_s: float, numel: int = 4) -> Stepper:
    way: Way = OnGrid(net, host, patience_s, dims) if dims else InPairs(net, host, patience_s)
    return Stepper(net, host, way, patience_s, lambda: phase_s, numel)


def swarm(net: MeshNet, n: int, patience_s: float, dims: int, slower: float = 1.0) -> list[Stepper]:
    """n peers whose phases take equally long, but for the first one's. dims: of the grid; 0: in pairs."""
    phases = [PHASE_S * slower, *[PHASE_S] * (n - 1)]
    return [stepper_of(net, host, patience_s, dims, s) for host, s in zip(net.add(n), phases, strict=True)]


def begin_some_time(net: MeshNet, many: list[Stepper], rng: random.Random) -> None:
    for stepper in many:
        net.clock.at(net.now + rng.uniform(0.0, PHASE_S), stepper.begin)


GRIDS = [(2, 1), (3, 1), (4, 1), (4, 2), (9, 2), (8, 3)]
PAIRS = [(2, 0), (4, 0), (7, 0)]


@pytest.mark.parametrize(
    ("n", "dims", "patience_s"), [*((*grid, 2.0) for grid in GRIDS), *((*swarm, 5.0) for swarm in GRIDS + PAIRS)]
)
def test_peers_of_equal_speed_come_to_meet_whenever_each_began(n: int, dims: int, patience_s: float) -> None:
    """Two whose waits do not overlap met at no exchange, for ever; so did the four of two lines each way."""
    net, rng = MeshNet(n + dims, ordered=True), random.Random(n + dims)
    many = swarm(net, n, patience_s, dims)
    begin_some_time(net, many, rng)
    net.run(60 * PHASE_S)
    for stepper in many:
        assert all(r.met == r.others for r in stepper.rounds[-6:]), stepper.rounds
        assert sum(r.waited_s for r in stepper.rounds) < 5 * PHASE_S


@pytest.mark.parametrize("behind", [(0,), (0, 3), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("dims", [1, 2])
def test_some_that_are_a_round_behind_the_others_come_to_meet_them(behind: tuple[int, ...], dims: int) -> None:
    """On two axes those of a diagonal met nobody, for ever, and those of a line each other only."""
    net = MeshNet(1, ordered=True)
    many = swarm(net, 4, 4.0, dims)
    for i, stepper in enumerate(many):
        assert isinstance(stepper.way, OnGrid)
        stepper.way.pit._round = 0 if i in behind else 1
        net.clock.at(net.now + 0.1 + (0.0 if i in behind else 2.0), stepper.begin)
    net.run(12 * PHASE_S)
    assert all(r.met == r.others for stepper in many for r in stepper.rounds[-4:])


@pytest.mark.parametrize("seed", range(4))
def test_one_that_is_three_times_slower_costs_the_others_no_more_than_their_usual_wait(seed: int) -> None:
    net, rng = MeshNet(seed, ordered=True), random.Random(seed)
    many = swarm(net, 4, 4.0, 1, slower=3.0)
    begin_some_time(net, many, rng)
    net.run(60 * PHASE_S)
    slow = {many[0].host.name}
    for stepper in many[1:]:
        late = stepper.rounds[len(stepper.rounds) // 2 :]
        assert sum(r.met | slow == r.others for r in late) >= 0.9 * len(late), late
        assert all(r.waited_s < 2 * 4.0 for r in late)


def test_one_that_stays_away_though_it_is_up_is_soon_waited_for_as_usual_only() -> None:
    net = MeshNet(6, ordered=True)
    many = swarm(net, 3, 2.0, 1)
    for stepper in many:
        net.clock.at(net.now + 0.1, stepper.begin)
    net.run(PHASE_S / 2)
    many[0].train_s = lambda: 1e6
    net.run(40 * PHASE_S)
    assert len(many[0].rounds) <= 2
    away = many[0].host.name
    for stepper in many[1:]:
        assert sum(r.waited_s > 3.0 for r in stepper.rounds) <= 2, stepper.rounds
        assert all(r.met == r.others - {away} for r in stepper.rounds[-20:])


@pytest.mark.parametrize("apart_s", [4.0, 13.0, 17.0])
def test_halves_of_a_swarm_meet_where_averaging_takes_longer_than_training(apart_s: float) -> None:
    """Who averaged passed for late, and was not waited for: 400 kB at 20 kB/s take 20 s, and it trains for 10."""
    net, many = MeshNet(1, ordered=True), []
    for i, host in enumerate(net.add(4, up_Bps=2e4)):
        many.append(stepper_of(net, host, 5.0, 2, PHASE_S, 100_000))
        net.clock.at(net.now + 1.0 + (apart_s if i > 1 else 0.0), many[-1].begin)
    net.run(1500)
    assert all(r.met == r.others for stepper in many for r in stepper.rounds[-8:])


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("dims", "slow_s"), [(0, 21.25), (1, 21.24)])
def test_one_whose_phase_is_twice_the_other_s_meets_it_now_and_then(dims: int, slow_s: float, seed: int) -> None:
    """It came always when the other one had just gone, for ever."""
    net, many = MeshNet(seed, ordered=True), []
    for host, phase_s, at in zip(net.add(2), (PHASE_S, slow_s), (0.5, 6.5), strict=True):
        many.append(stepper_of(net, host, 2.0, dims, phase_s))
        net.clock.at(net.now + at, many[-1].begin)
    net.run(40 * slow_s)
    rounds = many[1].rounds
    assert sum(bool(r.met) for r in rounds) > len(rounds) / 8
    assert all(r.waited_s < 2 * 2.0 for r in many[0].rounds[3:]), "the quick one knows by then that it is not"


@pytest.mark.parametrize("seed", range(6))
def test_after_losses_deaths_and_returns_all_who_live_come_to_meet(seed: int) -> None:
    rng, net = random.Random(seed), MeshNet(seed, loss=0.03, ordered=True)
    dims, phases = rng.choice([1, 2]), [PHASE_S] * 6
    many = [stepper_of(net, host, 4.0, dims, s) for host, s in zip(net.add(6), phases, strict=True)]
    begin_some_time(net, many, rng)
    net.run(rng.uniform(5, 8) * PHASE_S)
    net.kill(many[0].host)
    net.freeze(many[1].host)
    net.run(rng.uniform(1, 3) * PHASE_S)
    net.thaw(many[1].host)
    many[0] = stepper_of(net, net.start(many[0].host.name, inc=2), 4.0, dims, PHASE_S)
    many.append(stepper_of(net, net.start("p9999"), 4.0, dims, PHASE_S))
    begin_some_time(net, [many[0], many[-1]], rng)
    net.run(40 * PHASE_S)
    net.network.weather = replace(net.network.weather, loss=0.0)  # each lost message may part them again for a while
    net.run(40 * PHASE_S)
    assert all(r.met == r.others for stepper in many for r in stepper.rounds[-6:]), [s.rounds for s in many]
    assert all(r.waited_s <= 2 * 4.0 + PHASE_S + 1.0 for stepper in many[2:] for r in stepper.rounds)
