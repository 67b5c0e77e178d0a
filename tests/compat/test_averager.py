"""The scenarios of Hivemind's averaging tests, over peers without sockets: `fake_swarm`."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, get_overloads, get_type_hints

import pytest
import torch
from torch import Tensor

from dlc.comm.seating import GROUP_MAX
from dlc.compat.hivemind import DHT, DecentralizedAverager, Float16Compression, NoCompression, peer_swarm
from dlc.compat.hivemind.averaging import averager as of_averager
from dlc.compat.hivemind.averaging import control as of_control
from dlc.compat.hivemind.averaging import sharing
from dlc.compat.hivemind.averaging.allreduce import AllreduceException, AveragingMode
from dlc.compat.hivemind.averaging.averager import EXCHANGE_S
from dlc.compat.hivemind.averaging.carry import carry, same_bits, take
from dlc.compat.hivemind.averaging.control import AveragingStage, StepControl
from dlc.compat.hivemind.averaging.directory import REFRESH_S, Directory, Entry
from dlc.compat.hivemind.averaging.image import LENGTH, pack_state, unpack_state
from dlc.compat.hivemind.averaging.rotation import rotated
from dlc.compat.hivemind.compression import SizeAdaptiveCompression
from dlc.compat.hivemind.p2p import PeerID
from dlc.compat.hivemind.swarm import Notice, Outcome, Terms
from dlc.compat.hivemind.utils.background import AwaitableFuture
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.compat.hivemind.utils.timed_storage import get_dht_time
from dlc.errors import JoinError, ProtocolError, SwarmClosed, UsageError
from tests.compat.fake_swarm import Town
from tests.helpers import TICK_S, interrupted_at, wait_until

WAIT_S = 180.0
JOIN_S = 60.0
"""Of what ends at once."""
FOREVER_S = 300.0


def averager(town: Town, tensors: list[Tensor], **options: Any) -> DecentralizedAverager:
    dht = DHT(start=True, p2p=town.peer())
    return DecentralizedAverager(
        tensors, dht, **{"start": True, "prefix": "mine", "min_matchmaking_time": FOREVER_S, **options}
    )


def of(averager: DecentralizedAverager) -> list[Tensor]:
    with averager.get_tensors() as tensors:
        return [t.clone() for t in tensors]


def results(steps: list[StepControl]) -> list[dict[str, Any]]:
    return [step.result(WAIT_S) for step in steps]


@pytest.mark.parametrize(("n_clients", "n_aux"), [(0, 0), (1, 1), (2, 0), (0, 2), (0, 3), (1, 2)])
def test_all_reduce_once_with_clients_and_auxiliary_peers(n_clients: int, n_aux: int) -> None:
    town, n = Town(), 4
    modes = [AveragingMode.CLIENT] * n_clients + [AveragingMode.AUX] * n_aux
    modes += [AveragingMode.NODE] * (n - len(modes))
    given = [[torch.randn(123, generator=torch.Generator().manual_seed(i)), torch.full((3,), float(i))]
             for i in range(n)]  # fmt: skip
    contributing = [i for i in range(n) if modes[i] is not AveragingMode.AUX]
    mean = [sum(given[i][k].double() for i in contributing) / len(contributing) for k in range(2)]
    peers = [
        averager(
            town,
            [t.clone() for t in given[i]],
            target_group_size=n,
            client_mode=modes[i] is AveragingMode.CLIENT,
            auxiliary=modes[i] is AveragingMode.AUX,
        )
        for i in range(n)
    ]
    for gathered in results([peer.step(wait=False) for peer in peers]):
        assert set(gathered) == {peer.peer_id for peer in peers}
    for i, peer in enumerate(peers):
        assert peer.mode is modes[i]
        for tensor, exact, own in zip(of(peer), mean, given[i], strict=True):
            expected = own if modes[i] is AveragingMode.AUX else exact.float()
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def test_a_weighted_mean_and_what_is_gathered() -> None:
    town, weights = Town(), [0.5, 3.0, 0.0, 7.25]
    peers = [averager(town, [torch.full((5,), float(i))]) for i in range(4)]
    steps = [p.step(weight=w, gather={"batch": (i, w)}, wait=False)
             for i, (p, w) in enumerate(zip(peers, weights, strict=True))]  # fmt: skip
    for gathered in results(steps):
        assert gathered == {p.peer_id: {"batch": (i, w)} for i, (p, w) in enumerate(zip(peers, weights, strict=True))}
    expected = sum(i * w for i, w in enumerate(weights)) / sum(weights)
    assert all(torch.allclose(of(p)[0], torch.full((5,), expected)) for p in peers)
    assert all(torch.equal(of(p)[0], of(peers[0])[0]) for p in peers)


def test_a_group_is_complete_when_all_who_are_known_are_here() -> None:
    """Nobody waits for min_matchmaking_time to pass, which would take this test minutes."""
    town = Town()
    peers = [averager(town, [torch.full((2,), float(i))]) for i in range(3)]
    assert all(len(gathered) == 3 for gathered in results([peer.step(wait=False) for peer in peers]))


def test_a_grid_of_groups_holds_the_global_mean_after_as_many_rounds_as_it_has_dimensions() -> None:
    town, n = Town(), 8
    values = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    peers = [
        averager(town, [values[i].clone()], target_group_size=2, initial_group_bits=format(i // 2, "02b"))
        for i in range(n)
    ]
    spread = values.std(0)
    for _ in range(3):
        assert all(len(gathered) == 2 for gathered in results([peer.step(wait=False) for peer in peers]))
        now = torch.stack([of(peer)[0] for peer in peers])
        torch.testing.assert_close(now.mean(0), values.mean(0), rtol=0, atol=1e-6)
        assert bool((now.std(0) <= spread + 1e-6).all())
        spread = now.std(0)
    assert bool((spread < 1e-6).all())


def test_sixteen_peers_in_groups_of_four() -> None:
    town = Town()
    peers = [averager(town, [torch.ones(1) * i], target_group_size=4, initial_group_bits="000") for i in range(16)]
    gathered = results([peer.step(wait=False, gather=i) for i, peer in enumerate(peers)])
    assert all(len(group) == 4 and group[peer.peer_id] == i
               for i, (peer, group) in enumerate(zip(peers, gathered, strict=True)))  # fmt: skip
    groups = {tuple(sorted(group)) for group in gathered}
    assert len(groups) == 4 and len({p for group in groups for p in group}) == 16
    for peer, group in zip(peers, gathered, strict=True):
        assert of(peer)[0].item() == pytest.approx(sum(group.values()) / 4)


def test_bits_rotate_and_a_peer_without_bits_stays_where_it_is() -> None:
    members = ["a", "b", "c", "d"]
    assert rotated("0110", members, "c", 4) == "1010"
    assert rotated("01", members, "d", None) == "11"
    assert rotated("01", ["a"], "a", 1) == "01"
    assert rotated("0110", ["a", "b"], "b", 8) == "0001", "a place among as many as a group may have"
    assert rotated("", members, "c", 4) == ""
    town = Town()
    peer = averager(town, [torch.zeros(1)])
    peer.set_group_bits("00101011101010")
    assert peer.get_group_bits() == "00101011101010"
    with pytest.raises(UsageError, match="bits"):
        peer.set_group_bits("012")


def test_too_few_peers_is_an_error_that_leaves_the_tensors_unchanged() -> None:
    town = Town()
    peers = [
        averager(town, [torch.full((3,), float(i))], initial_group_bits=format(i, "03b"), min_matchmaking_time=0.2)
        for i in range(4)
    ]
    for i, step in enumerate([peer.step(wait=False, timeout=0.4) for peer in peers]):
        with pytest.raises(AllreduceException, match="fewer than 2"):
            step.result(WAIT_S)
        assert step.stage is AveragingStage.FINISHED and torch.equal(of(peers[i])[0], torch.full((3,), float(i)))


def test_a_step_that_failed_is_tried_again_unless_that_is_not_allowed() -> None:
    town = Town()
    peers = [averager(town, [torch.full((3,), float(i))]) for i in range(2)]
    failures = [0, 2]
    lock = threading.Lock()

    def failing(peer: str) -> bool:
        with lock:
            index = [p.peer_id for p in peers].index(peer)  # type: ignore[arg-type]
            failures[index] -= 1
            return failures[index] >= 0

    town.failing = failing
    steps = [peer.step(wait=False, allow_retries=True, timeout=WAIT_S) for peer in peers]
    first = steps[0].result(WAIT_S)  # alone in its mean, as the outcome tells
    assert set(first) == {p.peer_id for p in peers}
    assert peers[0].last_outcome is not None and dict(peers[0].last_outcome.missing) == {peers[1].peer_id: "left"}
    while failures[1] > 0:
        results([peers[0].step(wait=False)])
    again = peers[0].step(wait=False)
    results([steps[1], again])
    town.failing = lambda peer: peer == peers[1].peer_id
    once = peers[1].step(wait=False, allow_retries=False)
    results([peers[0].step(wait=False)])
    with pytest.raises(Exception, match="made to fail"):
        once.result(WAIT_S)


def test_how_long_others_are_waited_for_and_an_exchange_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as matchmaking takes, or until the step is scheduled, and never beyond its time limit."""
    asked: list[Terms] = []
    for module in (of_averager, of_control):
        monkeypatch.setattr(module, "get_dht_time", lambda: 1e9)
    for given, limit_s in ((7.0, 7.0), (None, EXCHANGE_S)):
        peer = averager(Town(), [torch.zeros(1)], min_matchmaking_time=5.0, allreduce_timeout=given)
        monkeypatch.setattr(peer.dht.swarm, "average", lambda key, parts, terms: asked.append(terms))
        for options, patience_s in (
            ({}, 5.0),
            ({"timeout": 2.0}, 2.0),
            ({"timeout": 0.0}, 0.1),
            ({"scheduled_time": 1e9 + 60.0}, 60.0),
            ({"scheduled_time": 1e9 - 60.0}, 5.0),
        ):
            with pytest.raises(AllreduceException):
                peer.step(allow_retries=False, **options)  # type: ignore[arg-type]
            assert (asked[-1].patience_s, asked[-1].budget_s) == (patience_s, limit_s)


def test_two_steps_of_one_averager_come_one_after_the_other() -> None:
    """Or both would give the values of before, and the second mean would be taken for a change of the first one."""
    town = Town()
    peers = [averager(town, [torch.full((2,), float(i))]) for i in (0, 8)]
    steps = [peer.step(wait=False, weight=1.0 + i) for peer in peers for i in (0, 2)]
    assert all(len(gathered) == 2 for gathered in results(steps))
    assert of(peers[0])[0].tolist() == of(peers[1])[0].tolist()
    assert [set(members) for _, members in town.rounds] == [{peer.peer_id for peer in peers}] * 2


def test_a_state_is_shared_by_who_trains_unless_it_says_otherwise() -> None:
    town = Town()
    for options, shares in (({}, True), ({"auxiliary": True}, False), ({"client_mode": True}, False)):
        assert averager(town, [torch.zeros(1)], **options).allow_state_sharing is shares
    assert not averager(town, [torch.zeros(1)], allow_state_sharing=False).allow_state_sharing
    assert averager(town, [torch.zeros(1)], auxiliary=True, allow_state_sharing=True).allow_state_sharing


def test_a_priority_makes_nobody_share_a_state_and_is_kept_for_when_it_does() -> None:
    peer = averager(Town(), [torch.zeros(1)], allow_state_sharing=False)
    peer.state_sharing_priority = 5.0
    assert not peer.allow_state_sharing and peer.state_sharing_priority == 5.0
    peer.allow_state_sharing = True
    assert peer.entry.priority == 5.0
    (given,) = peer.get_current_state()[1]
    with peer.get_tensors() as (tensor,):
        assert torch.equal(given, tensor) and given.data_ptr() != tensor.data_ptr()  # it is read later


def test_a_round_waits_for_those_who_can_come_to_it() -> None:
    town, node, aux = Town(), AveragingMode.NODE.value, AveragingMode.AUX.value

    def entered(**fields: Any) -> Directory:
        return Directory(town.peer(), "run", Entry(**{"bits": "0", "mode": node, "schema": "s", "round": 5, **fields}))

    def ids(*directories: Directory) -> set[str]:
        return {directory._swarm.id for directory in directories}

    me, same, busy = entered(), entered(), entered(round=4)
    for out in ({"round": 3}, {"round": 6}, {"bits": "1"}, {"schema": "t"}, {"mode": aux}):
        entered(**out)
    free, helping = entered(round=-1), entered(round=-1, mode=aux)
    assert me.expected("0", 5) == ids(me, same, busy)
    assert me.expected("0", -1) == ids(me, free, helping)


def test_of_donors_as_far_as_each_other_chance_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a hundred newcomers would all load from one peer."""
    town = Town()
    donors = [averager(town, [torch.zeros(1)]) for _ in range(3)]
    for donor in donors:
        donor.state_sharing_priority = 1.0
    loader = averager(town, [torch.zeros(1)])
    ids, shares = [str(donor.peer_id) for donor in donors], iter((0.5, 0.9, 0.1))
    monkeypatch.setattr(sharing, "random", SimpleNamespace(random=lambda: next(shares)))
    assert loader._sharing is not None and loader._sharing._donors() == [ids[2], ids[0], ids[1]]


def test_who_loads_a_state_itself_gives_none_unless_all_others_load_from_it() -> None:
    """Or two that load at once would take over each other's."""
    town = Town()
    elder, younger = (averager(town, [torch.zeros(1)]) for _ in range(2))
    assert elder._sharing is not None and younger._sharing is not None
    for peer in (elder, younger):
        peer.announce(loading=True)
    assert elder._sharing._may_give() and not younger._sharing._may_give()
    younger.announce(loading=False)
    assert younger._sharing._may_give()
    younger.allow_state_sharing = False
    assert not younger._sharing._may_give()


def test_a_step_says_on_that_its_averager_is_here_and_when_it_was_changed() -> None:
    town = Town()
    peers = [averager(town, [torch.zeros(1)]) for _ in range(2)]
    peers[0].directory._posted = before = peers[0].directory._posted - 2 * REFRESH_S
    assert peers[0].last_updated == -math.inf
    began = get_dht_time()
    results([peer.step(wait=False) for peer in peers])
    assert peers[0].directory._posted > before + REFRESH_S
    assert all(began <= peer.last_updated <= get_dht_time() for peer in peers)


def test_a_trigger_holds_a_step_back_and_a_second_one_changes_nothing() -> None:
    town = Town()
    peers = [averager(town, [torch.full((3,), float(i))]) for i in range(4)]
    steps = [peer.step(wait=False, weight=1.0, require_trigger=i in (1, 2)) for i, peer in enumerate(peers)]
    wait_until(lambda: steps[0].stage is steps[3].stage is AveragingStage.LOOKING_FOR_GROUP, WAIT_S)
    wait_until(lambda: steps[1].stage is steps[2].stage is AveragingStage.AWAITING_TRIGGER, WAIT_S)
    assert not any(step.done() for step in steps) and not steps[1].triggered
    steps[1].weight = 2.0
    for step in steps[1:3]:
        step.allow_allreduce()
    assert all(len(gathered) == 4 for gathered in results(steps))
    assert all(step.done() and step.began_allreduce for step in steps)
    wait_until(lambda: all(step.stage is AveragingStage.FINISHED for step in steps), WAIT_S)
    assert of(peers[0])[0][0].item() == pytest.approx((0 + 2 * 1 + 2 + 3) / 5)
    steps[0].allow_allreduce()
    with pytest.raises(UsageError, match="wait=False"):
        peers[0].step(require_trigger=True)


@pytest.mark.parametrize("target", [None, 2])
def test_cancelled_steps_leave_the_others_a_group(target: int | None) -> None:
    town = Town()
    peers = [averager(town, [torch.full((3,), float(i))], target_group_size=target, client_mode=i % 2 == 0,
                      min_matchmaking_time=0.5)
             for i in range(4)]  # fmt: skip
    steps = [peer.step(wait=False, require_trigger=True) for peer in peers]
    assert steps[0].cancel() and steps[1].cancel()
    for step in steps[2:]:
        step.allow_allreduce()
    assert all(len(step.result(WAIT_S)) == 2 for step in steps[2:])
    for step, peer, value in zip(steps[:2], peers, (0.0, 1.0), strict=False):
        assert step.cancelled() and torch.equal(of(peer)[0], torch.full((3,), value))
        with pytest.raises(CancelledError):
            step.result()
    assert not steps[3].cancel(), "a step that is over cannot be cancelled"


def test_a_weight_that_comes_too_late_for_its_group_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    peers = [averager(town, [torch.full((2,), float(i))]) for i in (0, 8)]
    early, late = peers[0].step(wait=False, require_trigger=True, weight=5.0), peers[1].step(wait=False)
    early.weight = 3.0
    wait_until(lambda: any(town.waiting.values()), WAIT_S)
    assert not caplog.text
    late.weight = 3.0
    assert "a new weight does not count" in caplog.text
    early.allow_allreduce()
    results([early, late])
    assert of(peers[0])[0].tolist() == of(peers[1])[0].tolist() == [2.0, 2.0]


def test_a_step_that_waits_for_others_can_be_cancelled() -> None:
    town = Town()
    peer = averager(town, [torch.zeros(1)])
    step = peer.step(wait=False)
    wait_until(lambda: step.stage is AveragingStage.LOOKING_FOR_GROUP, WAIT_S)
    assert step.cancel()
    wait_until(lambda: step.stage is AveragingStage.FINISHED, WAIT_S)
    assert not any(town.waiting.values())


def test_a_wait_that_is_interrupted_gives_the_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on, and changed the tensors when its caller had gone on, too."""
    town = Town()
    peer = averager(town, [torch.zeros(1)])
    controls: list[StepControl] = []

    def interrupted(control: StepControl, timeout: float | None = None) -> None:
        controls.append(control)
        raise KeyboardInterrupt

    monkeypatch.setattr(StepControl, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.step()
    assert [control.cancelled() for control in controls] == [True]
    wait_until(lambda: controls[0].stage is AveragingStage.FINISHED, WAIT_S)
    assert not any(town.waiting.values())


def test_a_step_whose_mean_is_being_taken_over_cannot_be_cancelled_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could, and the tensors were those of the mean all the same."""
    town, answers = Town(), list[bool]()
    averagers = [averager(town, [torch.full((3,), float(i))], target_group_size=2) for i in range(2)]
    take = averagers[0]._take

    def late(*args: Any) -> None:
        answers.append(controls[0].cancel())
        take(*args)

    monkeypatch.setattr(averagers[0], "_take", late)
    controls = [peer.step(wait=False, require_trigger=True) for peer in averagers]
    for control in controls:
        control.allow_allreduce()
    assert [len(gathered) for gathered in results(controls)] == [2, 2]
    assert answers == [False] and not controls[0].cancelled()


def test_peers_with_other_shapes_do_not_meet_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    alike = [averager(town, [torch.full((3,), float(i))], min_matchmaking_time=0.5) for i in range(2)]
    other = averager(town, [torch.zeros(4)], min_matchmaking_time=0.5)
    alone = other.step(wait=False, timeout=0.5)
    assert all(len(gathered) == 2 for gathered in results([peer.step(wait=False) for peer in alike]))
    with pytest.raises(AllreduceException):
        alone.result(WAIT_S)
    assert str(other.peer_id)[:8] in caplog.text and torch.equal(of(other)[0], torch.zeros(4))
    for options in ({"compression": Float16Compression()}, {"dtype": torch.bfloat16}):
        dtype = options.pop("dtype", torch.float32)
        assert averager(town, [torch.zeros(3, dtype=dtype)], **options).entry.schema != alike[0].entry.schema  # type: ignore[call-overload]


def test_notices_that_no_averager_posts_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    peers = [averager(town, [torch.full((3,), float(i))]) for i in range(2)]
    stranger = town.peer()
    nan = MSGPackSerializer.dumps(["", 0, "", -1, float("nan")])
    loading = MSGPackSerializer.dumps(["", 0, "", -1, 0.0, "yes"])
    for raw in (b"", b"\xc1", b"\xa1x", b"\x92\x01\x02", b"\x93\xa0\xa1x\xa0", nan, loading):
        stranger.post("averagers/mine/", raw, 60)
        assert set(peers[0].directory.others()) == {peers[1].peer_id}
    assert stranger.id[:8] in caplog.text
    assert all(len(gathered) == 2 for gathered in results([peer.step(wait=False) for peer in peers]))


def test_codecs_of_two_tensors_may_differ_and_alpha_goes_a_part_of_the_way() -> None:
    town = Town()
    mixed = SizeAdaptiveCompression(threshold=4, less=NoCompression(), greater_equal=Float16Compression())
    peers = [
        averager(town, [torch.full((2,), float(i)), torch.full((8,), 10.0 * i)], compression=mixed, averaging_alpha=0.5)
        for i in (0, 2)
    ]
    results([peer.step(wait=False) for peer in peers])
    assert [t[0].item() for t in of(peers[0])] == [0.5, 5.0] and [t[0].item() for t in of(peers[1])] == [1.5, 15.0]


def test_what_is_changed_while_a_step_waits_is_kept_on_top_of_the_mean() -> None:
    town = Town()
    peers = [averager(town, [torch.full((2,), float(i))]) for i in (0, 2)]
    step = peers[0].step(wait=False)
    wait_until(lambda: any(town.waiting.values()), WAIT_S)
    with peers[0].get_tensors() as (tensor,):
        tensor.add_(10.0)
    results([step, peers[1].step(wait=False)])
    assert of(peers[0])[0].tolist() == [11.0, 11.0] and of(peers[1])[0].tolist() == [1.0, 1.0]


def test_tied_tensors_take_the_mean_once() -> None:
    town, given = Town(), [torch.tensor([i, 2.0 * i, 3.0 * i]) for i in (1.0, 3.0)]
    peers = [averager(town, [whole, whole, whole[1:]]) for whole in given]
    results([peer.step(wait=False) for peer in peers])
    assert given[0].tolist() == given[1].tolist() == [2.0, 4.0, 6.0]


def test_peers_of_which_one_has_tied_tensors_do_not_meet_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """It took the mean of the last of them, and held another model than the others from then on, unseen."""
    town, whole = Town(), torch.ones(2)
    tied = averager(town, [whole, whole], min_matchmaking_time=0.1)
    other = averager(town, [torch.zeros(2), torch.full((2,), 8.0)], min_matchmaking_time=0.1)
    for step in [peer.step(wait=False, timeout=0.1, allow_retries=False) for peer in (tied, other)]:
        with pytest.raises(AllreduceException):
            step.result(WAIT_S)
    assert whole.tolist() == [1.0, 1.0] and "tied tensors" in caplog.text


def test_a_codec_whose_tensors_are_all_empty_has_no_part_in_a_round() -> None:
    small = SizeAdaptiveCompression(threshold=4, less=NoCompression(), greater_equal=Float16Compression())
    peer = averager(Town(), [torch.zeros(0), torch.ones(8)], compression=small)
    assert [(vector.numel(), codec) for vector, codec in peer._snapshot()] == [(8, "fp16")]


def test_a_target_beyond_the_largest_group_stands_for_that() -> None:
    """256 is what Hivemind's ALBERT example gives."""
    town = Town()
    peers = [averager(town, [torch.full((2,), float(i))], target_group_size=256) for i in range(2)]
    results([peer.step(wait=False) for peer in peers])
    assert peers[0].target_group_size == GROUP_MAX and of(peers[0])[0].tolist() == of(peers[1])[0].tolist() == [0.5] * 2


def test_what_cannot_be_averaged_is_refused_at_once() -> None:
    town = Town()
    for tensors, options in (
        ([torch.zeros(2, dtype=torch.float64)], {}),
        ([torch.zeros(2, requires_grad=True) * 2], {}),
        ([torch.zeros(1).expand(2)], {}),
        ([torch.eye(2).to_sparse()], {}),
        ([1.0], {}),
        ([], {}),
        ([torch.zeros(2)], {"client_mode": True, "auxiliary": True}),
        ([torch.zeros(2)], {"target_group_size": 2, "min_group_size": 3}),
        ([torch.zeros(2)], {"initial_group_bits": "2"}),
        ([torch.zeros(2)], {"min_group_size": 65}),
        ([torch.zeros(2)], {"min_group_size": "2"}),
        ([torch.zeros(2)], {"target_group_size": 2.5}),
        ([torch.zeros(2)], {"initial_group_bits": None}),
        ([torch.zeros(2)], {"averaging_alpha": math.nan}),
        ([torch.zeros(2)], {"averaging_alpha": "1"}),
        ([torch.zeros(2)], {"min_matchmaking_time": math.nan}),
        ([torch.zeros(2)], {"min_matchmaking_time": "5"}),
        ([torch.zeros(2)], {"allreduce_timeout": "5"}),
        ([torch.zeros(2)], {"prefix": None}),
    ):
        with pytest.raises(UsageError):
            averager(town, tensors, **options)
    with pytest.raises(UsageError, match="dht is NoneType"):
        DecentralizedAverager([torch.zeros(2)], None, start=True, prefix="mine")  # type: ignore[arg-type]
    for wrong in ({"timeout": math.nan}, {"timeout": "5"}, {"scheduled_time": math.nan}):
        with pytest.raises(UsageError, match="a number of seconds"):
            averager(town, [torch.zeros(2)]).step(**wrong)
    with pytest.raises(UsageError, match="not started"):
        averager(town, [torch.zeros(2)], start=False).step()
    over = averager(town, [torch.zeros(2)])
    over.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        over.step()
    with pytest.raises(ValueError, match="weight"):
        averager(town, [torch.zeros(2)]).step(weight=-1.0)


def test_an_averager_is_not_copied_and_tells_types_what_it_gives() -> None:
    peer = averager(Town(), [torch.zeros(2)])
    for copied in (copy.copy, copy.deepcopy):  # which ask the same methods as pickle does
        with pytest.raises(TypeError, match="a DecentralizedAverager can be neither pickled nor copied"):
            copied(peer)
    given = [get_type_hints(one)["return"] for one in get_overloads(DecentralizedAverager.step)]
    assert given == [dict[PeerID, Any], StepControl]
    with peer as entered:
        assert entered is peer


# ---------------------------------------------------------------- state


class Own(DecentralizedAverager):
    """A donor with a state of its own."""

    state: tuple[Any, ...] = ({"x": 123, "nested": (1, "a")}, (torch.randn(3), torch.tensor([1, 2, 3])))
    calls = 0

    def get_current_state(self) -> tuple[Any, ...]:
        self.calls += 1
        return self.state


def test_state_is_taken_when_it_is_asked_for_and_only_where_it_is_shared() -> None:
    town = Town()
    donor = Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="demo-run")
    loader = Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="demo-run")
    assert donor.calls == 0
    metadata, tensors = loader.load_state_from_peers(timeout=WAIT_S)
    assert donor.calls == 1 and metadata == Own.state[0]
    assert all(map(torch.equal, tensors, Own.state[1])) and [t.dtype for t in tensors] == [torch.float32, torch.int64]
    donor.state = ({"y": 1}, [torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True)])
    metadata, tensors = loader.load_state_from_peers(wait=False, timeout=WAIT_S).result(WAIT_S)
    assert metadata == {"y": 1} and [tuple(t.shape) for t in tensors] == [(0,), (2, 2), ()]
    donor.allow_state_sharing = False
    assert loader.load_state_from_peers(timeout=WAIT_S) is None and donor.calls == 2
    donor.allow_state_sharing = True
    assert loader.load_state_from_peers(timeout=WAIT_S) is not None
    donor.shutdown()
    assert loader.load_state_from_peers(timeout=WAIT_S) is None


def test_the_donor_with_the_greatest_priority_is_asked_first() -> None:
    town = Town()
    peers = [averager(town, [torch.zeros(3), torch.tensor([float(i)])], allow_state_sharing=i != 1) for i in range(4)]
    for i, peer in enumerate(peers):
        peer.state_sharing_priority = 5 - abs(2 - i)

    def loaded_by(i: int) -> float:
        return float(peers[i].load_state_from_peers(timeout=WAIT_S)[1][-1].item())

    assert loaded_by(0) == 2 and loaded_by(2) == 3
    peers[0].state_sharing_priority = 10
    assert loaded_by(2) == 0
    peers[2].allow_state_sharing = False
    assert loaded_by(0) == 3
    with pytest.raises(UsageError, match="client"):
        averager(town, [torch.zeros(3), torch.zeros(1)], client_mode=True, allow_state_sharing=True)
    client = averager(town, [torch.zeros(3), torch.zeros(1)], client_mode=True)
    with pytest.raises(ValueError, match="client"):
        client.allow_state_sharing = True
    with pytest.raises(ValueError, match="client"):
        client.state_sharing_priority = 1


def test_states_of_every_dtype_are_given_and_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    donor, loader = (Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p") for _ in range(2))
    of_all = [torch.tensor([1, 0, 3]).to(dtype) for dtype in (torch.complex64, torch.uint16, torch.float8_e5m2)]
    donor.state = ({}, of_all)
    _, loaded = loader.load_state_from_peers(timeout=WAIT_S)
    assert [t.dtype for t in loaded] == [t.dtype for t in of_all]
    assert [t.tolist() for t in loaded] == [t.tolist() for t in of_all]
    donor.state = ({}, [torch.eye(2).to_sparse()])
    assert loader.load_state_from_peers(timeout=WAIT_S) is None
    assert "sparse_coo cannot be given: make it dense" in caplog.text
    with pytest.raises(ValueError, match="NaN"):
        donor.state_sharing_priority = float("nan")


def test_a_donor_that_fails_or_dies_is_replaced_by_the_next() -> None:
    town = Town()

    class Broken(Own):
        def get_current_state(self) -> tuple[Any, ...]:
            raise RuntimeError("no state today")

    broken = Broken([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="mine")
    broken.state_sharing_priority = 9
    averager(town, [torch.full((3,), 7.0)])
    loader = averager(town, [torch.zeros(3)])
    assert loader.load_state_from_peers(timeout=WAIT_S)[1][0].tolist() == [7.0] * 3


def test_of_donors_alike_the_eldest_gives_who_loads_itself_comes_last_and_the_next_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town = Town()
    donors = [averager(town, [torch.full((3,), float(i))]) for i in range(3)]
    loader = averager(town, [torch.zeros(3)])
    fetch = loader.dht.swarm.fetch

    def loaded() -> float:
        return float(loader.load_state_from_peers(timeout=WAIT_S)[1][0][0].item())

    def torn(peer: str, *rest: Any) -> bytes | None:
        if peer == donors[0].peer_id:
            raise JoinError("it did not give its state")
        return fetch(peer, *rest)

    assert [loaded() for _ in range(5)] == [0.0] * 5
    wait_until(lambda: not any(d.dht.swarm.held for d in donors), WAIT_S, "what was fetched is given back")
    donors[0].announce(loading=True)
    assert [loaded() for _ in range(5)] == [1.0] * 5
    donors[0].announce(loading=False)
    monkeypatch.setattr(loader.dht.swarm, "fetch", torn)
    assert loaded() == 1.0
    monkeypatch.setattr(sharing, "STATE_BYTES_MAX", 10)
    assert loader.load_state_from_peers(timeout=WAIT_S) is None


def test_a_donor_that_may_post_no_answer_holds_nothing_and_gives_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ended where its peer had as many notices as it may: it never gave its state again."""
    town, refused = Town(), threading.Event()
    donor, first, second = (averager(town, [torch.full((3,), value)]) for value in (7.0, 0.0, 0.0))
    first.allow_state_sharing = second.allow_state_sharing = False
    swarm = donor.dht.swarm
    post = swarm.post

    def full(key: str, value: bytes, ttl_s: float) -> None:
        if key.startswith("have/"):
            refused.set()
            raise UsageError("one peer may have 4096 notices")
        post(key, value, ttl_s)

    monkeypatch.setattr(swarm, "post", full)
    load = first.load_state_from_peers(wait=False, timeout=WAIT_S)
    assert refused.wait(WAIT_S)
    wait_until(lambda: not swarm.held, WAIT_S, "what nobody is told of is not held")
    first.shutdown()
    assert load.result(WAIT_S) is None and "one peer may have 4096 notices" in caplog.text
    monkeypatch.setattr(swarm, "post", post)
    assert second.load_state_from_peers(timeout=WAIT_S)[1][0].tolist() == [7.0] * 3


def test_images_of_state_are_checked() -> None:
    raw = pack_state({"a": 1}, [torch.randn(300), torch.arange(4)], ["fp16", "int8"])
    metadata, (half, whole) = unpack_state(raw)
    assert metadata == {"a": 1} and half.shape == (300,) and torch.equal(whole, torch.arange(4))
    header = MSGPackSerializer.dumps([{}, [["float32", [float("inf")], "fp32", 0]]])
    endless = LENGTH.pack(len(header)) + header
    for bad in (b"", raw[:20], raw[:-1], b"\xff" * 64, raw[:8] + b"\xc1" * (len(raw) - 8), endless):
        with pytest.raises(ProtocolError):
            unpack_state(bad)


def test_a_second_averager_of_one_name_takes_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """As of a notebook's cell that is run again: nobody gives the state of the one that was dropped."""
    town = Town()
    donor, other = (DHT(start=True, p2p=town.peer()) for _ in range(2))
    dropped = DecentralizedAverager([torch.full((3,), 1.0)], donor, start=True, prefix="mine")
    assert not caplog.text
    taken = DecentralizedAverager([torch.full((3,), 2.0)], donor, start=True, prefix="mine")
    DecentralizedAverager([torch.full((3,), 3.0)], donor, start=True, prefix="another")
    assert "takes its place" in caplog.text and not dropped.is_alive()
    loader = DecentralizedAverager([torch.zeros(3)], other, start=True, prefix="mine")
    for _ in range(5):
        assert loader.load_state_from_peers(timeout=WAIT_S)[1][0].tolist() == [2.0] * 3
    taken.shutdown()
    assert list(donor.averagers) == ["another"]


def test_who_is_dropped_answers_nobody_who_asks_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was about to look who asks, and gets to it late: it gave the state that nobody trains any more."""
    town, looks, on = Town(), threading.Event(), threading.Event()
    donor = DHT(start=True, p2p=town.peer())
    dropped = Own([torch.zeros(1)], donor, start=True, prefix="mine")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "dlc-hivemind-state")
    notices = donor.swarm.notices

    def late(prefix: str) -> list[Notice]:
        if threading.current_thread() is thread and not on.is_set():
            looks.set()
            assert on.wait(WAIT_S)
        return notices(prefix)

    monkeypatch.setattr(donor.swarm, "notices", late)
    town.changed()
    assert looks.wait(WAIT_S)
    dropped.shutdown()
    town.peer().post(f"want/mine/{donor.peer_id}", b"nonce", 60.0)
    on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive() and not dropped.calls


def test_a_state_is_held_as_long_as_its_loader_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    longest_s = 8 * sharing.STATE_BYTES_MAX / 100e6
    assert min(sharing.HOLD_S, peer_swarm.FETCH_S) > longest_s, "at 100 Mbit/s"
    town, fetching = Town(), threading.Event()
    donor = averager(town, [torch.full((3,), 7.0)])
    loader = averager(town, [torch.zeros(3)])

    def leave(*_: object) -> None:
        fetching.set()
        loader.dht.swarm.leave()

    monkeypatch.setattr(loader.dht.swarm, "fetch", leave)
    with pytest.raises(SwarmClosed):
        loader.load_state_from_peers(timeout=WAIT_S)
    assert fetching.is_set()
    wait_until(lambda: not donor.dht.swarm.held, WAIT_S, "nothing is held for who has left")


def test_no_state_is_held_for_a_loader_that_was_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer is here all the time, as the donor sees it; what the old process has asked for nobody will fetch."""
    town, held = Town(), list[str]()
    donor = averager(town, [torch.full((3,), 7.0)])
    loader = averager(town, [torch.zeros(3)])
    name = loader.dht.swarm.id

    def killed(*_: object) -> None:
        held.extend(donor.dht.swarm.held)
        town.restart(name)
        raise SwarmClosed("killed")

    monkeypatch.setattr(loader.dht.swarm, "fetch", killed)
    with pytest.raises(SwarmClosed):
        loader.load_state_from_peers(timeout=WAIT_S)
    assert held and name in donor.dht.swarm.present()
    wait_until(lambda: not donor.dht.swarm.held, WAIT_S, "nothing is held for a process that is no more")
    assert not donor.directory.others(), "nor is its averager there any more"
    again = DecentralizedAverager([torch.zeros(3)], DHT(start=True, p2p=town.peers[name]), start=True, prefix="mine")
    assert again.load_state_from_peers(timeout=WAIT_S)[1][0].tolist() == [7.0] * 3


# ---------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_changed_meanwhile_is_carried_over_and_the_others_mean_replaces_nan(dtype: torch.dtype) -> None:
    nan = float("nan")
    before, mean = torch.tensor([1.0, nan, float("inf"), 4.0]), torch.tensor([2.0, 3.0, 4.0, 8.0])
    local = torch.tensor([1.0, nan, 5.0, 4.5], dtype=dtype)
    assert carry(local, before, mean) is local
    assert local.tolist() == [2.0, 3.0, 4.0, 8.5]
    assert carry(torch.tensor([1.5], dtype=dtype), torch.tensor([1.0]), torch.tensor([2.0])).tolist() == [2.5]
    assert same_bits(before, before.clone()) and not same_bits(before, mean)


def test_a_tensor_that_nobody_has_changed_has_the_mean_in_its_bits_beside_one_that_was_changed() -> None:
    """The sum of what was and of the difference would round: 1e8 + (3 - 1e8) is 0 in fp32."""
    peer = averager(Town(), [torch.tensor([1.0, 2.0]), torch.tensor([1e8]), torch.ones(2, 3).T.bfloat16()])
    before = peer._snapshot()
    with peer.get_tensors() as tensors:
        tensors[0][1] += 1.0
    mean = [(torch.tensor([5.0, 5.0, 3.0, *[7.0] * 6]), before[0][1])]
    peer._take(before, mean, Outcome((peer.peer_id,), {}, {}, None), -1)
    assert [t.flatten().tolist() for t in of(peer)] == [[5.0, 6.0], [3.0], [7.0] * 6]
    assert before[0][0].tolist() == [1.0, 2.0, 1e8, *[1.0] * 6], "others may ask for it still"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stood_still_while_others_were_waited_for_takes_the_mean_itself(dtype: torch.dtype) -> None:
    still, moved = torch.tensor([1e8, 1.0], dtype=dtype), torch.tensor([1e8, 1.5], dtype=dtype)
    before, mean = still.float().clone(), torch.tensor([3.0, 2.0])
    take(still, before, mean)
    take(moved, before, mean)
    assert still.tolist() == [3.0, 2.0] and moved[1].item() == 2.5
    count = torch.tensor([2**24 + 1])
    take(count, count.float(), count.float())
    assert count.item() == 2**24 + 1, "fp32 does not hold it: what was not changed stays"


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_peer_whose_tensors_are_not_finite_has_the_mean_of_the_others(alpha: float) -> None:
    """It is not in that mean: who computes it refuses what is not finite."""
    peer = averager(Town(), [torch.tensor([float("nan"), 1.0])], averaging_alpha=alpha)
    before = peer._snapshot()
    mean = [(torch.tensor([5.0, 3.0]), before[0][1])]
    peer._take(before, mean, Outcome((peer.peer_id,), {}, {}, None), -1)
    assert of(peer)[0].tolist() == [5.0, 1.0 + 2.0 * alpha]


# ------------------------------------------------------------------ Ctrl-C, and calls side by side


def ends(work: Callable[[], object]) -> bool:
    """On a thread of its own, which keeps nobody from ending."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    return not thread.is_alive()


def test_ctrl_c_at_any_line_of_a_trigger_leaves_a_step_that_can_be_given_up() -> None:
    """The lock of the step's event was kept: its thread waited for ever, and so did whoever gave the step up."""
    at, came = 0, True
    while came:
        at += 1
        control = StepControl(0.0, float("inf"), allow_retries=False, weight=1.0, number=-1)
        came = interrupted_at(at, control.allow_allreduce)
        assert ends(control.cancel) and ends(control.wait_for_trigger), at
    assert at > 3, "as a call has some lines"


@pytest.mark.parametrize("wait", ["result", "exception"])
def test_ctrl_c_at_any_line_of_a_wait_leaves_whoever_has_the_result_nothing_to_wait_for(wait: str) -> None:
    """The lock of the future was kept: the thread of a step waited for that for ever, and each later step for it."""
    at, came = 0, True
    while came:
        at += 1
        future: AwaitableFuture[int] = AwaitableFuture()

        def waits(future: AwaitableFuture[int] = future) -> None:
            with suppress(TimeoutError):
                getattr(future, wait)(TICK_S)

        came = interrupted_at(at, waits)
        assert ends(partial(future.set_result, 1)), at
        assert future.result(JOIN_S) == 1
    assert at > 10, "as a wait has some lines"


def test_ctrl_c_at_any_line_of_a_wait_for_a_donor_leaves_a_loader_that_loads() -> None:
    """The lock of the notices was kept: no notice was read any more, and whoever had one waited for ever."""
    town = Town()
    donor = Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p")
    loader = Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p")
    of_loader = loader._sharing
    assert of_loader is not None
    at, came = 0, True
    while came:
        at += 1
        came = interrupted_at(at, lambda: of_loader._wait_for(lambda: False, time.monotonic() + TICK_S))
        assert ends(of_loader._notice), at
    assert at > 10, "as a wait has some lines"
    assert loader.load_state_from_peers(timeout=WAIT_S) is not None and donor.calls == 1


def test_of_two_loads_at_once_the_second_begins_when_the_first_is_over() -> None:
    """They had one request between them, so that the donor gave up what the first was fetching; and who came first to
    an end said that this peer does not load any more."""
    town, goes_on = Town(), threading.Semaphore(0)

    class Slow(Own):
        def get_current_state(self) -> tuple[Any, ...]:
            state = super().get_current_state()
            goes_on.acquire(timeout=WAIT_S)
            return state

    donor = Slow([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p")
    loader = Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p")
    loads = [loader.load_state_from_peers(wait=False, timeout=WAIT_S)]
    wait_until(lambda: donor.calls == 1, WAIT_S)
    assert loader.load_state_from_peers(timeout=0.0) is None, "its time is over before its turn"
    loads.append(loader.load_state_from_peers(wait=False, timeout=WAIT_S))
    assert not loads[0].cancel(), "it goes on"
    goes_on.release()
    assert loads[0].result(WAIT_S)[0] == Own.state[0]
    wait_until(lambda: donor.calls == 2, WAIT_S)
    assert loader.entry.loading and not loads[1].done()
    goes_on.release()
    assert loads[1].result(WAIT_S)[0] == Own.state[0]
    wait_until(lambda: not loader.entry.loading, WAIT_S)


def test_a_request_whose_posting_was_interrupted_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had gone out, and the donor held its state for it as long as the loader lived."""
    town = Town()
    donor, loader = (Own([torch.zeros(3)], DHT(start=True, p2p=town.peer()), start=True, prefix="p") for _ in range(2))
    post = loader.dht.swarm.post

    def interrupted(key: str, *rest: Any) -> None:
        post(key, *rest)
        if key.startswith("want/"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loader.dht.swarm, "post", interrupted)
        loader.load_state_from_peers(timeout=WAIT_S)
    assert not loader.dht.swarm.notices("want/")
    wait_until(lambda: not town.peers[str(donor.peer_id)].held, WAIT_S)
