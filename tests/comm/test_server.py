"""The parameter server on a virtual clock: every push counts once or is told not to, whoever dies at which step."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm import followers, serverpeer, servershelf, spanowner
from dlc.comm import servermessages as sm
from dlc.comm.claims import Claiming
from dlc.comm.effects import Effect, Send
from dlc.comm.followers import DIGEST_EVERY, LOG_MAX
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.messages import Excluded
from dlc.comm.seats import Seeding
from dlc.comm.server import SOLO_AFTER_S
from dlc.comm.serverclient import SpanClient
from dlc.comm.serverexchange import NOWHERE, PULL, ExchangeFailed, Paused
from dlc.comm.servershelf import FETCHES_MAX, Fetches
from dlc.comm.spans import SPANS_MAX, Spans, assign
from dlc.comm.spanstate import COUNTED_MAX, Optimizer
from dlc.comm.wire import HEADER_BYTES_MAX, pack
from dlc.errors import ProtocolError
from dlc.server import _report as report_of
from dlc.train.outer_step import Sgd
from tests.comm import servernet
from tests.comm.servernet import SPANS, Net, Process, counted

NUMEL = SPANS.grid.numel


def ones() -> torch.Tensor:
    """What moves theta by 1 with a rate of 1."""
    return torch.full((NUMEL,), -1.0)


def swarm(n_helpers: int, n_trainers: int, **options: object) -> Net:
    net = Net(**options)  # type: ignore[arg-type]
    for i in range(n_trainers):
        net.start(f"t{i}")
    for i in range(n_helpers):
        net.start(f"h{i}")
    net.until(net.at_rest, 60.0, "a first assignment")
    net.exchange({f"t{i}": None for i in range(n_trainers)})
    return net


def test_a_round_is_the_weighted_mean_of_all_and_standbys_hold_it_too() -> None:
    net = swarm(2, 2)
    a, b = net.processes["t0"], net.processes["t1"]
    a.begin(torch.full((NUMEL,), -1.0), weight=1.0)
    b.begin(torch.full((NUMEL,), -4.0), weight=3.0)
    net.until(lambda: len(a.exchanges) == len(b.exchanges) == 2, what="a round")
    mean = (1.0 * 1 + 4.0 * 3) / 4
    for trainer in (a, b):
        assert torch.allclose(trainer.service.theta, torch.full((NUMEL,), mean))
        assert trainer.exchanges[-1].step == 1
        for outcome in trainer.outcomes():
            assert outcome.outcome == sm.COUNTED and outcome.update is not None and not outcome.update.missing
            assert {(p.voter.peer, p.weight) for p in outcome.update.pushes} == {("t0", 1.0), ("t1", 3.0)}
    net.check_replicas()
    assert len(net.processes["h0"].service.owned) == len(net.processes["h1"].service.owned) == 2


def test_a_round_is_the_same_to_the_bit_whoever_pushes_first() -> None:
    vectors = torch.randn(3, NUMEL, generator=torch.Generator().manual_seed(1))
    thetas = []
    for order in ((0, 1, 2), (2, 1, 0)):
        net = swarm(1, 3, patience_s=60.0)
        for i in order:
            net.processes[f"t{i}"].begin(vectors[i], weight=1.0 + i)
            net.run(3.0)
        trainers = [net.processes[f"t{i}"] for i in order]
        net.until(lambda trainers=trainers: all(len(t.exchanges) == 2 for t in trainers), what="a round")
        thetas.append(net.theta())
    assert torch.equal(*thetas)
    torch.testing.assert_close(thetas[0], -(vectors[0] + 2 * vectors[1] + 3 * vectors[2]) / 6)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_an_offer_that_comes_after_its_owner_has_left_holds_nobody_up(asynchronous: bool, seed: int) -> None:
    """What it offered was asked of it, in vain, for a minute, though the standby had taken over within a second."""
    net = swarm(2, 2, asynchronous=asynchronous, seed=seed)
    net.exchange({"t0": ones(), "t1": ones()})
    owner, puller, offers = net.processes["h0"], net.processes["t0"], list[sm.PullOffer]()

    def leaves(source: Process, to: str, message: object) -> None:
        if source is owner and to == "t0" and isinstance(message, sm.PullOffer) and message.number and not offers:
            offers.append(message)
            net.clock.at(net.now + 1e-6, lambda: (net.act(owner, owner.node.leave), net.kill(owner)))

    net.hook = leaves
    began, before = net.now, len(puller.exchanges)
    puller.begin(ones())
    net.processes["t1"].begin(ones())
    net.until(lambda: len(puller.exchanges) > before, 300.0, "the exchange")
    assert offers and net.now - began < 10.0


def test_one_helper_alone_serves_and_says_that_it_has_no_standby() -> None:
    net = swarm(1, 1)
    net.exchange({"t0": ones()})
    assert torch.equal(net.processes["t0"].service.theta, torch.ones(NUMEL))
    net.run(5.0)
    said = [n.text for n in net.processes["h0"].news if isinstance(n, serverpeer.Notice)]
    (alone,) = (text for text in said if "no standby" in text)
    assert alone.startswith("spans 0 to 3 have no standby now"), "in one line, though the first span came before others"


def test_what_becomes_of_many_spans_at_once_is_said_in_one_line() -> None:
    """Helpers wrote a line for each of their spans, at the beginning, and whenever another died or left."""
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    net.until(lambda: len(net.processes["h1"].service.owned) == 2, 60.0, "half of the spans each")
    net.run(5.0)
    for name in ("h0", "h1"):
        (began,) = (n.text for n in net.processes[name].news if "mine now" in getattr(n, "text", ""))
        assert re.fullmatch(r"spans? [\d, to]+: mine now .version \d.", began), began
    first = net.processes["h0"]
    before = len(first.news)
    net.kill(net.processes["h1"])
    net.until(lambda: len(first.service.owned) == 4, 60.0, "all at the one that is left")
    net.run(5.0)
    texts = [n.text for n in first.news[before:] if isinstance(n, serverpeer.Notice)]
    assert len(texts) == 2 and re.fullmatch(r"spans? [\d, to]+: mine now .version 1.", texts[0]), texts
    assert texts[1].startswith("spans 0 to 3 have no standby now")


def test_whose_standby_left_says_so_only_where_somebody_trains() -> None:
    """At the end of a run its last helper was warned that it had no standby, and told to start another one."""
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    for name in ("t0", "h0"):
        net.act(net.processes[name], net.processes[name].node.leave)
        net.kill(net.processes[name])
    last = net.processes["h1"]
    net.until(lambda: net.at_rest() and all(seat.owner.solo for seat in last.service.seats.values()), 60.0, "all alone")
    net.run(5.0)
    assert not warned(last)
    net.start("t1")
    net.until(lambda: warned(last), 30.0, "somebody trains again")
    (text,) = warned(last)
    assert text.startswith("spans 0 to 3 have no standby now")


STEPS: dict[str, type] = {
    "the push is asked for": sm.PartReq,
    "the update is offered": sm.UpdateOffer,
    "the update is taken": sm.UpdateTaken,
    "the push is answered": sm.PushDone,
    "theta is offered": sm.PullOffer,
}
VICTIMS = ("owner", "standby", "both in turn", "frozen owner")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("step", STEPS)
def test_whoever_dies_at_whichever_step_every_push_counts_once(step: str, victim: str, asynchronous: bool) -> None:
    net = swarm(4, 2, asynchronous=asynchronous, seed=len(step))
    victims = [net.owner(0), net.standby(0)]
    struck: list[str] = []

    def strike(source: Process, target: str, message: object) -> None:
        due = isinstance(message, STEPS[step]) and net.processes[target].running
        roles = [p.name for p in victims if p is not None and p.running and not p.frozen]
        if not due or not {source.name, target} & set(roles) or len(struck) >= (2 if victim == "both in turn" else 1):
            return
        owner, standby = victims
        chosen = {"owner": owner, "frozen owner": owner, "standby": standby}.get(victim, [owner, standby][len(struck)])
        assert chosen is not None
        struck.append(chosen.name)
        if victim == "frozen owner":
            net.freeze(chosen, 20.0)
        else:
            net.kill(chosen)

    net.hook = strike
    total = torch.zeros(NUMEL)
    for _ in range(3):
        net.exchange({"t0": ones(), "t1": ones()})
        shares = torch.stack([counted(net.processes[f"t{i}"]) for i in range(2)])
        total += shares.sum(0) if asynchronous else shares.amax(0)
    assert struck
    net.until(net.at_rest, 120.0, "spans at rest")
    assert torch.equal(net.theta(), total), "what trainers were told is what theta is made of"
    net.check_replicas()


@pytest.mark.parametrize("seed", range(8))
def test_a_seeded_schedule_of_deaths_freezes_and_loss(seed: int) -> None:
    """Three helpers stay out of five at any time; the dead are replaced by new processes, the frozen come back."""
    asynchronous = seed % 2 == 0
    net = swarm(5, 3, asynchronous=asynchronous, seed=seed, loss=0.02 * (seed % 3))
    rng = random.Random(seed)
    harmed: dict[str, float] = {}

    def strike() -> None:
        for name in [n for n, until in harmed.items() if net.now > until]:
            del harmed[name]
            if not net.processes[name].running:
                net.start(name)
        fit = [h for h in net.helpers() if h.name not in harmed]
        if len(harmed) < 1 or (len(harmed) < 2 and rng.random() < 0.3):
            victim = rng.choice(fit)
            for_s = rng.uniform(1.0, 15.0)
            harmed[victim.name] = net.now + for_s + 10.0
            if rng.random() < 0.5:
                net.kill(victim)
            else:
                net.freeze(victim, for_s)
        if net.now < quiet_at:
            net.clock.at(net.now + rng.uniform(0.2, 6.0), strike)

    quiet_at = net.now + 60.0
    net.clock.at(net.now + 0.1, strike)
    total, done = torch.zeros(NUMEL), 0
    names = [f"t{i}" for i in range(3)]
    while net.now < quiet_at or done < 10:
        net.exchange({name: ones() for name in names}, 300.0)
        shares = torch.stack([counted(net.processes[name]) for name in names])
        total += shares.sum(0) if asynchronous else shares.amax(0)
        done += 1
        assert not any(o.set_aside for name in names for o in net.processes[name].outcomes()), "nobody was cut off"
    net.until(net.at_rest, 200.0, "spans at rest")
    assert torch.equal(net.theta(), total), "what trainers were told is what theta is made of"
    net.check_replicas()


def test_owner_and_standby_die_together_and_a_lost_push_is_told() -> None:
    net = swarm(3, 2, seed=5)
    net.exchange({"t0": ones(), "t1": ones()})
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None

    def strike(source: Process, target: str, message: object) -> None:
        if isinstance(message, sm.PullOffer) and message.span == 0 and source is owner:
            net.kill(owner)
            net.kill(standby)

    net.hook = strike
    net.exchange({"t0": ones(), "t1": ones()})
    for name in ("t0", "t1"):
        assert net.processes[name].outcomes()[0].outcome == sm.LOST
    a, b = SPANS.elements(0)
    assert torch.equal(net.processes["t0"].service.theta[a:b], torch.ones(b - a)), "what was pulled before is kept"
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.processes["t0"].service.theta[a:b], torch.full((b - a,), 2.0))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("n_helpers", [1, 2])
def test_a_push_whose_answer_died_with_all_helpers_is_part_of_what_another_pulled_and_counts_once(
    n_helpers: int, asynchronous: bool
) -> None:
    net = swarm(n_helpers, 2, asynchronous=asynchronous)
    a, b = net.trainers()
    net.lost = lambda source, target, message: isinstance(message, sm.PushDone) and target == a.name
    a.begin(ones())
    net.exchange({b.name: None if asynchronous else ones()})
    net.until(lambda: [net.owner(s).service.seats[s].owner.state.version for s in range(SPANS.n)] == [1] * SPANS.n)
    net.exchange({b.name: None})
    for helper in net.helpers():
        net.kill(helper)
    net.lost = lambda source, target, message: False
    net.start("h7")
    net.until(lambda: len(a.exchanges) == 2, 300.0, "going on")
    assert torch.equal(net.theta(), torch.ones(NUMEL))
    assert torch.equal(a.service.theta, torch.ones(NUMEL))
    assert (counted(a) == 1).all() and not any(o.set_aside for o in a.outcomes())
    net.exchange({a.name: ones(), b.name: ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 3.0 if asynchronous else 2.0)), "what comes next counts"


def seeded_without_the_newest() -> tuple[Net, Process, Process]:
    """The first trainer pulled version 2, the second version 1: that is what the next helper began with."""
    net = swarm(1, 2, asynchronous=True)
    a, b = net.trainers()
    net.exchange({b.name: ones()})
    net.exchange({a.name: ones()})
    net.lost = lambda source, target, message: isinstance(message, sm.Stake) and source is a
    replace_helper(net, "h7")
    net.lost = lambda source, target, message: False
    return net, a, b


def replace_helper(net: Net, name: str) -> None:
    for helper in net.helpers():
        net.kill(helper)
    net.start(name)
    net.until(net.at_rest, 300.0, "served again")


@pytest.mark.parametrize("pushes", [False, True])
def test_a_push_that_a_seeding_left_out_is_told_whether_or_not_another_comes_first(pushes: bool) -> None:
    net, a, _ = seeded_without_the_newest()
    net.exchange({a.name: ones() if pushes else None})
    assert [o.set_aside for o in a.outcomes()] == [1] * SPANS.n
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0 if pushes else 1.0))


@pytest.mark.parametrize("pulled", [False, True])
def test_a_push_is_told_as_gone_where_the_history_before_it_goes_on_at_its_version(pulled: bool) -> None:
    net, _, b = seeded_without_the_newest()
    net.lost = lambda source, target, message: isinstance(message, sm.PullOffer) and message.number and not pulled
    b.begin(ones())
    owners = [net.owner(span).service.seats[span].owner for span in range(SPANS.n)]
    net.until(lambda: len(b.exchanges) == 3 if pulled else all(leg.phase == PULL for leg in b.service.exchange.legs))
    assert [owner.state.version for owner in owners] == [2] * SPANS.n
    replace_helper(net, "h8")
    net.lost = lambda source, target, message: False
    if pulled:
        net.exchange({b.name: None})
    net.until(lambda: len(b.exchanges) == (4 if pulled else 3))
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0)), "what the first trainer had pulled"
    told = [(o.outcome, o.set_aside, o.set_aside_weight) for o in b.outcomes()]
    assert told == [("", 1, 1.0) if pulled else (sm.LOST, 0, 0.0)] * SPANS.n


@pytest.mark.parametrize("pushes", range(5))
def test_an_offer_with_pushes_that_cannot_be_counted_is_not_taken(pushes: int) -> None:
    net = swarm(1, 1)
    client, owner = net.processes["t0"].service, net.owner(0)
    view = client.witness.established[0]
    client.begin(None, 1.0, net.now)
    offer = sm.PullOffer(0, view.term, client.number, 5, 5, "theta/its", 0, impossible()[pushes])
    with pytest.raises(ProtocolError, match="push"):
        client.receive(owner.voter, offer, net.now)
    assert not client.pulled[0].fetching


def saved(process: Process) -> dict[str, Any]:
    """A checkpoint of a trainer, for `Net.start`."""
    client = process.service
    return {"theta": client.theta.clone(), "step": client.step, "history": client.history}


def checkpoints(asynchronous: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of two trainers of one run that is over: the first was last there at round 1, the second at round 3."""
    net = swarm(2, 2, asynchronous=asynchronous)
    a, b = net.trainers()
    net.exchange({a.name: ones(), b.name: ones()})
    older = saved(a)
    net.kill(a)
    for _ in range(2):
        net.exchange({b.name: ones()})
    return older, saved(b)


def resumed(first: dict[str, Any], asynchronous: bool = False, helper: str = "h8") -> Net:
    """A swarm that was begun again by one trainer, and trains on."""
    net = Net(asynchronous=asynchronous)
    net.start(helper)
    trainer = net.start("t0", **first)
    net.until(net.at_rest, 60.0, "a first assignment")
    for _ in range(5):
        net.exchange({trainer.name: ones()})
    return net


def told_lost(net: Net, name: str, **checkpoint: Any) -> list[int]:
    """What a trainer is told that comes with a checkpoint."""
    trainer = net.start(name, **checkpoint)
    net.exchange({name: None})
    found = [outcome.rounds_lost for outcome in trainer.outcomes()]
    net.exchange({name: None})
    assert not any(outcome.rounds_lost for outcome in trainer.outcomes()), "told once"
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_swarm_that_is_started_again_takes_the_newest_checkpoint_though_an_older_one_comes_first(
    asynchronous: bool,
) -> None:
    older, newer = checkpoints(asynchronous)
    net = Net(asynchronous=asynchronous)
    net.start("h8")
    a = net.start("t0", **older)
    net.run(serverpeer.START_S / 2)
    assert not net.owners(0)
    b = net.start("t1", **newer)
    net.until(net.at_rest, 60.0, "a first assignment")
    net.exchange({"t0": None, "t1": None})
    for trainer in (a, b):
        assert torch.equal(trainer.service.theta, newer["theta"]) and trainer.service.step == newer["step"]
        assert [outcome.rounds_lost for outcome in trainer.outcomes()] == [0] * SPANS.n
        assert not any(isinstance(news, Paused) for news in trainer.news), "it waits, but for no helper"


def test_the_wait_for_checkpoints_begins_anew_where_the_first_trainer_went_away_again() -> None:
    older, newer = checkpoints()
    net = Net()
    net.start("h8")
    first = net.start("t0", **older)
    net.run(serverpeer.START_S / 2)
    net.kill(first)
    net.run(10 * serverpeer.START_S)
    net.start("t0", **older)
    net.run(serverpeer.START_S / 2)
    assert not net.owners(0)
    net.start("t1", **newer)
    net.until(net.at_rest, 60.0, "a first assignment")
    assert net.owner(0).service.step == newer["step"]


def test_a_trainer_that_is_a_member_and_still_reads_its_checkpoint_is_waited_for_and_not_for_ever() -> None:
    _, newer = checkpoints()
    for ready in (True, False):
        net = Net()
        net.lost = lambda source, target, message: isinstance(message, sm.Stake) and source.name == "t1"
        net.start("h8")
        net.start("t0")
        net.start("t1", **newer)
        net.run(serverpeer.START_S / 2)
        assert not net.owners(0)
        if ready:
            net.lost = lambda source, target, message: False
        net.until(net.at_rest, 60.0, "a first assignment")
        assert net.owner(0).service.step == (3 if ready else 0)


def test_it_is_waited_for_though_another_was_started_twice_meanwhile() -> None:
    """The word of a process that is gone is not that of one that has said nothing yet."""
    _, newer = checkpoints()
    net = Net()
    net.lost = lambda source, target, message: isinstance(message, sm.Stake) and source.name == "t1"
    net.start("h8")
    first = net.start("t0")
    net.start("t1", **newer)
    net.run(serverpeer.START_S / 3)
    net.kill(first)
    net.start("t0")
    net.run(serverpeer.START_S / 3)
    assert not net.owners(0)
    net.lost = lambda source, target, message: False
    net.until(net.at_rest, 60.0, "a first assignment")
    assert net.owner(0).service.step == newer["step"]


def test_who_comes_with_a_newer_checkpoint_than_the_swarm_went_on_from_is_told() -> None:
    older, newer = checkpoints()
    assert (older["step"], newer["step"]) == (1, 3)
    net = resumed(older)
    assert net.trainers()[0].service.step > newer["step"], "the swarm has passed it meanwhile"
    assert told_lost(net, "t1", **newer) == [2] * SPANS.n
    assert told_lost(net, "t2", **older) == [0] * SPANS.n


def test_it_is_told_though_the_swarm_was_started_again_from_later_rounds_since() -> None:
    older, newer = checkpoints()
    later = saved(resumed(older).processes["t0"])
    assert later["step"] == 6
    net = resumed(later, helper="h9")
    assert told_lost(net, "t1", **newer) == [2] * SPANS.n
    assert told_lost(net, "t2", **later) == told_lost(net, "t3", **older) == [0] * SPANS.n


def test_a_swarm_that_began_anew_with_the_first_parameters_is_another_one() -> None:
    _, newer = checkpoints()
    net = resumed({})
    assert told_lost(net, "t1", **newer) == [3] * SPANS.n


def test_who_comes_back_to_its_swarm_or_to_one_that_went_on_from_its_checkpoint_has_lost_nothing() -> None:
    older, newer = checkpoints()
    net = resumed(newer)
    assert told_lost(net, "t1", **older) == told_lost(net, "t2", **newer) == [0] * SPANS.n
    now = saved(net.processes["t0"])
    net.kill(net.processes["t0"])
    assert told_lost(net, "t0", **now) == [0] * SPANS.n
    replace_helper(net, "h5")
    assert told_lost(net, "t3", **now) == [0] * SPANS.n, "what it holds was part of the newest stake"


def test_what_a_seeding_left_out_is_told_to_who_comes_back_with_it() -> None:
    net = swarm(1, 2, asynchronous=True)
    a, b = net.trainers()
    net.exchange({b.name: ones()})
    net.exchange({a.name: ones()})
    newer = saved(a)
    net.kill(a)
    replace_helper(net, "h7")
    assert told_lost(net, a.name, **newer) == [1] * SPANS.n


def test_training_pauses_when_the_last_helper_leaves_and_goes_on_with_the_next() -> None:
    net = swarm(2, 2)
    net.exchange({"t0": ones(), "t1": ones()})
    for helper in net.helpers():
        net.act(helper, helper.node.leave)
        net.kill(helper)
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
    net.until(lambda: all(t.paused for t in net.trainers()), 60.0, "a pause that is told")
    net.start("h7")
    net.until(lambda: all(len(t.exchanges) == 3 and not t.paused for t in net.trainers()), 120.0, "going on")
    assert torch.equal(net.processes["t0"].service.theta, torch.full((NUMEL,), 2.0))
    assert all((counted(t) == 1).all() for t in net.trainers())


def test_a_newcomer_takes_its_share_and_nothing_is_lost_on_the_way() -> None:
    net = swarm(2, 2, asynchronous=True)
    done = 0
    net.start("h5")
    while not (net.at_rest() and net.processes["h5"].service.owned):
        net.exchange({"t0": ones(), "t1": ones()})
        done += 1
        assert done < 200
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0 * (done + 1)))
    net.check_replicas()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_acknowledged_while_a_standby_is_claimed_is_held_by_that_one_too(asynchronous: bool) -> None:
    """Its claim may be established, and the owner dead, before the owner knows: it would go on without that update."""
    net = swarm(2, 2, asynchronous=asynchronous)
    claims: list[tuple[Process, sm.SpanView]] = []

    def lost(source: Process, to: str, message: object) -> bool:
        if isinstance(message, sm.Claim) and not claims and message.view.standby == net.processes["h5"].voter:
            claims.append((source, message.view))
        if not claims:
            return False
        owner, view = claims[0]
        granted = to == owner.name and isinstance(message, sm.Granted) and message.span == view.span
        return granted or (source is owner and to == "h5" and isinstance(message, sm.UpdateOffer))

    net.lost = lost
    net.start("h5")
    net.until(lambda: claims, 120.0, "a claim with the newcomer as standby")
    owner = claims[0][0].service.seats[claims[0][1].span].owner
    version, before = owner.state.version, owner.view.standby
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
    net.until(lambda: owner.followers.taken(before) > version, 3.0, "the present standby holds it")
    assert owner.also == net.processes["h5"].voter and owner.state.version == version, "it is not applied"
    net.lost = lambda source, to, message: False
    net.until(lambda: all(len(net.processes[name].exchanges) == 2 for name in ("t0", "t1")), 60.0, "it counts")
    net.until(net.at_rest, 60.0, "a standby")
    net.check_replicas()


def test_without_a_standby_nothing_is_acknowledged_before_there_is_nobody_to_be_one() -> None:
    """It may have died just now, and the owner after it: what others had seen would be lost."""
    net = swarm(2, 1)
    owner = net.owner(0).service.seats[0].owner
    owner.renew(dataclasses.replace(owner.view, standby=None))
    version, nothing = owner.state.version, [b"" for _ in owner.state.spans.chunks(0)]
    owner._issue(sm.Update(version + 1, owner.state.step + 1, 1, (), ()), nothing, {})
    assert owner.state.version == version and owner.issued == version + 1 and not owner.quiet
    owner.solo = True
    owner.apply()
    assert owner.state.version == version + 1 and owner.quiet


@pytest.mark.parametrize("moves", [False, True])
def test_each_push_is_as_large_after_a_takeover_or_a_move_as_before(moves: bool) -> None:
    """The owner after it divided the step among those that it had heard of: the first push was n times as large."""
    divided = Optimizer("divided sgd", Sgd(), lambda t: 1.0, asynchronous=True, momentum=0.0)
    net = swarm(2, 4, asynchronous=True, optimizer=divided)
    pushers = [f"t{i}" for i in range(4)]
    for name in pushers:
        net.exchange({name: ones()})
    owner = net.owner(0)
    if moves:
        net.start("h5")
        net.until(lambda: net.at_rest() and net.processes["h5"].service.owned, 120.0, "a share for the newcomer")
    else:
        net.kill(owner)
        net.until(net.at_rest, 120.0, "a takeover")
    for name in pushers:
        net.exchange({name: ones()})
        assert [o.update.n for o in net.processes[name].outcomes() if o.update] == [4] * SPANS.n
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))


def test_who_only_pulls_has_no_part_of_the_step() -> None:
    """Half of each push was kept for one that looks at the parameters now and then."""
    divided = Optimizer("divided sgd", Sgd(), lambda t: 1.0, asynchronous=True, momentum=0.0)
    net = swarm(2, 2, asynchronous=True, optimizer=divided)
    for pulls in ({"t0": None, "t1": None}, {"t0": ones(), "t1": None}, {"t0": ones()}, {"t1": ones()}, {"t0": ones()}):
        net.exchange(pulls)
    made = {name: net.processes[name].exchanges for name in ("t0", "t1")}
    n = {name: [o.outcomes[0].update.n for o in overs if o.outcomes[0].update] for name, overs in made.items()}
    assert n == {"t0": [1, 1, 2], "t1": [2]}, "until it pushes"
    assert torch.equal(net.theta(), torch.full((NUMEL,), 3.0))


def test_a_push_that_is_too_old_is_refused_and_told() -> None:
    net = swarm(2, 2, asynchronous=True, max_staleness=3)
    for _ in range(5):
        net.exchange({"t0": ones()})
    net.exchange({"t1": ones()})
    assert all(o.outcome == sm.STALE and o.staleness == 5 for o in net.processes["t1"].outcomes())
    assert torch.equal(net.processes["t1"].service.theta, torch.full((NUMEL,), 5.0)), "but the parameters are new"
    net.exchange({"t1": ones()})
    assert (counted(net.processes["t1"]) == 1).all()


def test_a_push_that_becomes_too_old_on_its_way_is_refused_and_told() -> None:
    """Its owner has what was offered when it was not; the offers that follow are lost."""
    net = swarm(2, 2, asynchronous=True, max_staleness=3)
    late, parts = net.processes["t1"], dict[tuple[str, int], tuple[str, sm.Part]]()

    def held_back(source: Process, target: str, message: object) -> bool:
        if source is late and isinstance(message, sm.Part):
            parts[message.key, message.part] = target, message
        asked = len({key for key, _ in parts}) == SPANS.n
        return source is late and isinstance(message, (sm.Part, sm.PushOffer) if asked else sm.Part)

    net.lost = held_back
    late.begin(100 * ones())
    net.until(lambda: len({key for key, _ in parts}) == SPANS.n, what="all owners fetch it")
    for _ in range(5):
        net.exchange({"t0": ones()})
    for owner, part in parts.values():
        net._deliver(owner, late.voter, late.name, part)
    net.until(lambda: len(late.exchanges) == 2, what="it is told")
    assert all(o.outcome == sm.STALE and o.staleness == 5 for o in late.outcomes())
    assert torch.equal(net.theta(), torch.full((NUMEL,), 5.0))


def test_a_push_that_counts_is_told_how_many_updates_came_between() -> None:
    net = swarm(2, 2, asynchronous=True, max_staleness=3)
    for _ in range(3):
        net.exchange({"t0": ones()})
    for between in (3, 0):
        net.exchange({"t1": ones()})
        assert [(o.outcome, o.staleness) for o in net.processes["t1"].outcomes()] == [(sm.COUNTED, between)] * SPANS.n


def test_parameters_of_a_round_are_given_once_its_standby_holds_it() -> None:
    net = swarm(2, 2)
    trainer, owner = net.processes["t0"], net.owner(0).service.seats[0].owner
    net.lost = lambda source, target, message: isinstance(message, sm.UpdateTaken)
    trainer.begin(ones())
    net.processes["t1"].begin(ones())
    net.until(lambda: owner.issued == 1)
    assert owner.state.step == 0
    given: list[int] = []
    net.hook = lambda source, target, m: given.append(m.step) if isinstance(m, sm.PullOffer) and m.number == 7 else None
    pull = sm.PullReq(0, owner.view.term, 7, 1, SPANS.digest)
    net._deliver(net.owner(0).name, trainer.voter, trainer.name, pull)
    net.run(1.0)
    assert not given
    net.lost = lambda source, target, message: False
    net.until(lambda: given)
    assert given == [1]


def test_a_round_goes_on_without_a_late_trainer_which_is_named_and_told() -> None:
    net = swarm(2, 3, patience_s=2.0)
    net.exchange({"t0": ones(), "t1": ones()})
    for outcome in net.processes["t0"].outcomes():
        assert outcome.update is not None
        assert [(e.voter.peer, e.reason) for e in outcome.update.missing] == [("t2", "late")]
    net.exchange({"t2": ones()})
    assert all(o.outcome == sm.LATE for o in net.processes["t2"].outcomes())
    assert torch.equal(net.processes["t2"].service.theta, torch.ones(NUMEL))


@pytest.mark.parametrize("pulls", [False, True])
def test_a_trainer_that_pushes_no_more_is_waited_for_in_one_round(pulls: bool) -> None:
    """Its client was closed, or only looks at the parameters: each round waited for it, and named it as late."""
    net = swarm(2, 2, patience_s=20.0)
    net.exchange({"t0": ones(), "t1": ones()})
    for span in range(SPANS.n):  # a repetition that comes after its answer
        view = net.owner(span).service.witness.established[span]
        seq = net.processes["t1"].service.exchange.legs[span].seq
        push = sm.PushOffer(span, view.term, seq, 0, 1, 1.0, "", SPANS.digest)
        net.owner(span).service.receive(net.processes["t1"].voter, push, net.now)
    took: list[float] = []
    for _ in range(4):
        began = net.now
        net.exchange({"t0": ones()})
        took.append(net.now - began)
        if pulls:
            net.exchange({"t1": None})
    assert took[0] > 20.0 > 5.0 > max(took[1:])
    net.exchange({"t0": ones(), "t1": ones()})  # late, or not
    net.exchange({"t1": None})
    net.processes["t0"].begin(ones())
    net.run(5.0)
    net.exchange({"t1": ones()})
    for name in ("t0", "t1"):
        assert all(o.update and len(o.update.pushes) == 2 for o in net.processes[name].outcomes()), (
            "it takes part again"
        )


def test_a_trainer_that_is_slow_and_pushes_is_waited_for_again() -> None:
    net = swarm(2, 2, patience_s=20.0)
    for slow in (False, True, False):
        net.processes["t0"].begin(ones())
        net.run(30.0 if slow else 5.0)
        net.exchange({"t1": ones()})
        assert {o.outcome for o in net.processes["t1"].outcomes()} == {sm.LATE if slow else sm.COUNTED}


def test_a_push_that_arrives_after_its_round_was_closed_is_no_part_of_another() -> None:
    """Its last part was on a slow link for longer than the round waited."""
    net = swarm(1, 2)
    owner, late = net.owner(0), net.processes["t1"]
    parts: list[sm.Part] = []

    def held_back(source: Process, target: str, message: object) -> bool:
        if source is late and isinstance(message, sm.Part):
            parts.append(message)
        return source is late and isinstance(message, sm.Part)

    net.lost = held_back
    late.begin(100 * ones())
    net.exchange({"t0": ones()})
    offers = {part.key: part for part in parts if part.part == 0}
    assert len(offers) == SPANS.n > 0
    for part in parts:
        net._deliver(owner.name, late.voter, late.name, part)
    net.until(lambda: len(late.exchanges) == 2)
    net.run(20.0)
    assert all(o.outcome == sm.LATE for o in late.outcomes())
    assert torch.equal(net.theta(), torch.ones(NUMEL)), "what was told as late does not count"


def test_a_trainer_that_dies_in_the_middle_of_a_push_is_named_and_the_mean_is_of_the_others() -> None:
    net = swarm(2, 3)
    victim = net.processes["t2"]

    def strike(source: Process, target: str, message: object) -> None:
        if isinstance(message, sm.Part) and source is victim:
            net.kill(victim)

    net.hook = strike
    victim.begin(torch.full((NUMEL,), 100.0))
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))
    reasons = {e.reason for o in net.processes["t0"].outcomes() for e in (o.update.missing if o.update else ())}
    assert reasons <= {"dead", "late"} and reasons


def test_a_ten_times_slower_trainer_does_not_slow_the_others() -> None:
    def pushes(slow: bool) -> int:
        net = swarm(2, 3, asynchronous=True, seed=1)
        until = net.now + 60.0

        def phase(trainer: Process, phase_s: float) -> None:
            again[trainer.name] = (len(trainer.exchanges), phase_s)
            trainer.begin(ones())

        again: dict[str, tuple[int, float]] = {}
        for name, phase_s in (("t0", 1.0), ("t1", 1.0), *((("t2", 10.0),) if slow else ())):
            net.clock.at(net.now + phase_s, phase, net.processes[name], phase_s)
        while net.now < until:
            assert net.clock.step()
            for name, (n, phase_s) in list(again.items()):
                if len(net.processes[name].exchanges) > n:
                    del again[name]
                    net.clock.at(net.now + phase_s, phase, net.processes[name], phase_s)
        return sum(len(net.processes[name].exchanges) for name in ("t0", "t1"))

    assert pushes(slow=True) >= 0.98 * pushes(slow=False)


@pytest.mark.parametrize("alone", [False, True])
def test_parameters_that_are_not_finite_are_no_beginning(alone: bool) -> None:
    net = Net()
    odd = net.start("t0", torch.full((NUMEL,), math.nan))
    helper = net.start("h0")
    if alone:
        net.run(60.0)
        assert not helper.service.owned
        words = [news for news in helper.news if "not finite" in getattr(news, "text", "")]
        assert len(words) == 1 and words[0].text == f"span 0: what {odd.voter} holds is not finite, and not taken"
    net.start("t1")
    net.until(net.at_rest, 60.0, "a first assignment")
    net.exchange({"t0": None, "t1": None})
    assert torch.equal(odd.service.theta, torch.zeros(NUMEL))


def said(helper: Process, words: str) -> bool:
    return any(words in getattr(news, "text", "") and getattr(news, "serious", False) for news in helper.news)


def with_optimizer(net: Net, name: str, optimizer: Optimizer) -> Process:
    """A helper that was started with another one than the others."""
    usual, net.optimizer = net.optimizer, optimizer
    started = net.start(name)
    net.optimizer = usual
    return started


OTHER = Optimizer("another sgd", Sgd(), lambda t: 0.5)


@pytest.mark.parametrize("n_helpers", [1, 2])
def test_a_helper_with_another_optimizer_serves_nothing_and_says_so(n_helpers: int) -> None:
    """Its spans moved at another rate; where it was to be a standby, nothing came of it and no span moved."""
    net = swarm(n_helpers, 1)
    net.may_refuse = True  # an image that was offered before the owner had heard of it
    odd = with_optimizer(net, "h5", OTHER)
    net.until(lambda: said(odd, "this helper serves nothing beside it"), 30.0, "word of it")
    others = [net.processes[f"h{i}"] for i in range(n_helpers)]
    net.until(lambda: all(said(helper, f"{odd.voter} is left out") for helper in others), 30.0, "word of it there")
    began = net.now
    for _ in range(3):
        net.exchange({"t0": ones()})
    assert net.now - began < 10.0
    if n_helpers == 2:
        net.kill(net.owner(0))
    net.run(60.0)
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 4.0)) and not odd.service.owned and not odd.service.backed
    net.kill(odd)
    net.start("h6")
    net.until(net.at_rest, 60.0, "spans at rest")


def test_helpers_of_two_optimizers_that_come_at_once_serve_nothing_until_one_has_left() -> None:
    net = Net()
    net.start("t0")
    net.start("h0")
    odd = with_optimizer(net, "h1", OTHER)
    net.run(60.0)
    assert not net.processes["h0"].service.owned and not odd.service.owned
    net.kill(odd)
    net.until(net.at_rest, 60.0, "a first assignment")
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def failures(trainer: Process) -> list[ExchangeFailed]:
    return [news for news in trainer.news if isinstance(news, ExchangeFailed)]


@pytest.mark.parametrize("established", [False, True])
@pytest.mark.parametrize("grid", [Grid(100, 8, "fp32"), Grid(NUMEL, 8, "bf16")])
def test_a_trainer_with_another_vector_is_told_so_and_no_part_of_it_is_averaged(grid: Grid, established: bool) -> None:
    """The spans that were as long in both counted, and the trainer waited for the others for ever."""
    net = swarm(2, 1)
    net.may_refuse = True
    net.spans = Spans(grid, SPANS.n)
    odd = net.start("t1")
    net.spans = SPANS
    if established:  # it was there when an owner made its view known
        net.run(5.0)
        for view in net.owner(0).service.witness.established.values():
            net.act(odd, lambda now, view=view: odd.service.receive(view.owner, sm.Established(view), now))
    for _ in range(2):
        failed = len(failures(odd))
        odd.begin(torch.full((grid.numel,), -100.0))
        net.until(lambda failed=failed: len(failures(odd)) > failed, 20.0, "word of it")
        net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0)) and not odd.exchanges
    told = [o.update for o in net.processes["t0"].outcomes()]
    assert all(update is not None and not update.missing and len(update.pushes) == 1 for update in told)


def test_a_helper_that_hears_of_another_layout_first_takes_that_of_the_owners() -> None:
    """It held on to what a trainer of another vector had told it, for ever and without a word."""
    net = swarm(2, 1)
    net.may_refuse = True
    net.spans = Spans(Grid(100, 8, "fp32"), SPANS.n)
    net.start("t1")
    net.spans = SPANS
    net.run(3.0)
    told = sm.AskViews, sm.TellViews
    net.lost = lambda source, to, message: to == "h5" and source.name != "t1" and isinstance(message, told)
    late = net.start("h5")
    net.until(lambda: late.service.spans is not None, 10.0, "a layout")
    assert late.service.spans.grid.numel == 100
    net.lost = lambda source, to, message: False
    net.until(net.at_rest, 60.0, "its share")
    assert late.service.owned
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_what_a_trainer_with_another_vector_holds_is_no_beginning() -> None:
    net = Net()
    net.may_refuse = True
    net.start("h0")
    net.start("t1")
    net.run(0.5)
    net.spans = Spans(Grid(100, 8, "fp32"), SPANS.n)
    net.start("t0", torch.full((100,), 7.0))  # the first in the order of ids
    net.spans = SPANS
    net.until(net.at_rest, 60.0, "a first assignment")
    assert torch.equal(net.theta(), torch.zeros(NUMEL))


def impossible() -> list[tuple[sm.Counted, ...]]:
    """What can't be counted in version 5."""
    t0 = Voter("t0", 1)
    too_many = tuple(sm.Counted(Voter(f"t{i}", 1), 1, 1) for i in range(COUNTED_MAX + 1))
    single = [sm.Counted(t0, 0, 1), sm.Counted(t0, 1, 0), sm.Counted(t0, 1, 6)]
    return [*((push,) for push in single), (sm.Counted(t0, 1, 1), sm.Counted(t0, 2, 2)), too_many]


def impossible_pushes() -> list[tuple[sm.Push, ...]]:
    """What no update holds."""
    t0 = Voter("t0", 1)
    numbers = [(0, 1.0), (sm.SEQ_MAX + 1, 1.0), (1, -1.0), (1, 2.0**54)]
    return [*((sm.Push(t0, seq, weight),) for seq, weight in numbers), (sm.Push(t0, 1, 1.0), sm.Push(t0, 2, 1.0))]


def impossible_origins() -> list[sm.Origin]:
    left = sm.Left(Voter("h0", 1), 1)
    past = [(dataclasses.replace(left, version=-1),), (left,) * (sm.PAST_MAX + 1)]
    return [sm.Origin(b"", -1), sm.Origin(b"", sm.NUMBER_MAX + 1), *(sm.Origin(b"", 1, None, p) for p in past)]


def test_nonsense_is_dropped_and_changes_nothing() -> None:
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    owner, trainer = net.owner(0), net.processes["t0"]
    before, t0 = net.theta(), trainer.voter
    view = owner.service.witness.established[0]
    nonsense: list[object] = [
        sm.Claim(dataclasses.replace(view, span=99, term=99)),
        sm.Established(dataclasses.replace(view, span=-1, term=99)),
        sm.AskViews(sm.Layout(10, 0, "fp32", 1), ""),
        sm.AskViews(sm.Layout(61, 8, "fp32", 4), ""),
        sm.PushOffer(0, view.term, 2, 0, 2, math.inf, "push/0/2", SPANS.digest),
        sm.PushOffer(0, view.term, 0, 0, 2, 1.0, "push/0/2", SPANS.digest),
        sm.PushOffer(0, view.term, 2, 0, 2, 1.0, "push/0/2", b"another"),
        sm.PushOffer(0, view.term, 1 << 63, 0, 2, 1.0, "push/0/2", SPANS.digest),
        sm.PushOffer(0, view.term, 2, 1 << 63, 2, 1.0, "push/0/2", SPANS.digest),
        sm.PushOffer(0, view.term, 2, 0, 1 << 63, 1.0, "push/0/2", SPANS.digest),
        sm.PullReq(0, view.term, 1, 1 << 63, SPANS.digest),
        sm.Claim(dataclasses.replace(view, term=1 << 63)),
        sm.Claim(dataclasses.replace(view, term=-1)),
        sm.Established(dataclasses.replace(view, term=1 << 63)),
        sm.Refused(dataclasses.replace(view, term=1 << 63), False),
        sm.TellViews(None, "", (dataclasses.replace(view, seed_version=1 << 63),), ()),
        sm.ImageOffer(view, 1, 1 << 63, b"", "image", 100),
        sm.UpdateOffer(view, 1, sm.Update(2, 1 << 63, 1, (), ()), "update", ()),
        sm.UpdateOffer(view, 1, sm.Update(2, 2, 1, (), (Excluded(trainer.voter, "no reason"),)), "update", ()),
        *(sm.UpdateOffer(view, 1, sm.Update(2, 2, 1, pushes, ()), "update", ()) for pushes in impossible_pushes()),
        sm.UpdateOffer(view, 1, sm.Update(2, 2, 1, (sm.Push(t0, 1, 1.0),), (Excluded(t0, sm.LATE),)), "update", ()),
        *(sm.Established(dataclasses.replace(view, term=view.term + 1, origin=o)) for o in impossible_origins()),
        *(sm.Stake(0, origin, 1, 1, "", (), SPANS.digest) for origin in impossible_origins()),
        sm.Stake(0, NOWHERE, 1, 1 << 63, "", (), SPANS.digest),
        sm.PullReq(0, view.term, 1, 0, b"another"),
        sm.Stake(0, NOWHERE, -1, 0, "", (), SPANS.digest),
        *(sm.Stake(0, NOWHERE, 5, 0, "", pushes, SPANS.digest) for pushes in impossible()),
        sm.PullOffer(0, view.term, 1, 1, 1, "", 0, ()),
    ]
    for message in nonsense:
        with pytest.raises(ProtocolError):
            owner.node.receive(trainer.voter, message, net.now)
    for outcome, reason in (("counted", "no reason"), ("well", "late")):
        update = sm.Update(1, 1, 1, (), (Excluded(trainer.voter, reason),))
        with pytest.raises(ProtocolError):
            trainer.node.receive(owner.voter, sm.PushDone(0, view.term, 1, outcome, 1, update, 0), net.now)
    with pytest.raises(ProtocolError):
        trainer.node.receive(owner.voter, sm.PushDone(0, view.term, 1, sm.STALE, 0, None, -1), net.now)
    harmless = [
        sm.Part("nothing", 0, b"x"),
        sm.NoPart("nothing"),
        sm.PartReq("nothing", (0, 1)),
        sm.PartReq("x" * 1000, ()),
        sm.UpdateTaken(0, view.term, 10**9, b"?"),
        sm.UpdateTaken(77, 1, 1, b""),
        sm.Granted(77, 1),
        sm.PushOffer(77, 1, 1, 0, 1, 1.0, "", SPANS.digest),
        sm.PullReq(77, 1, 1, 0, SPANS.digest),
    ]
    for message in harmless:
        owner.node.receive(trainer.voter, message, net.now)
    assert owner.service.fetches.strays == {trainer.voter: 1}
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), before + 1)


def test_after_a_claim_for_the_greatest_term_that_there_can_be_the_others_go_on() -> None:
    """The next term had no wire form: the helper that wanted it died of that."""
    net = swarm(2, 2)
    net.may_refuse = True
    view = net.owner(0).service.witness.established[0]
    net.lost = lambda source, target, message: isinstance(message, sm.Established)
    for term in (sm.NUMBER_MAX + 1, (1 << 64) - 1):
        for process in list(net.processes.values()):
            claim = sm.Claim(dataclasses.replace(view, term=term, owner=net.processes["t1"].voter))
            net._deliver(process.name, net.processes["t1"].voter, "t1", claim)
    net.lost = lambda source, target, message: False
    net.kill(net.owner(0))
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_a_round_that_nobody_can_have_come_to_moves_nothing() -> None:
    """All trainers came to it with the next pull, and the next round had no wire form."""
    net = swarm(2, 2)
    net.may_refuse = True
    for pulled in net.processes["t1"].service.pulled:
        pulled.step = (1 << 64) - 2
    net.processes["t1"].begin(ones())
    net.exchange({"t0": ones()})
    net.exchange({"t0": ones()})
    assert net.processes["t0"].service.step == 2


def test_a_later_round_is_come_to_where_most_name_it_and_not_by_a_word_of_one() -> None:
    """A single push named the round, and a run with an end was over for all."""
    net = swarm(2, 3)
    pushes = {f"t{i}": ones() for i in range(3)}

    def come_to(step: int, *names: str) -> None:
        for name in names:
            net.processes[name].service.pulled[1].step = step

    come_to(1000, "t2")
    net.exchange(pushes)
    assert {net.owner(span).service.seats[span].owner.state.step for span in range(SPANS.n)} == {1}
    come_to(1000, "t2")
    net.exchange({"t2": ones()})
    assert {net.processes["t2"].service.step, net.owner(0).service.step} == {2}, "nor where it does not wait for others"
    come_to(7, "t0", "t1")
    net.exchange(pushes)
    assert {net.owner(span).service.seats[span].owner.state.step for span in range(SPANS.n)} == {8}


def test_of_offers_that_follow_each_other_the_last_alone_is_fetched() -> None:
    """Each was fetched to its end, however many there were."""
    net = swarm(2, 1)
    owner, trainer = net.owner(0), net.processes["t0"]
    standby = net.standby(0)
    assert standby is not None
    view, fetches = owner.service.witness.established[0], (owner.service.fetches, standby.service.fetches)
    replica, state = standby.service.seats[0].replica, owner.service.seats[0].owner.state
    update, sizes = sm.Update(1, 1, 1, (), ()), SPANS.wire_sizes(0)
    for i in range(100):
        push = sm.PushOffer(0, view.term, i + 1, 0, 1, 1.0, f"push {i}", SPANS.digest)
        owner.service.receive(trainer.voter, push, net.now)
        offer = sm.UpdateOffer(view, replica.era, update, f"update {i}", sizes)
        standby.service.receive(owner.voter, offer, net.now)
        image = sm.ImageOffer(view, replica.era + 1, 7, bytes(32), f"image {i}", state.image_bytes())
        standby.service.receive(owner.voter, image, net.now)
    assert fetches[0].busy(trainer.voter, "push 99") and not fetches[0].busy(trainer.voter, "push 98")
    for what in ("update", "image"):
        assert fetches[1].busy(owner.voter, f"{what} 99") and not fetches[1].busy(owner.voter, f"{what} 98")


def test_an_offer_that_comes_after_the_one_that_follows_it_changes_nothing() -> None:
    """It ended the fetch of the push that holds, which began anew with the next offer of that."""
    net = swarm(1, 1)
    owner, trainer = net.owner(0), net.processes["t0"]
    view, fetches = owner.service.witness.established[0], owner.service.fetches
    for seq in (2, 1):
        push = sm.PushOffer(0, view.term, seq, 0, 1, 1.0, f"push {seq}", SPANS.digest)
        owner.service.receive(trainer.voter, push, net.now)
    assert fetches.busy(trainer.voter, "push 2") and not fetches.busy(trainer.voter, "push 1")


def test_a_push_that_another_follows_is_in_no_round_though_the_other_never_comes() -> None:
    """Its trainer has given it up."""
    net = swarm(1, 2, patience_s=5.0)
    owner, trainer = net.owner(0), net.processes["t0"]
    trainer.begin(100 * ones())
    net.until(lambda: trainer.voter in owner.service.seats[0].owner._waiting)
    view, seq = owner.service.witness.established[0], trainer.service.exchange.legs[0].seq
    push = sm.PushOffer(0, view.term, seq + 1, 0, 1, 1.0, "lost", SPANS.digest)
    net.lost = lambda source, target, message: source is trainer and isinstance(message, sm.PushOffer)
    owner.service.receive(trainer.voter, push, net.now)
    net.exchange({"t1": ones()})
    a, b = SPANS.elements(0)
    assert torch.equal(net.theta()[a:b], torch.ones(b - a)) and (net.theta()[b:] > 50).all()


def test_no_more_is_fetched_of_one_holder_than_it_can_have() -> None:
    asked: list[Voter] = []
    fetches = Fetches(lambda to, message: asked.append(to), lambda peer: 0.0, lambda voter: False)
    ends: list[object] = []
    one, other = Voter("t0", 1), Voter("t1", 1)
    for i in range(FETCHES_MAX + 1):
        fetches.fetch(one, f"{i}", (8,), ends.append, 0.0)
    assert ends == [None] and asked == [one] * FETCHES_MAX
    fetches.fetch(other, "0", (8,), ends.append, 0.0)
    fetches.cancel(one, "0")
    fetches.fetch(one, "again", (8,), ends.append, 0.0)
    assert ends == [None] and asked[-2:] == [other, one]


def test_a_holder_that_stays_silent_is_asked_ever_more_patiently_and_not_for_ever() -> None:
    sent, ends, now = list[object](), list[object](), 0.0
    fetches = Fetches(lambda to, message: sent.append(message), lambda peer: 0.0, lambda voter: False)
    fetches.fetch(Voter("h0", 1), "key", [4, 4], ends.append, now)
    for _ in range(2 * servershelf.SILENCES_MAX):
        now = (fetches.next_deadline() or now) + 1e-3
        fetches.tick(now)
    assert ends == [None] and fetches.resting and fetches.next_deadline() is None
    assert sent == [sm.PartReq("key", (0, 1))] * (1 + servershelf.SILENCES_MAX)
    assert servershelf.SILENCE_S * (2 ** (1 + servershelf.SILENCES_MAX) - 1) == pytest.approx(now, abs=0.1)


def test_what_waits_for_one_link_has_an_end_and_is_forgotten_with_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servershelf, "WINDOW_PARTS_MAX", 4)
    monkeypatch.setattr(servershelf, "QUEUED_MAX", 5)
    shelf, asker = servershelf.Shelf(), Voter("t0", 1)

    def waiting(*parts: int) -> list[int]:
        shelf.receive_request(asker, sm.PartReq("key", parts))
        return [part.part for part in iter(lambda: shelf.next_bulk("t0"), None)]

    shelf.hold_parts("key", [bytes(1)] * 9)
    assert waiting(-1, 7, 9, 8, 0) == [7, 8], "of a request's first four"
    for first in (0, 4):
        shelf.receive_request(asker, sm.PartReq("key", tuple(range(first, first + 4))))
    assert shelf.pending() == ["t0"] and waiting(0) == [0, 1, 2, 3, 4]
    shelf.receive_request(asker, sm.PartReq("key", (1,)))
    shelf.forget("t0")
    assert not shelf.pending() and waiting(2) == [2]
    shelf.receive_request(asker, sm.PartReq("key", (1,)))
    shelf.drop("key")
    assert shelf.next_bulk("t0") is None and shelf.receive_request(asker, sm.PartReq("key", (1,))) == sm.NoPart("key")


def test_nothing_is_held_any_more_once_all_have_what_they_asked_for_or_are_gone() -> None:
    net = swarm(2, 2)
    owner, seat = net.owner(0), net.owner(0).service.seats[0]
    net.lost = lambda source, to, message: isinstance(message, sm.UpdateTaken) and to == owner.name
    for trainer in net.trainers():
        trainer.begin(ones())
    net.until(lambda: seat.owner.followers.log, 20.0, "an update that its standby is to take")
    net.freeze(owner, 20.0)
    net.until(lambda: all(len(trainer.exchanges) == 2 for trainer in net.trainers()), 100.0, "a takeover")
    net.until(net.at_rest, 100.0, "the one that slept serves again")
    net.lost = lambda source, to, message: isinstance(message, sm.PartReq) and message.key.startswith("image/")
    late = net.start("h5")
    net.until(lambda: any(held_of(helper, "image/") for helper in net.helpers()), 60.0, "an image for it")
    net.kill(late)
    net.lost = lambda source, to, message: False
    net.until(net.at_rest, 100.0, "as before")
    net.exchange({"t0": ones(), "t1": ones()})
    net.run(spanowner.SNAPSHOT_KEEP_S + 5.0)
    assert not [held_of(process, "") for process in net.processes.values() if process.running and held_of(process, "")]
    trainer = net.trainers()[0]
    trainer.begin(ones())
    assert len(held_of(trainer, "push/")) == SPANS.n
    trainer.service.cancel()
    assert not held_of(trainer, "push/"), "the vector is the caller's again"


def held_of(process: Process, prefix: str) -> list[str]:
    return [key for key in process.service.shelf._held if key.startswith(prefix)]


def test_a_helper_makes_a_few_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It made those of all its spans, for the first that came to be its standby, and answered nobody meanwhile."""
    monkeypatch.setattr(followers, "IMAGES_BYTES", 1)
    net = swarm(1, 1)
    made: dict[str, float] = {}

    def offered(source: Process, target: str, message: object) -> None:
        if isinstance(message, sm.ImageOffer):
            made.setdefault(message.key, net.now)

    net.hook = offered
    net.start("h1")
    net.until(net.at_rest, 60.0, "standbys")
    at_once = Counter(made.values())
    assert len(made) >= SPANS.n and max(at_once.values()) == 1


@pytest.mark.parametrize("n_bytes", [-1, 0, 1 << 62])
def test_an_image_that_no_span_has_is_refused_before_it_is_cut(n_bytes: int) -> None:
    net = swarm(2, 1)
    owner = net.owner(0)
    view = owner.service.witness.established[0]
    standby = next(p for p in net.processes.values() if p.voter == view.standby)
    offer = sm.ImageOffer(view, 99, 1, bytes(32), "image", n_bytes)
    with pytest.raises(ProtocolError, match=f"an image of {n_bytes} bytes"):
        standby.node.receive(owner.voter, offer, net.now)
    net.exchange({"t0": ones()})
    net.check_replicas()


def test_a_part_of_another_length_is_refused_and_the_right_one_still_counts() -> None:
    net = swarm(2, 1)
    owner, trainer = net.owner(0), net.processes["t0"]
    refused: list[str] = []

    def strike(source: Process, target: str, message: object) -> None:
        if isinstance(message, sm.Part) and source is trainer and target == owner.name and not refused:
            with pytest.raises(ProtocolError, match="bytes, not") as error:
                owner.node.receive(trainer.voter, dataclasses.replace(message, payload=message.payload[1:]), net.now)
            refused.append(str(error.value))

    net.hook = strike
    net.exchange({"t0": ones()})
    assert refused and str(trainer.voter) in refused[0]
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_a_push_with_nan_is_refused_and_told() -> None:
    net = swarm(2, 1)
    bad = ones()
    bad[0] = math.nan
    net.exchange({"t0": bad})
    outcomes = net.processes["t0"].outcomes()
    assert outcomes[0].outcome == sm.NOT_FINITE and {o.outcome for o in outcomes[1:]} == {sm.COUNTED}
    a, b = SPANS.elements(0)
    assert torch.equal(net.theta()[a:b], torch.zeros(b - a))


@pytest.mark.parametrize("times", [1, 3, 4])
def test_parameters_that_come_as_nan_are_not_taken_and_asked_for_again_a_few_times(times: int) -> None:
    """They were taken, and the model with them was lost; a helper took them from there when it began a span anew."""
    net = swarm(2, 2)
    trainer, spoilt = net.processes["t0"], [0]
    carry = net._carry

    def spoil(process: Process, to: str, message: Any, bulk: bool) -> None:
        first = isinstance(message, sm.Part) and message.part == 0 and message.key.startswith("theta/0/")
        if first and to == "t0" and spoilt[0] < times:
            spoilt[0] += 1
            message = dataclasses.replace(message, payload=b"\xff" * len(message.payload))
        carry(process, to, message, bulk)

    net._carry = spoil  # type: ignore[method-assign]
    owner = net.owner(0)
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
    net.until(lambda: trainer.service.exchange.over, 60.0, "it ends")
    assert trainer.service.theta.isfinite().all() and net.theta().isfinite().all()
    told = [news.text for news in trainer.news if "not finite" in getattr(news, "text", "")]
    failed = [news for news in trainer.news if isinstance(news, ExchangeFailed)]
    assert told == [f"span 0: what {owner.voter} serves is not finite, and not taken: it is asked for again"] * min(
        times, 3
    )
    assert [str(owner.voter) in news.why for news in failed] == ([True] if times > 3 else [])
    assert bool(failed) or torch.equal(trainer.service.theta, torch.ones(NUMEL))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_update_that_comes_to_the_standby_as_nan_is_not_applied_there(asynchronous: bool) -> None:
    """Its replica was NaN from then on, and so was what it served once the owner was gone."""
    net = swarm(2, 1, asynchronous=asynchronous)
    net.may_refuse, owner, spoilt = True, net.owner(0), list[str]()
    carry = net._carry

    def spoil(process: Process, to: str, message: Any, bulk: bool) -> None:
        if process is owner and isinstance(message, sm.Part) and message.key.startswith("update/0/") and not spoilt:
            spoilt.append(message.key)
            message = dataclasses.replace(message, payload=b"\xff" * len(message.payload))
        carry(process, to, message, bulk)

    net._carry = spoil  # type: ignore[method-assign]
    net.exchange({"t0": ones()})
    net.kill(owner)
    net.until(lambda: net.served(standbys=False), 60.0, "the standby has taken over")
    assert spoilt and torch.equal(net.theta(), torch.ones(NUMEL))


def test_a_trainer_whose_push_is_not_finite_is_not_waited_for_and_named_with_the_reason() -> None:
    """The others were told that it is late, once they had waited for it."""
    net = swarm(2, 2, patience_s=20.0)
    for _ in range(2):
        began = net.now
        net.exchange({"t0": ones(), "t1": torch.full((NUMEL,), math.nan)})
        assert net.now - began < 5.0
        assert {o.outcome for o in net.processes["t1"].outcomes()} == {sm.NOT_FINITE}
        for outcome in net.processes["t0"].outcomes():
            assert outcome.update is not None
            assert [(e.voter.peer, e.reason) for e in outcome.update.missing] == [("t1", sm.NOT_FINITE)]
    net.exchange({"t0": ones(), "t1": 3 * ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 4.0))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_standby_whose_bulk_never_comes_does_not_stop_the_training(asynchronous: bool) -> None:
    """Control passes between the helpers, bulk does not: it is told that there is no standby, and training goes on."""
    net = Net(asynchronous=asynchronous)
    net.lost = lambda source, target, message: (
        isinstance(message, sm.Part) and source.role == "helper" and target.startswith("h")
    )
    for name in ("t0", "h0", "h1"):
        net.start(name)
    for _ in range(2 * LOG_MAX + 10):
        net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0 * LOG_MAX + 10))


def test_the_pushes_of_a_second_client_of_one_process_count() -> None:
    """As of a notebook that closes one and makes another: owners know the numbers of the first."""
    net = swarm(2, 1)
    trainer = net.processes["t0"]
    for _ in range(3):
        net.exchange({"t0": ones()})
    first, node = trainer.service, trainer.node
    node.services.remove(first)
    net.run(1.0)
    trainer.service = SpanClient(
        node.members, net.spans, first.theta.clone(), first.pulled[0].origin.theta, False, net.now
    )
    node.services.add(trainer.service)
    net.exchange({"t0": None})
    net.exchange({"t0": ones()})
    assert all(o.outcome == sm.COUNTED and o.update is not None for o in trainer.outcomes())
    assert torch.equal(net.theta(), torch.full((NUMEL,), 4.0))


def test_a_pull_that_takes_longer_than_what_nobody_fetches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spanowner, "SNAPSHOT_KEEP_S", 2.0)
    monkeypatch.setattr(servernet, "UPLINK_Bps", 500.0)
    net = swarm(1, 1, spans=Spans(Grid(800, 8, "fp32"), 1))
    began = net.now
    net.exchange({"t0": torch.full((800,), -1.0)}, limit_s=300.0)
    assert net.now - began > 20.0, "the link is slow enough to show it"
    assert torch.equal(net.processes["t0"].service.theta, torch.ones(800))


def keys_of(net: Net, lost: Callable[[Process, Counter[str]], bool]) -> dict[str, Counter[str]]:
    """By trainer and key of theta: how often parts were asked for. `lost`: whether the request is."""
    asked: dict[str, Counter[str]] = {process.name: Counter() for process in net.trainers()}

    def loses(source: Process, to: str, message: object) -> bool:
        if not isinstance(message, sm.PartReq) or not message.key.startswith("theta/"):
            return False
        asked[source.name][message.key] += 1
        return lost(source, asked[source.name])

    net.lost = loses
    return asked


def test_a_slow_pull_is_not_begun_again_and_again_while_others_pull_newer_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was fetching gave way to what the others had fetched long since, and it waited for ever."""
    monkeypatch.setattr(spanowner, "SNAPSHOTS_MAX", 2)
    net = swarm(1, 3, asynchronous=True, spans=Spans(SPANS.grid, 1))
    slow = net.processes["t0"]
    asked = keys_of(net, lambda source, keys: source is slow and max(keys.values()) == 1)
    slow.begin(ones())
    net.until(lambda: asked["t0"], 20.0, "it begins to pull")
    while len(slow.exchanges) < 2:
        net.exchange({"t1": ones(), "t2": ones()})
    assert len(asked["t0"]) == 1, "of the version that it was offered first"


def test_who_pulls_waits_until_another_has_its_parameters_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spanowner, "SNAPSHOTS_MAX", 1)
    net = swarm(1, 3, asynchronous=True, spans=Spans(SPANS.grid, 1))
    silent = ["t0"]
    asked = keys_of(net, lambda source, keys: source.name in silent)
    net.processes["t0"].begin(ones())
    net.until(lambda: asked["t0"], 20.0, "it begins to pull")
    began = net.now
    net.exchange({"t1": ones()})
    waited_s = net.now - began
    assert spanowner.SNAPSHOT_WAIT_S < waited_s < spanowner.SNAPSHOT_WAIT_S + 2.0
    began = net.now
    net.exchange({"t2": ones()})
    assert net.now - began < 2.0, "the one before has all of it"
    silent.clear()
    net.until(lambda: len(net.processes["t0"].exchanges) == 2, 20.0, "it begins again")


def test_of_those_that_are_fetched_the_one_of_which_most_is_left_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spanowner, "SNAPSHOTS_MAX", 2)
    net = swarm(1, 3, asynchronous=True, spans=Spans(SPANS.grid, 1))
    net.lost = lambda source, to, message: isinstance(message, sm.PartReq) and message.key.startswith("theta/")
    owner = net.owner().service.seats[0].owner
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
        net.until(lambda name=name: net.processes[name].service.pulled[0].fetching, 20.0)  # type: ignore[misc]
    (first, second), fetched = owner._snapshots.values(), [p.service.pulled[0].fetching for p in net.trainers()[:2]]
    assert [fetching[1] for fetching in fetched] == [first.key, second.key]
    request = sm.PartReq(first.key, (0,))
    net.network.carry("t0", "h0", net._deliver, "h0", net.processes["t0"].voter, "t0", request)
    net.until(lambda: first.left < second.left == 1.0, 5.0, "a part of the first")
    net.processes["t2"].begin(ones())
    net.until(lambda: second not in owner._snapshots.values(), 20.0)
    assert first in owner._snapshots.values()


def test_a_version_whose_pull_was_given_up_keeps_nobody_waiting_once_that_one_pulls_again() -> None:
    net = swarm(1, 2, asynchronous=True, spans=Spans(SPANS.grid, 1))
    trainer, owner = net.processes["t0"], net.owner().service.seats[0].owner
    net.lost = lambda source, to, message: isinstance(message, sm.PartReq) and message.key.startswith("theta/")
    trainer.begin(ones())
    net.until(lambda: trainer.service.pulled[0].fetching, 20.0, "it begins to pull")
    trainer.service.cancel()
    net.lost = lambda source, to, message: False
    net.exchange({"t1": ones()})
    assert {snapshot.left for snapshot in owner._snapshots.values()} == {0.0, 1.0}
    net.exchange({"t0": None})
    assert {snapshot.left for snapshot in owner._snapshots.values()} == {0.0}


def test_what_is_left_of_a_version_is_what_those_lack_who_fetch_it_still() -> None:
    one, other = Voter("t0", 1), Voter("t1", 1)
    snapshot = spanowner._Snapshot("key", 0.0, [bytes(1)] * 4)
    assert snapshot.left == 0
    snapshot.offered |= {one, other}
    snapshot.given = 5
    assert snapshot.left == 3 / 8
    for _ in range(2):
        snapshot.through(one)
        assert snapshot.left == 3 / 4, "that one has it"
    snapshot.through(other)
    assert snapshot.left == 0


def test_a_stake_that_comes_when_another_is_waited_for_is_not_taken() -> None:
    """The helper had given up that beginning; meanwhile others trained on, and what they pulled was to be the next."""
    net = swarm(1, 2)
    helper = net.processes["h0"].service
    seat, (older, newer) = helper.seats[0], [t.voter for t in net.trainers()]
    told = sm.Stake(0, NOWHERE, 5, 5, "stake/older", (), SPANS.digest)
    seat.seeding = Seeding(net.now, fetching=(newer, "stake/newer"))
    parts = [bytes(4 * SPANS.grid.elems(chunk)) for chunk in SPANS.chunks(0)]
    helper._seeder._stake_fetched(0, older, told, parts)
    assert seat.seeding.state is None and seat.seeding.fetching == (newer, "stake/newer")
    helper._seeder._stake_fetched(0, newer, dataclasses.replace(told, key="stake/newer"), parts)
    assert seat.seeding.state is not None and seat.seeding.fetching is None


def test_a_view_of_a_helper_that_was_started_again_as_a_trainer_is_known_to_who_comes_then() -> None:
    """It was taken for nonsense, and the views that were told with it were not heard."""
    net = swarm(1, 1)
    trainer = net.processes["t0"]
    views = dict(trainer.service.witness.established)
    assert len(views) == SPANS.n
    before = trainer.voter._replace(inc=trainer.voter.inc - 1)
    view = dataclasses.replace(views[0], owner=before)
    late = net.start("h5").service
    told = sm.TellViews(sm.Layout(NUMEL, 8, "fp32", SPANS.n), "", (view, *list(views.values())[1:]), ())
    net.until(lambda: late.members.record("t0") is not None, 10.0)
    late.witness.established.clear()
    late.receive(trainer.voter, told, net.now)
    assert late.witness.established == {**views, 0: view}


def cut(net: Net, left: set[str], mend: bool = False) -> None:
    """No message between these and all others, either way."""
    act = net.network.mend if mend else net.network.cut
    for a in left:
        for b in net.processes.keys() - left:
            act(a, b)
            act(b, a)


def test_an_owner_that_is_cut_off_serves_nothing_and_the_others_go_on_without_it() -> None:
    net = swarm(3, 2)
    net.exchange({"t0": ones(), "t1": ones()})
    owner = net.owner(0)
    version = owner.service.seats[0].owner.state.version
    cut(net, {owner.name})
    net.exchange({"t0": ones(), "t1": ones()})
    net.until(owner.service.cut_off, 60.0, "it knows")
    assert owner.service.seats[0].owner.state.version == version
    cut(net, {owner.name}, mend=True)
    net.until(net.at_rest, 120.0, "the one that was cut off takes part again")
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 3.0))
    net.check_replicas()


def test_a_span_that_is_taken_from_a_trainer_goes_on_in_the_round_that_it_was_in() -> None:
    """Of asynchronous updates too, whose rate follows how many there were."""
    by_round = Optimizer("sgd", Sgd(), float, asynchronous=True, momentum=0.0)
    net = swarm(1, 1, asynchronous=True, optimizer=by_round)
    for _ in range(3):
        net.exchange({"t0": ones()})
    replace_helper(net, "h7")
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 1.0 + 2.0 + 3.0 + 4.0))
    assert net.processes["t0"].service.step == 4


def test_a_trainer_that_has_the_newest_parameters_is_waited_for_a_while() -> None:
    net = swarm(1, 2, asynchronous=True)
    a, b = net.trainers()
    for trainer in (b, a):
        net.exchange({trainer.name: ones()})
    told: Counter[int] = Counter()

    def lost(source: Process, to: str, message: object) -> bool:
        if source is not a or not isinstance(message, sm.Stake):
            return False
        told[message.span] += 1
        return told[message.span] < 3

    net.lost = lost
    replace_helper(net, "h7")
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))


def test_who_was_late_pulls_the_round_that_went_on_without_it_once_its_standby_holds_that() -> None:
    net = swarm(2, 3, patience_s=1.0)
    late = net.processes["t2"]
    owners = [net.owner(span).service.seats[span].owner for span in range(SPANS.n)]
    net.lost = lambda source, to, message: isinstance(message, sm.UpdateTaken)
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
    net.until(lambda: all(owner.issued == 1 for owner in owners), 20.0, "the round is closed")
    late.begin(ones())
    net.run(3.0)
    assert len(late.exchanges) == 1 and {leg.phase for leg in late.service.exchange.legs} == {PULL}
    net.lost = lambda source, to, message: False
    net.until(lambda: len(late.exchanges) == 2, 20.0)
    assert {o.outcome for o in late.outcomes()} == {sm.LATE} and torch.equal(late.service.theta, torch.ones(NUMEL))


def test_a_helper_that_reaches_half_of_those_known_serves_nobody_before_the_others_are_given_up() -> None:
    net = swarm(1, 3)
    helper, trainer = net.processes["h0"], net.processes["t0"]
    cut(net, {"h0", "t0"})
    net.until(helper.service.cut_off, 30.0, "it knows")
    trainer.begin(ones())
    net.run(20.0)
    assert len(trainer.exchanges) == 1 and torch.equal(net.theta(), torch.zeros(NUMEL))
    net.until(lambda: len(trainer.exchanges) == 2, 300.0, "it goes on")


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_halves_that_were_apart_for_long_become_one_again(more: int, asynchronous: bool, pushes: bool) -> None:
    """Of each span one side's updates hold; the trainer of the other side is told how many of its own are set aside,
    also by an exchange that pushes first."""
    net = swarm(2, 2, asynchronous=asynchronous)
    net.exchange({"t0": ones(), "t1": ones()})
    common = net.theta()
    apart, by = {"t0": 2, "t1": 2 + more}, {"t0": 1.0, "t1": 3.0}
    cut(net, {"h0", "t0"})
    for _ in range(2):  # both go on, once the others are no longer waited for
        net.exchange({"t0": ones(), "t1": 3 * ones()}, 300.0)
    for _ in range(more):
        net.exchange({"t1": 3 * ones()}, 300.0)
    assert all(len(net.processes[h].service.owned) == SPANS.n for h in ("h0", "h1"))
    assert not any(o.set_aside for t in net.trainers() for o in t.outcomes()), "nobody knows yet"
    cut(net, {"h0", "t0"}, mend=True)
    net.until(net.at_rest, 200.0, "one owner per span")
    held = net.theta()
    net.exchange({name: ones() if pushes else None for name in ("t0", "t1")})
    if not pushes:
        thetas = [net.processes[name].service.theta for name in ("t0", "t1")]
        assert torch.equal(*thetas) and torch.equal(thetas[0], held), "what is held by now, not what was pulled before"
    told = {name: [o.set_aside for o in net.processes[name].outcomes()] for name in ("t0", "t1")}
    for span in range(SPANS.n):
        a, b = SPANS.elements(span)
        loser, winner = ("t0", "t1") if told["t0"][span] else ("t1", "t0")
        assert (told[loser][span], told[winner][span]) == (apart[loser], 0)
        assert torch.equal(held[a:b], common[a:b] + apart[winner] * by[winner]), "the other's updates alone"
        assert net.processes[loser].outcomes()[span].set_aside_weight == apart[loser]
    net.exchange({"t0": ones(), "t1": ones()})
    assert not any(o.set_aside for t in net.trainers() for o in t.outcomes()), "it is told once"
    net.exchange({"t0": None, "t1": None})
    thetas = [net.processes[name].service.theta for name in ("t0", "t1")]
    assert torch.equal(*thetas) and torch.equal(thetas[0], net.theta())
    net.check_replicas()


def test_pushes_that_are_set_aside_are_told_once_though_the_exchange_that_heard_of_them_is_given_up() -> None:
    net, a, _ = seeded_without_the_newest()
    net.lost = lambda source, target, message: isinstance(message, sm.PushDone)
    a.begin(ones())
    net.run(5.0)
    a.service.cancel()
    net.lost = lambda source, target, message: False
    for told in (1, 0):
        net.exchange({a.name: ones()})
        assert [o.set_aside for o in a.outcomes()] == [told] * SPANS.n


@pytest.mark.parametrize("given_up", [False, True])
def test_theta_of_the_exchange_before_is_not_taken_for_that_of_this_one(given_up: bool) -> None:
    """It does not hold this one's push. It is still on its way when an exchange is given up; or was offered twice."""
    net = swarm(1, 1, asynchronous=True)
    trainer, client, owner = net.processes["t0"], net.processes["t0"].service, net.owner(0)
    net.lost = lambda source, target, message: isinstance(message, sm.Part) and target == trainer.name and held_back
    held_back = True
    trainer.begin(ones())
    net.until(lambda: client.pulled[0].fetching is not None)
    first = client.pulled[0].fetching
    if given_up:
        client.cancel()
    else:
        view, pulled = client.witness.established[0], client.pulled[0]
        offer = sm.PullOffer(0, view.term, client.number, 0, 0, "theta/its", 1, ())
        net.act(trainer, lambda now: client.receive(owner.voter, offer, now))
        assert pulled.fetching == first, "one at a time"
    held_back = False
    if not given_up:
        net.until(lambda: len(trainer.exchanges) == 2)
    net.exchange({trainer.name: ones()})
    assert (counted(trainer) == 1).all() and torch.equal(client.theta, torch.full((NUMEL,), 2.0))


def test_the_same_term_and_version_of_another_owner_is_another_theta() -> None:
    """Two sides of a partition may have counted alike: the one whose owner holds no more is not kept unseen."""
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    client, span = net.processes["t0"].service, next(s for s in range(SPANS.n) if net.owner(s).name == "h0")
    here, pulled, other = client.witness.established[span], client.pulled[span], net.processes["h1"].voter
    client.begin(None, 1.0, net.now)
    client.receive(other, sm.Established(dataclasses.replace(here, owner=other, standby=None)), net.now)
    offer = sm.PullOffer(span, here.term, client.number, pulled.version, pulled.step, "theta/its", 1, ())
    effects = client.receive(other, offer, net.now)
    asked = [e.message for e in effects if isinstance(e, Send) and e.to == other.peer]
    assert any(isinstance(message, sm.PartReq) and message.key == "theta/its" for message in asked)


def test_a_stake_that_is_half_fetched_when_another_owner_theta_comes_is_not_mixed() -> None:
    """The other's is of the same term and version."""
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    client, span = net.processes["t0"].service, next(s for s in range(SPANS.n) if net.owner(s).name == "h0")
    here, pulled, other = client.witness.established[span], client.pulled[span], net.processes["h1"].voter
    term_version = pulled.term, pulled.version

    def stake() -> sm.Stake:
        effects = client.receive(here.owner, sm.AskStake(span), net.now)
        (told,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, sm.Stake)]
        return told

    def part(key: str, number: int) -> sm.Part | None:
        client.receive(here.owner, sm.PartReq(key, (number,)), net.now)
        return client.next_bulk(here.owner.peer)

    before, n_parts = stake(), len(SPANS.chunks(span))
    first = part(before.key, 0)
    assert n_parts > 1 and first is not None and set(bytes(first.payload)) != {0}
    client.begin(None, 1.0, net.now)
    client.receive(other, sm.Established(dataclasses.replace(here, owner=other, standby=None)), net.now)
    offer = sm.PullOffer(span, here.term, client.number, pulled.version, pulled.step, "theta/its", 0, ())
    client.receive(other, offer, net.now)
    for i, chunk in enumerate(SPANS.chunks(span)):
        client.receive(other, sm.Part("theta/its", i, bytes(4 * SPANS.grid.elems(chunk))), net.now)
    assert (pulled.owner, pulled.term, pulled.version) == (other, *term_version)
    assert part(before.key, 1) is None, "it is no longer held"
    whole = [part(stake().key, i) for i in range(n_parts)]
    assert all(got is not None and not any(bytes(got.payload)) for got in whole)


def test_a_helper_half_way_through_an_outdated_stake_goes_on_with_the_new_one() -> None:
    net = swarm(2, 1, asynchronous=True)
    trainer, asker = net.processes["t0"], net.processes["h1"]
    client, span = trainer.service, 0

    def asked() -> sm.Stake:
        effects = client.receive(asker.voter, sm.AskStake(span), net.now)
        (stake,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, sm.Stake)]
        return stake

    ends: list[object] = []
    stake = asked()
    sizes = [4 * SPANS.grid.elems(chunk) for chunk in SPANS.chunks(span)]
    net.lost = lambda source, target, message: isinstance(message, sm.Part) and message.key == stake.key

    def fetch(now: float) -> list[Effect]:
        asker.service.fetches.fetch(trainer.voter, stake.key, sizes, ends.append, now)
        return asker.service.tick(now)

    net.act(asker, lambda now: asker.node.serve(lambda: fetch(now), now))
    net.run(0.5)
    net.exchange({"t0": ones()})
    net.until(lambda: ends, 10.0, "word that it is not to be had")
    assert ends == [None] and stake.key not in client.shelf and asked().key in client.shelf


def test_nobody_believes_in_an_owner_that_is_no_helper_nor_in_a_last_term() -> None:
    """A trainer that heard that it owned a span sent its push to itself, and ended; a span of the last term had no
    other owner any more."""
    net = Net()
    for name in ("h0", "h1", "t0", "t1"):
        net.start(name)
    net.until(net.served)
    view, trainer = net.owner().service.seats[0].owner.view, net.processes["t0"].voter
    for false in (
        dataclasses.replace(view, term=view.term + 1, owner=trainer),
        dataclasses.replace(view, term=view.term + 1 + sm.NUMBERS_AHEAD_MAX),
    ):
        for process in net.processes.values():
            for message in (sm.Established(false), sm.Claim(false), sm.Refused(false, True)):
                with pytest.raises(ProtocolError, match="a view "):
                    process.node.receive(net.processes["t1"].voter._replace(inc=2), message, net.now)
    net.exchange({"t0": torch.ones(net.spans.grid.numel), "t1": torch.ones(net.spans.grid.numel)})


def keep_apart(net: Net, *pairs: tuple[str, str]) -> None:
    """Nothing passes between these two, and those two, directly; others carry their messages, and no bulk."""
    net.lost = lambda source, to, message: (source.name, to) in pairs or (to, source.name) in pairs
    for a, b in (*pairs, *(pair[::-1] for pair in pairs)):
        net.until(lambda a=a, b=b: net.processes[a].node.members.relay_for(b), 60.0, "a way by relay")


def warned(process: Process) -> list[str]:
    return [news.text for news in process.news if isinstance(news, serverpeer.Notice) and news.serious]


def test_a_trainer_that_reaches_no_helper_but_by_relay_says_so_and_goes_on_once_it_reaches_it() -> None:
    net = swarm(1, 2)
    barred, other, owner = net.processes["t0"], net.processes["t1"], net.owner(3)
    keep_apart(net, ("t0", owner.name))
    barred.begin(torch.full((NUMEL,), -1.0))
    other.begin(torch.full((NUMEL,), -3.0))
    net.until(lambda: warned(barred), 30.0, "who can't reach whom")
    (text,) = warned(barred)
    assert re.search(rf"helper {owner.name} .* by way of t1 only, .* firewall", text)
    net.until(lambda: len(other.exchanges) == 2, what="the others go on")
    net.run(110.0)
    assert len(warned(barred)) == 3, "after 30 s, and after as long again"
    assert len(barred.exchanges) == 1 and not warned(other) and owner.service.owned == [0, 1, 2, 3]
    theta = torch.full((NUMEL,), 3.0)
    assert torch.equal(net.theta(), theta), "the mean is of those who are in it"
    net.lost = lambda source, to, message: False
    net.until(lambda: len(barred.exchanges) == 2, 60.0, "it reaches the owner")
    assert [o.outcome for o in barred.outcomes()] == [sm.LATE] * 4
    assert torch.equal(barred.service.theta, theta) and len(warned(barred)) == 3


def test_a_helper_that_a_trainer_does_not_reach_gives_its_spans_to_one_that_reaches_all() -> None:
    """That trainer waited for as long as its host did not reach that helper's."""
    net = swarm(3, 3)
    owner = net.owner(3)
    owned = owner.service.owned
    keep_apart(net, ("t0", owner.name))
    net.exchange({name: ones() for name in ("t0", "t1", "t2")}, 60.0)
    assert owned and owner.service.owned == []
    net.exchange({name: ones() for name in ("t0", "t1", "t2")}, 10.0)
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))
    assert [o.outcome for name in ("t0", "t1", "t2") for o in net.processes[name].outcomes()] == [sm.COUNTED] * 12
    assert [net.standby(span) is not None for span in range(4)] == [True] * 4
    net.lost = lambda source, to, message: False
    net.until(net.at_rest, 60.0, "they are its own again")
    assert owner.service.owned == owned
    net.exchange({name: ones() for name in ("t0", "t1", "t2")}, 10.0)
    assert torch.equal(net.theta(), torch.full((NUMEL,), 3.0))


def test_spans_stay_where_each_helper_is_beyond_the_reach_of_some_trainer() -> None:
    net = swarm(2, 3)
    owned = {helper.name: helper.service.owned for helper in net.helpers()}
    keep_apart(net, ("t0", "h0"), ("t1", "h1"))
    net.run(60.0)
    assert {helper.name: helper.service.owned for helper in net.helpers()} == owned


def test_an_owner_that_reaches_its_standby_by_relay_only_makes_another() -> None:
    """It waited for the standby for 30 s, and had none from then on."""
    net = swarm(3, 2)
    owner, standby = net.owner(3), net.standby(3)
    assert standby is not None
    keep_apart(net, (owner.name, standby.name))
    began = net.now
    net.exchange({"t0": ones(), "t1": ones()})
    assert net.now < began + 10.0
    (third,) = {h.name for h in net.helpers()} - {owner.name, standby.name}
    net.until(lambda: net.standby(3) is net.processes[third], 30.0, "another standby")
    assert net.owner(3) is owner and not [text for text in warned(owner) if "no standby" in text]
    net.exchange({"t0": ones(), "t1": ones()})
    net.kill(owner)
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 3.0))


def test_a_trainer_that_waits_for_an_owner_beyond_reach_goes_on_when_that_helper_is_stopped() -> None:
    net = swarm(2, 3)
    barred, owner = net.processes["t0"], net.owner(3)
    (other,) = {helper.name for helper in net.helpers()} - {owner.name}
    keep_apart(net, ("t0", owner.name), ("t2", other))
    for name in ("t0", "t1"):
        net.processes[name].begin(ones())
    net.until(lambda: warned(barred), 30.0, "who can't reach whom")
    net.kill(owner)
    net.until(lambda: len(barred.exchanges) == 2, 120.0, "its standby takes over")
    assert torch.equal(barred.service.theta, torch.ones(NUMEL))


@pytest.mark.parametrize("helper", ["h0", "h1", "h2"])
def test_the_first_parameters_come_from_a_trainer_whose_vectors_reach_the_helper(helper: str) -> None:
    """The helper of the first span asked the first trainer for ever, and nobody could begin."""
    net = Net(seed=3)
    net.lost = lambda source, to, message: {source.name, to} == {"t0", helper}
    for name in ("t0", "t1", "h0", "h1", "h2"):
        net.start(name)
    for name in ("t0", "t1"):
        net.processes[name].begin(None)
    net.until(lambda: net.processes["t1"].exchanges, 60.0, "the first parameters")
    net.until(lambda: warned(net.processes["t0"]), 60.0, "it is told whom it does not reach")
    net.processes["t1"].begin(ones())
    net.until(lambda: len(net.processes["t1"].exchanges) == 2, 60.0, "a round")
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_a_helper_that_does_not_reach_the_first_choice_either_gives_its_spans_to_it_by_another() -> None:
    """It kept them, and the trainer waited."""
    net = swarm(3, 3)
    owner = net.owner(3)
    first = assign(SPANS.n, ("h0", "h1", "h2"), frozenset({owner.name}))[3][0]
    keep_apart(net, ("t0", owner.name), (owner.name, first))
    net.exchange({name: ones() for name in ("t0", "t1", "t2")}, 120.0)
    net.until(lambda: not owner.service.owned and net.owners(3) == [net.processes[first]], 60.0, "where it belongs")
    net.exchange({name: ones() for name in ("t0", "t1", "t2")}, 10.0)
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))


def test_spans_stay_where_a_trainer_that_their_helper_does_not_reach_is_silent_for_a_moment() -> None:
    """They went back to that helper, and away again once the trainer had been there for a while."""
    net = swarm(3, 3)
    owner, trainer = net.owner(3), net.processes["t0"]
    keep_apart(net, ("t0", owner.name))
    net.until(lambda: not owner.service.owned, 60.0, "it gives its spans away")
    net.freeze(trainer, 1000.0)
    net.until(lambda: not owner.service.lives(trainer.voter), 60.0, "it is silent")
    net.thaw(trainer)
    for _ in range(40):
        net.run(0.5)
        assert owner.service.owned == []


def test_a_helper_that_was_away_is_asked_again_whom_it_does_not_reach() -> None:
    """That was forgotten meanwhile, and spans went back to it until it came to tell it again in turn."""
    net = swarm(3, 12)
    owner = net.owner(3)
    keep_apart(net, ("t0", owner.name))
    net.until(lambda: not owner.service.owned, 60.0, "it gives its spans away")
    others = [helper.service for helper in net.helpers() if helper is not owner]
    net.freeze(owner, 1000.0)
    net.until(lambda: not any(service.lives(owner.voter) for service in others), 60.0, "it is dead")
    net.thaw(owner)
    net.until(lambda: all(service.lives(owner.voter) for service in others), 60.0, "it is back")
    net.until(lambda: all(owner.name in service._shunned for service in others), 2.0, "they know it again")


def tell_all(net: Net, sender: Process, view: sm.SpanView) -> None:
    for process in net.helpers() + net.trainers():
        net._deliver(process.name, sender.voter, sender.name, sm.Established(view))


def test_a_claim_ends_when_another_view_holds_though_it_is_of_a_greater_term() -> None:
    """It was won all the same, by a helper that held nothing by then."""
    net = swarm(3, 2)
    owner, standby, view = net.owner(0), net.standby(0), net.owner(0).service.witness.established[0]
    assert standby is not None
    (third,) = (helper for helper in net.helpers() if helper not in (owner, standby))
    other = dataclasses.replace(view, term=view.term + 1, owner=third.voter, standby=None)
    struck: list[sm.SpanView] = []

    def strike(source: Process, to: str, message: object) -> None:
        if isinstance(message, sm.Claim) and source is standby and message.view.span == 0 and not struck:
            struck.append(message.view)
            standby.node.receive(third.voter, sm.Established(other), net.now)
            assert standby.service.seats[0].claim is None

    for process in net.helpers() + net.trainers():
        process.service.witness.asked(other)
    net.hook = strike
    net.kill(owner)
    net.exchange({"t0": ones(), "t1": ones()}, 60.0)
    assert struck and struck[0].term == other.term + 1
    assert torch.equal(net.theta(), torch.ones(NUMEL))


@pytest.mark.parametrize("to_whom", ["its standby", "nobody"])
def test_a_helper_that_is_given_a_span_and_holds_nothing_of_it_is_no_dead_end(to_whom: str) -> None:
    """Nobody served that span for as long as this helper lived."""
    net = swarm(2, 1)
    net.exchange({"t0": ones()})
    owner, heir, view = net.owner(0), net.standby(0), net.owner(0).service.witness.established[0]
    assert heir is not None
    heir.service.seats[0].replica = None
    standby = owner.voter if to_whom == "its standby" else None
    tell_all(net, owner, dataclasses.replace(view, term=view.term + 1, owner=heir.voter, standby=standby))
    net.exchange({"t0": ones()}, 60.0)
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))
    taken = [text for helper in (owner, heir) for text in warned(helper) if "taken from t0" in text]
    assert bool(taken) == (standby is None), "its standby has the moments, too"


def test_a_standby_that_holds_nothing_takes_a_stake_where_the_others_leave_it_to_it() -> None:
    net = swarm(3, 1)
    net.exchange({"t0": ones()})
    owner, view = net.owner(0), net.owner(0).service.witness.established[0]
    left = [helper for helper in net.helpers() if helper is not owner]
    (first, _) = assign(SPANS.n, tuple(helper.name for helper in left))[0]
    (other,) = (helper for helper in left if helper.name != first)
    net.kill(owner)
    for helper in left:
        helper.service.seats[0].replica = None
    tell_all(net, other, dataclasses.replace(view, term=view.term + 1, standby=other.voter))
    net.exchange({"t0": ones()}, 120.0)
    net.until(net.at_rest, 60.0, "all are served")
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))


def test_a_view_of_a_span_that_there_is_not_is_forgotten_once_the_layout_is_known() -> None:
    """The first helper to look for a span's origin ended of it."""
    net = Net()
    helper = net.start("h0")
    view = sm.SpanView(SPANS.n, 1, Voter("h9", 1), None, NOWHERE, 0, 0)
    helper.node.receive(Voter("h9", 1), sm.Established(view), net.now)
    net.start("t0")
    net.until(lambda: net.served(standbys=False), 60.0, "a beginning")
    assert SPANS.n not in helper.service.witness.established


def test_an_image_that_comes_after_the_updates_that_follow_it_takes_nothing_back() -> None:
    """The owner had been told that they are held there."""
    net = swarm(2, 1)
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    state, seat = owner.service.seats[0].owner.state, standby.service.seats[0]
    view, era, image = owner.service.witness.established[0], seat.replica.era, state.image()
    offer = sm.ImageOffer(view, era, state.version, state.digest(), "image", len(image))
    net.exchange({"t0": ones()})
    assert seat.replica.state.version == offer.version + 1
    standby.service._replicas._image_fetched(owner.voter, offer, [image])
    net.kill(owner)
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.full((NUMEL,), 2.0))


def test_an_update_that_comes_after_an_image_that_holds_it_is_not_kept() -> None:
    net = swarm(2, 1)
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    net.exchange({"t0": ones()})
    net.exchange({"t0": ones()})
    replica, sizes = standby.service.seats[0].replica, SPANS.wire_sizes(0)
    offer = sm.UpdateOffer(owner.service.witness.established[0], replica.era, sm.Update(1, 1, 1, (), ()), "u", sizes)
    standby.service._replicas._update_fetched(owner.voter, offer, [bytes(size) for size in sizes])
    assert not replica.ahead and replica.state.version == 2


def test_a_push_of_the_last_round_that_there_can_be_is_refused() -> None:
    """The others pulled it, and no push of theirs had a number any more."""
    net = swarm(2, 2)
    net.may_refuse = True
    for pulled in net.processes["t1"].service.pulled:
        pulled.step = sm.NUMBER_MAX - 1
    net.processes["t1"].begin(ones())
    net.exchange({"t0": ones()})
    net.exchange({"t0": ones()})
    assert net.processes["t0"].service.step == 2


def test_a_stake_that_leaves_no_number_after_it_is_no_beginning() -> None:
    net = Net()
    net.may_refuse = True
    net.start("t0")
    net.start("t1", step=sm.NUMBER_MAX)
    net.start("h0")
    net.exchange({"t0": None})
    net.exchange({"t0": ones()})
    assert net.processes["t0"].service.step == 1


def test_a_helper_without_a_replica_holds_no_other_bits() -> None:
    """All standbys of the span were sent all of it again."""
    net = swarm(2, 1)
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    follower = owner.service.seats[0].owner.followers.all[standby.voter]
    era = follower.era
    owner.node.receive(standby.voter, sm.UpdateTaken(0, owner.service.seats[0].owner.view.term, -1, b"?"), net.now)
    assert follower.era == era and not [text for text in warned(owner) if "other bits" in text]


def test_a_standby_of_other_bits_has_no_other_sent_all_again_and_is_heard_once_it_could_have_them() -> None:
    """One that went on saying so had images made of the span for all of its replicas, as often as it spoke; and what
    it had taken before was believed to be held, with those other bits."""
    net = swarm(2, 1)
    for _ in range(DIGEST_EVERY):
        net.exchange({"t0": ones()})
    seat, standby = net.owner(0).service.seats[0], net.standby(0)
    owner, host = seat.owner, net.owner(0)
    assert standby is not None and owner.state.version == DIGEST_EVERY
    other = owner.followers.add(Voter("h7", 1))
    other.taken, era = DIGEST_EVERY, other.era
    net.lost = lambda source, to, message: isinstance(message, sm.ImageOffer)
    for version, digest in ((DIGEST_EVERY, b"?"), (DIGEST_EVERY, b"?"), (DIGEST_EVERY, b"")):
        net._deliver(host.name, standby.voter, standby.name, sm.UpdateTaken(0, owner.view.term, version, digest))
        assert owner.followers.taken(standby.voter) < 0
    assert len([text for text in warned(host) if "other bits" in text]) == 1
    assert (other.era, other.taken) == (era, DIGEST_EVERY)
    net.run(3.0)
    net._deliver(host.name, standby.voter, standby.name, sm.UpdateTaken(0, owner.view.term, DIGEST_EVERY - 1, b""))
    assert owner.followers.taken(standby.voter) < 0 and owner.followers.all[standby.voter].image is not None
    net.lost = lambda source, to, message: False
    net.until(lambda: owner.holds_all(standby.voter), 20.0, "it has them")
    net.check_replicas()


def test_an_update_that_comes_after_another_layout_is_passed_over() -> None:
    """The helper ended of it: there was no such span any more."""
    net = swarm(2, 1)
    owner, standby = net.owner(3), net.standby(3)
    assert standby is not None
    helper, view, sizes = standby.service, owner.service.witness.established[3], SPANS.wire_sizes(3)
    offer = sm.UpdateOffer(view, helper.seats[3].replica.era, sm.Update(1, 1, 1, (), ()), "update", sizes)
    for seat in helper.seats.values():
        seat.owner = seat.replica = None
    helper._adopt_layout(owner.voter, sm.Layout(NUMEL, 8, "fp32", 2), True)
    helper._replicas._update_fetched(owner.voter, offer, [bytes(size) for size in sizes])
    assert list(helper.seats) == [0, 1] and not any(seat.replica for seat in helper.seats.values())


def test_an_update_that_came_ahead_is_not_applied_in_another_era_of_the_same_owner() -> None:
    """It owned the span again meanwhile, and made other updates of the same numbers: these were passed over."""
    net = swarm(2, 1)
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    seat, replicas = standby.service.seats[0], standby.service._replicas
    view, era, state = owner.service.witness.established[0], seat.replica.era, owner.service.seats[0].owner.state

    def comes(version: int, era: int, g: float) -> None:
        offer = sm.UpdateOffer(view, era, sm.Update(version, version, 1, (), ()), f"{era} {version}", ())
        parts = [SPANS.grid.coder.encode(torch.full((SPANS.grid.elems(c),), g)) for c in SPANS.chunks(0)]
        replicas._update_fetched(owner.voter, offer, parts)

    comes(2, era, -100.0)
    assert list(seat.replica.ahead) == [2]
    image = sm.ImageOffer(view, era + 1, 0, state.digest(), "image", state.image_bytes())
    standby.service.receive(owner.voter, image, net.now)
    for version in (1, 2):
        comes(version, era + 1, -1.0)
    assert seat.replica.state.version == 2 and torch.equal(seat.replica.state.theta, torch.full((16,), 2.0))


def test_updates_before_the_base_of_a_push_are_none_that_came_since() -> None:
    """What it is based on was lost with its owner and the standby: the report told of fewer updates than none."""
    net = swarm(2, 1, asynchronous=True)
    trainer = net.processes["t0"]
    for pulled in trainer.service.pulled:
        pulled.version = 7
    net.exchange({"t0": ones()})
    assert [(o.outcome, o.staleness) for o in trainer.outcomes()] == [(sm.COUNTED, 0)] * SPANS.n


@pytest.mark.parametrize("step", [sm.NUMBER_MAX, sm.NUMBER_MAX - sm.NUMBERS_AHEAD_MAX])
def test_a_trainer_that_is_told_of_a_round_that_nobody_came_to_goes_on_with_the_others(step: int) -> None:
    """Its pushes were refused without a word from then on, and it waited for ever."""
    net = swarm(2, 1)
    net.may_refuse, told = True, list[int]()
    carry = net._carry

    def lie(process: Process, to: str, message: Any, bulk: bool) -> None:
        if isinstance(message, sm.PullOffer) and not told:
            told.append(message.step)
            message = dataclasses.replace(message, step=step)
        carry(process, to, message, bulk)

    net._carry = lie  # type: ignore[method-assign]
    for _ in range(3):
        net.exchange({"t0": ones()})
    assert told and {o.outcome for o in net.processes["t0"].outcomes()} == {sm.COUNTED}
    assert net.processes["t0"].service.step <= 3 and torch.equal(net.processes["t0"].service.theta, net.theta())


def test_a_span_that_is_not_to_be_handed_over_after_all_takes_pushes_while_another_standby_is_made() -> None:
    """It took none until that one held all of it."""
    net = swarm(2, 1)
    net.lost = lambda source, to, message: to == "h2" and isinstance(message, sm.Part)
    net.start("h2")
    found = list[Any]()

    def to_be_standby() -> bool:
        seats = [seat.owner for h in net.helpers() for seat in h.service.seats.values() if seat.owner is not None]
        found[:] = [owner for owner in seats if any(voter.peer == "h2" for voter in owner.followers.all)]
        return bool(found)

    net.until(to_be_standby, 60.0, "another standby")
    found[0].closing = True
    net.until(lambda: not found[0].closing, 5.0, "it takes pushes again")
    assert any(voter.peer == "h2" for voter in found[0].followers.all)


def test_the_pushes_of_two_processes_of_one_peer_in_a_round_are_told_as_two() -> None:
    """They were told as one, and the round's weight as so much less."""
    net = swarm(2, 2, patience_s=20.0)
    first, other = net.processes["t0"], net.processes["t1"]

    def here(process: Process) -> bool:
        return all(process.voter in net.owner(span).service.seats[span].owner._waiting for span in range(SPANS.n))

    first.begin(ones(), weight=3.0)
    net.until(lambda: here(first), 10.0, "its pushes are there")
    net.kill(first)
    again = net.start("t0")
    again.begin(ones(), weight=3.0)
    net.until(lambda: here(again), 10.0, "those of its next process, too")
    other.begin(ones())
    net.until(lambda: len(other.exchanges) == 2, 60.0, "a round")
    report = report_of(other.exchanges[-1])
    assert [(s.peer, s.weight, s.fraction) for s in report.contributors] == [
        ("t0", 3.0, 1.0), ("t0", 3.0, 1.0), ("t1", 1.0, 1.0)
    ]  # fmt: skip
    assert report.to_round("train", "").weight == 7.0


def test_a_standby_in_the_making_is_waited_for_though_it_was_to_be_one_before() -> None:
    """The time since then counted, too: the owner went on without a standby at once."""
    net = swarm(3, 1)
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    (third,) = (helper for helper in net.helpers() if helper not in (owner, standby))
    seat = owner.service.seats[0]
    net.lost = lambda source, to, message: to == third.name and isinstance(message, sm.Part)
    net.freeze(standby, 1000.0)
    net.until(lambda: seat.candidate == third.voter, 60.0, "another one is to be the standby")
    net.thaw(standby)
    net.run(SOLO_AFTER_S + 10.0)
    assert net.standby(0) is standby
    net.lost = lambda source, to, message: False
    told = len(warned(owner))
    net.kill(standby)
    net.until(lambda: net.standby(0) is third, 60.0, "the other one is it")
    assert warned(owner)[told:] == []


def test_two_views_of_one_term_and_owner_are_not_told_back_and_forth() -> None:
    """Both may be established on two sides of a partition: each said its own in answer to the other's, for ever."""
    net = swarm(2, 2)
    owner, other = net.owner(0), net.processes["t1"]
    other.service.witness.established[0] = dataclasses.replace(owner.service.seats[0].owner.view, standby=None)
    told = list[str]()

    def count(source: Process, to: str, message: object) -> None:
        if isinstance(message, sm.Established):
            told.append(source.name)

    net.hook = count
    mine = sm.Established(other.service.witness.established[0])
    net._deliver(owner.name, other.voter, other.name, mine)
    net.run(5.0)
    assert told == []
    net.exchange({"t0": ones(), "t1": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_what_came_unasked_for_is_counted_for_as_long_as_its_sender_is_there() -> None:
    """Of each process that ever was there was an entry for ever."""
    fetches = Fetches(lambda to, message: None, lambda peer: 0.0, lambda voter: False)
    for sender in (Voter("t0", 1), Voter("t0", 2)):
        fetches.receive(sender, sm.Part("nothing", 0, b"x"), 0.0)
    fetches.lost(Voter("t0", 1))
    assert fetches.strays == {Voter("t0", 2): 1}


@pytest.mark.parametrize("role", ["helper", "trainer"])
def test_all_views_that_there_can_be_are_told_in_messages_that_can_be_sent(role: str) -> None:
    """One message of all of them was longer than any may be, and all peers ended of that."""
    net = swarm(1, 1)
    teller, asker = net.processes["h0" if role == "helper" else "t0"], net.processes["t0" if role == "helper" else "h0"]
    left = sm.Left(Voter("h" * 32, 1 << 62), sm.NUMBER_MAX)
    origin = sm.Origin(bytes(16), 1, left.founder, (left,) * sm.PAST_MAX)
    views = {
        span: sm.SpanView(span, sm.NUMBER_MAX, left.founder, left.founder, origin, sm.NUMBER_MAX, sm.NUMBER_MAX)
        for span in range(SPANS_MAX)
    }
    teller.service.witness.established = views
    effects = teller.service.receive(asker.voter, sm.AskViews(sm.Layout(NUMEL, 8, "fp32", SPANS.n), ""), net.now)
    told = [
        effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, sm.TellViews)
    ]
    assert max(len(pack(message)) for message in told) < HEADER_BYTES_MAX // 2
    assert [view for message in told for view in message.views] == list(views.values())


def test_a_span_goes_to_its_standby_once_it_may_move_and_that_holds_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net, may = swarm(2, 1), [False]
    owner, standby = net.owner(0), net.standby(0)
    assert standby is not None
    monkeypatch.setattr(owner.service, "_belongs_to", lambda standby, first: True)
    monkeypatch.setattr(owner.service, "_may_move", lambda span: may[0])
    seat = owner.service.seats[0]
    view = seat.owner.view
    net.run(5.0)
    assert seat.owner.view == view and not seat.owner.closing
    net.lost = lambda source, to, message: isinstance(message, sm.ImageOffer)
    seat.owner.followers.all[standby.voter].taken = -1
    may[0] = True
    net.run(5.0)
    assert seat.owner.view == view and seat.owner.closing
    net.lost = lambda source, to, message: False
    net.until(lambda: seat.owner is None, 10.0, "it is handed over")
    net.exchange({"t0": ones()})
    assert torch.equal(net.theta(), torch.ones(NUMEL))


def test_what_was_granted_of_a_claim_that_was_given_up_counts_for_no_other() -> None:
    net = swarm(2, 3)
    server, voters = net.owner(0).service, [net.processes[f"t{i}"].voter for i in range(3)]
    view = dataclasses.replace(server.witness.established[0], term=9)
    claim = server.seats[0].claim = Claiming(view, net.now, {server.me})
    for term, granted in ((8, set()), (9, set(voters[:1])), (10, set(voters[:1]))):
        server.receive(voters[0 if term == 9 else 1], sm.Granted(0, term), net.now)
        assert claim.granted == {server.me} | granted
    server.receive(voters[2], sm.Granted(0, 9), net.now)
    assert server.seats[0].claim is None and server.witness.established[0] == view, "most of five have"
