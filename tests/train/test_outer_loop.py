"""Promise P7 in tensors: whatever happens between offers and rounds, each inner step is counted once."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
from dlc.comm.encoded import Encoded
from dlc.errors import CheckpointError, UsageError
from dlc.flat import FlatView
from dlc.runspec import OuterSpec
from dlc.train.offers import NotFinite, Work
from dlc.train.outer_loop import OuterLoop
from dlc.train.outgoing import Hook
from tests.helpers import wait_until
from tests.train.fake_peer import FakePeer

STEP = 2.0**-6
"""What an inner step here adds to each parameter: sums of it are exact in fp32."""
LEASE = 64


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def timers() -> list[threading.Thread]:
    """Of announcements."""
    return [thread for thread in threading.enumerate() if thread.name == "dlc-announce"]


class Model:
    """One block a step; theta after all is the start plus STEP for each step that a round counted."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        codec: str = "fp32",
        hook: Hook | None = None,
        overlap: str = "none",
    ) -> None:
        self.peer = FakePeer()
        self.model = nn.Linear(3, 2).to(dtype)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        mean = OuterSpec(lr=1.0, momentum=0.0)
        view = FlatView.of(self.model)
        self.loop = OuterLoop(self.peer, view, channel="train", outer=mean, hook=hook, overlap=overlap)
        self.loop.open(codec=codec, chunk_elems=4, lease_len=LEASE)
        self.blocks: list[int] = []
        self.moved_by_others = 0.0

    def step(self, count: int = 1) -> None:
        if self.loop.displaced:
            assert self.loop.resume(self.work)
        lease = self.loop.model.newest().lease
        assert lease is not None
        self.blocks = lease.take(len(self.blocks) + count)[0]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(STEP * count)

    @property
    def work(self) -> Work:
        return Work(tuple(self.blocks), self.blocks[-1] + 1) if self.blocks else Work()

    def offer(self) -> bool:
        return self.loop.offer(float(len(self.blocks)), self.work)

    def announce(self, steps: int = 1, said: bool = True) -> None:
        """The next offer, after so many steps; and wait until the peer has heard of it, if it is said at once."""
        lease = self.loop.model.newest().lease
        assert lease is not None
        blocks = tuple(lease.take(len(self.blocks) + steps)[0])
        before = len(self.peer.uptos)
        self.loop.announce(float(len(blocks)), Work(blocks, blocks[-1] + 1), 0.0 if said else 1000.0, 1.0)
        wait_until(lambda: not said or not timers(), what="it is said")
        assert len(self.peer.uptos) == before + said

    def settle(self) -> bool:
        """True: something was counted."""
        while not self.loop.wait(0.0):
            pass
        offered = len(self.loop.offered.blocks)
        settled = self.loop.settle(self.work)
        if settled.counted:
            self.blocks = self.blocks[offered:]
        if not settled.kept:
            self.blocks = []
        return settled.counted

    def others_round(self) -> None:
        self.peer.pass_round(torch.full((self.peer.state.numel,), -0.25))  # lr 1: theta grows by it
        self.moved_by_others += 0.25

    def local(self) -> Tensor:
        view = FlatView.of(self.model)
        return view.gather(torch.empty(view.numel))


def test_steps_after_the_offer_are_kept_and_counted_by_the_next_round() -> None:
    m = Model()
    m.step(3)
    m.peer.slices = [2]
    assert m.offer()
    m.step(2)
    assert m.settle() and m.blocks == [3, 4]
    assert torch.equal(m.peer.vectors[0], torch.full((8,), -3 * STEP))
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + 3 * STEP))
    assert torch.equal(m.local(), torch.full((8,), 1 + 5 * STEP))
    m.step()
    assert m.offer() and m.settle() and not m.blocks
    assert torch.equal(m.peer.vectors[1], torch.full((8,), -3 * STEP))
    assert torch.equal(m.local(), m.peer.theta()) and m.peer.uptos == [3, 6]


def test_an_offer_grows_until_a_plan_names_it() -> None:
    m = Model()
    m.peer.planned = False
    m.peer.slices = [9, 9, 9]
    m.step(2)
    assert m.offer()
    m.step(3)
    assert m.loop.grow(5.0, m.work) and len(m.loop.offered.blocks) == 5
    m.peer.planned = True
    m.step()
    assert m.loop.grow(6.0, m.work) and len(m.loop.offered.blocks) == 5  # that one stands
    assert m.settle() and m.blocks == [5]
    assert m.peer.weights == [2.0, 5.0] and torch.equal(m.peer.counted[0], torch.full((8,), -5 * STEP))
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + 6 * STEP))


def test_a_hook_that_writes_into_memory_of_its_own_changes_no_offer_that_is_on_its_way() -> None:
    """It is asked again for what has come since, before it is known whether a plan names the offer."""
    own = torch.empty(8)
    m = Model(hook=own.copy_, overlap="delayed")
    m.peer.slices = [9]
    m.step(2)
    assert m.offer()
    m.step()
    assert m.loop.grow(3.0, m.work) and len(m.loop.offered.blocks) == 2
    assert m.settle() and torch.equal(m.peer.counted[0], torch.full((8,), -2 * STEP)) and m.blocks == [2]


def test_of_an_eager_offer_that_grows_all_that_was_foreseen_is_told_from_the_inner_steps() -> None:
    m = Model(overlap="eager")
    m.peer.planned, m.peer.slices, m.loop.share = False, [9, 1], 0.5
    m.step(2)
    assert m.offer()
    m.step()
    assert m.loop.grow(3.0, m.work)
    m.step()
    assert m.settle() and m.blocks == [3] and torch.equal(m.peer.counted[0], torch.full((8,), -3 * STEP))
    assert torch.equal(m.local(), m.peer.theta() + STEP)
    assert m.offer() and m.settle() and torch.equal(m.peer.counted[1], torch.full((8,), -STEP))


def test_what_an_interrupt_left_half_foreseen_is_no_inner_step(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Model(overlap="eager")
    m.step(2)
    before, scatter, calls = m.local(), m.loop.model.origin.scatter, list[int]()

    def interrupted(local: Tensor) -> Tensor:
        held = scatter(local)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return held

    m.loop.share = 0.5
    monkeypatch.setattr(m.loop.model.origin, "scatter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        m.offer()
    assert m.loop.waiting and torch.equal(m.local(), before)
    assert m.settle() and not m.blocks and torch.equal(m.local(), m.peer.theta())


def test_steps_after_the_second_offer_of_missed_work_begin_at_the_new_theta() -> None:
    """And not where the round that missed it had found the model: they would lack what the others learned."""
    m = Model()
    m.peer.slices = [0, 9]
    m.step(2)
    assert m.offer()
    m.others_round()
    assert not m.settle() and m.offer()
    m.step()
    assert torch.equal(m.local(), torch.full((8,), 1.25 + 3 * STEP))
    assert m.settle() and m.blocks == [2]
    assert torch.equal(m.peer.theta(), torch.full((8,), 1.25 + 2 * STEP))
    assert torch.equal(m.local(), torch.full((8,), 1.25 + 3 * STEP))


def test_a_missed_offer_goes_on_from_the_new_theta() -> None:
    m = Model()
    m.peer.misses = ["not ready", "not ready"]
    m.step(2)
    assert m.offer() and not m.settle() and m.blocks == [0, 1]
    assert m.loop.model.local() is None, "of the theta before"
    m.others_round()
    m.step()
    assert torch.equal(m.local(), torch.full((8,), 1.25 + 3 * STEP))
    assert m.offer() and not m.settle()
    assert m.offer()  # unchanged, and the model is not where it was measured
    m.step()
    assert m.settle() and m.blocks == [3]
    assert torch.equal(m.local(), torch.full((8,), 1.25 + 4 * STEP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_steps_during_a_round_nothing_is_held_beside_theta_but_the_payloads(dtype: torch.dtype) -> None:
    m = Model(dtype)
    memory = m.loop.model.origin.base.data_ptr()
    for _ in range(3):
        m.step()
        assert m.offer() and m.loop._offer is not None
        assert m.loop._offer.d is None and isinstance(m.loop._offer.sent, Encoded)
        assert m.settle() and m.loop.model._spare is None
        assert m.loop.model.origin.base.data_ptr() == memory == m.loop.state._theta.data_ptr()
    torch.testing.assert_close(m.peer.theta(), torch.full((8,), 1 + 3 * STEP), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_offered_stays_whatever_becomes_of_the_model(codec: str, hooked: bool) -> None:
    """The stand-in of a peer looks again at the commit whether what it was given is still the same."""
    m = Model(codec=codec, hook=(lambda d: d) if hooked else None)
    for t in range(3):
        m.step(2)
        assert m.offer()
        offered = m.peer.vectors[-1].clone()
        with torch.no_grad():
            for parameter in m.model.parameters():
                parameter.fill_(float("nan"))
        assert m.settle() and torch.equal(m.peer.counted[-1], offered) and offered.any()
        assert torch.equal(m.local(), m.peer.theta()) and m.peer.state.t == t + 1


def test_a_round_without_us_leaves_base_as_it_was() -> None:
    m = Model()
    m.step(2)
    base, local = m.peer.theta(), m.local()
    assert m.offer()
    m.others_round()
    assert torch.equal(m.loop.model.origin.base, base) and not torch.equal(m.peer.theta(), base)
    assert not m.settle() and torch.equal(m.local(), local)
    assert m.offer() and torch.equal(m.peer.vectors[0], m.peer.vectors[1])
    assert m.settle() and torch.equal(m.peer.theta(), local + m.moved_by_others)
    assert m.loop.model.origin.base.data_ptr() == m.loop.state._theta.data_ptr()


def test_no_step_can_follow_once_the_round_that_counts_the_offer_has_moved_theta() -> None:
    """The round is over between the last look and the step that was to shorten the wait."""
    m = Model()
    m.step(2)
    assert m.offer() and m.loop.waiting
    m.peer._pending.wait()  # type: ignore[union-attr]
    assert m.loop.displaced and not m.loop.resume(m.work)
    assert m.loop.waiting and m.settle() and not m.loop.waiting and not m.blocks
    m.step()
    assert m.offer() and m.settle() and torch.equal(m.peer.theta(), torch.full((8,), 1 + 3 * STEP))


def test_steps_that_resume_while_a_round_is_under_way_outlive_it() -> None:
    m = Model()
    m.step(2)
    assert m.offer()
    m.step()
    base = m.loop.model.origin.base.clone()
    m.peer._pending.wait()  # type: ignore[union-attr]
    assert torch.equal(m.loop.model.origin.base, base), "the round that counts us leaves it alone now"
    assert m.settle() and m.blocks == [2] and torch.equal(m.local(), torch.full((8,), 1 + 3 * STEP))


def test_steps_that_nobody_was_asked_about_are_refused_and_not_guessed() -> None:
    m = Model()
    m.step(2)
    assert m.offer()
    m.blocks.append(2)
    m.loop.wait(0.0)
    with pytest.raises(UsageError, match="wait for it"):
        m.loop.settle(m.work)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_that_is_not_finite_offers_nothing_and_keeps_nothing(codec: str, hooked: bool) -> None:
    m = Model(codec=codec, hook=(lambda d: d.nan_to_num()) if hooked else None)
    m.step()
    with torch.no_grad():
        list(m.model.parameters())[-1].view(-1)[-1] = float("inf")
    with pytest.raises(NotFinite):
        m.offer()
    assert not m.peer.vectors and torch.equal(m.local(), torch.ones(8)) and not m.loop.displaced
    m.blocks = []
    m.step()
    assert m.offer() and m.settle() and m.peer.vectors[0].isfinite().all()


def test_steps_that_diverge_while_a_round_is_under_way_are_undone() -> None:
    m = Model()
    m.step(2)
    assert m.offer()
    m.step()
    with torch.no_grad():
        next(m.model.parameters()).fill_(float("nan"))
    m.loop.put_back()
    assert torch.equal(m.local(), torch.full((8,), 1 + 2 * STEP))
    assert m.settle() and torch.equal(m.local(), m.peer.theta())


def test_an_offer_is_taken_back_only_when_the_next_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may be made at any moment: what it names must not be gone for as long as measuring takes."""
    m = Model()
    m.peer.planned, m.peer.slices = False, [9]
    m.step(2)
    assert m.offer()
    m.step()
    with torch.no_grad():
        next(m.model.parameters()).fill_(float("nan"))
    with pytest.raises(NotFinite):
        m.loop.grow(3.0, m.work)
    assert not m.peer.withdrawn and len(m.loop.offered.blocks) == 2
    m.loop.put_back()
    m.blocks = m.blocks[:2]
    m.step()
    order: list[str] = []
    for owner, name in ((m.loop.model, "measure"), (m.peer, "withdraw"), (m.peer, "contribute")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, n=name, c=call, **k: (order.append(n), c(*a, **k))[1])
    assert m.loop.grow(3.0, m.work) and order == ["measure", "withdraw", "contribute"]
    assert m.settle() and not m.blocks


def test_work_of_a_lost_lease_is_dropped_wherever_that_is_noticed() -> None:
    waiting, growing = Model(), Model()
    for before in (Model(), Model(overlap="delayed")):
        before.step(2)
        before.peer.lose_lease()
        assert not before.offer() and torch.equal(before.local(), torch.ones(8)) and not before.peer.vectors

    waiting.step(2)
    waiting.peer.misses = ["dropped"]
    waiting.peer.on_contribute = waiting.peer.lose_lease
    assert waiting.offer() and not waiting.settle()
    assert not waiting.blocks and torch.equal(waiting.local(), torch.ones(8))

    growing.peer.planned, growing.peer.slices = False, [9]
    growing.step(2)
    assert growing.offer()
    growing.step()
    growing.peer.lose_lease()
    assert not growing.loop.grow(3.0, growing.work) and torch.equal(growing.local(), torch.ones(8))


@pytest.mark.parametrize(
    "wrong", [torch.ones(7), torch.ones(8, 1), torch.ones(8).double(), torch.full((8,), torch.nan)]
)
def test_saved_parameters_of_another_model_are_not_taken_up(wrong: Tensor) -> None:
    m = Model()
    m.step()
    m.loop.model.check(torch.zeros(8))
    with pytest.raises(CheckpointError):
        m.loop.take_up(wrong, m.peer.state.digest(), Work())
    assert torch.equal(m.local(), torch.full((8,), 1 + STEP)), "nothing has changed"


def test_of_work_that_was_not_counted_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its chunks may be in the mean all the same; all of it is offered again."""
    m, settled = Model(codec="int8"), list[tuple[bool, ...]]()
    monkeypatch.setattr(m.loop.outgoing, "over", lambda sent, included, fragment: settled.append(included))
    m.peer.misses = ["late"]
    m.step(2)
    assert m.offer() and not m.settle() and m.blocks
    assert m.offer() and m.settle()
    assert settled == [(), (True, True)]


def test_work_of_a_lost_lease_is_not_gone_on_from() -> None:
    m = Model()
    m.step(2)
    m.others_round()
    assert m.loop.model.moved() and m.loop.rebase(m.work) and torch.equal(m.local(), torch.full((8,), 1.25 + 2 * STEP))
    m.peer.lose_lease()
    m.others_round()
    assert not m.loop.rebase(m.work) and torch.equal(m.local(), m.peer.theta())


def test_without_leases_what_a_new_state_dropped_is_gone() -> None:
    """It may have been counted by the history that this state is from: no lease tells."""
    m = Model()
    m.loop.model.leased = False
    m.peer.misses = ["dropped"]
    m.step(2)
    assert m.offer() and not m.settle()
    assert not m.blocks and torch.equal(m.local(), m.peer.theta())


def test_another_lease_is_seen_where_no_round_came_with_it() -> None:
    """Who waits for one would wait until the others have moved theta."""
    m = Model()
    before = m.loop.refresh().lease
    m.peer.lose_lease()
    lease = m.loop.refresh().lease
    assert lease == m.peer.position("train").lease != before


@pytest.mark.parametrize("replaced", [False, True])
def test_a_round_in_the_middle_of_reading_theta_tears_nothing(monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    """Nor does a state that takes the place of this one, with the log as it was."""
    m = Model()

    def replace_state() -> None:
        m.peer.state.step(1, [(0, m.peer.state.numel, torch.full((m.peer.state.numel,), -0.25))])

    rounds = [replace_state if replaced else m.others_round, lambda: None]
    origin = m.loop.model.origin
    read = origin.renew

    def renewed() -> None:
        read()
        rounds.pop(0)()

    monkeypatch.setattr(origin, "renew", renewed)
    position = m.loop.adopt()
    assert position.t == m.peer.state.t == 1 and not rounds
    assert torch.equal(m.local(), m.peer.theta())


def test_a_state_that_is_being_fetched_again_has_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Model()
    m.others_round()
    assert m.loop.model.moved()
    position, now = m.peer.position, m.peer.position("train")
    monkeypatch.setattr(m.peer, "position", lambda channel: dataclasses.replace(now, digest=b""))
    assert not m.loop.model.moved()
    monkeypatch.setattr(m.peer, "position", position)
    m.loop.adopt()
    assert not m.loop.model.moved()
    same_t = dataclasses.replace(position("train"), digest=b"x" * 32)
    monkeypatch.setattr(m.peer, "position", lambda channel: same_t)
    assert m.loop.model.moved(), "another history's"


def test_what_was_to_be_sent_of_an_offer_that_is_taken_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    m, over = Model(), list[object]()
    m.peer.planned, m.peer.slices = False, [9, 9]
    m.step(2)
    assert m.offer() and m.loop._offer is not None
    before = m.loop._offer.sent
    m.step()
    monkeypatch.setattr(m.loop.outgoing, "over", lambda sent, *more: over.append(sent))
    assert m.loop.grow(3.0, m.work)
    assert len(over) == 1 and over[0] is before


def test_what_the_owners_refuse_is_offered_no_more() -> None:
    m = Model()
    m.peer.misses = ["refused: not finite"]
    m.step(2)
    assert m.offer() and not m.settle()
    assert not m.blocks and torch.equal(m.local(), m.peer.theta())


@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_an_offer_that_its_peer_refuses_is_none(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is at theta then, and what was to be sent is kept for nobody."""
    m, over = Model(overlap=overlap), list[object]()
    m.step(2)
    monkeypatch.setattr(m.loop.outgoing, "over", lambda sent, *more: over.append(sent))

    def refuses(*_: Any, **__: Any) -> Any:
        raise UsageError("no")

    monkeypatch.setattr(m.peer, "contribute", refuses)
    with pytest.raises(UsageError, match="no"):
        m.offer()
    assert not m.loop.waiting and torch.equal(m.local(), torch.ones(8)) and len(over) == 1


def test_a_round_that_was_not_seen_before_the_offer_overtakes_it() -> None:
    m = Model()
    m.step(2)
    m.peer.on_contribute = m.others_round
    assert m.offer() and m.loop.wait(0.0) and not m.settle() and m.blocks == [0, 1]
    assert not m.peer.vectors, "nothing was offered to a later round"
    m.peer.on_contribute = lambda: None
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + m.moved_by_others + 2 * STEP))


def test_work_stands_where_only_the_state_was_replaced() -> None:
    m = Model()
    m.step(2)
    m.peer.misses = ["dropped"]
    assert m.offer() and not m.settle() and m.blocks == [0, 1]
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + 2 * STEP))


def test_what_was_announced_is_the_offer_and_is_encoded_after_the_last_step() -> None:
    m = Model()
    for t in range(3):
        m.step(2)
        m.announce()
        assert m.peer.fillings[-1] is not None and m.peer.vectors[-1].isnan().all()
        m.step()
        assert m.offer() and m.peer.fillings[-1].complete
        assert m.settle() and not m.blocks and len(m.peer.weights) == t + 1
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + 9 * STEP)) and m.peer.uptos == [3, 6, 9]
    assert torch.equal(m.local(), m.peer.theta())


def test_a_step_that_ends_before_anything_is_said_makes_an_offer_as_any() -> None:
    m = Model()
    m.announce(said=False)
    m.step()
    assert m.offer() and m.settle() and m.peer.fillings == [None]
    assert not timers()


@pytest.mark.parametrize("planned", [False, True])
def test_an_announcement_of_other_work_is_taken_back(planned: bool) -> None:
    """Where a plan names it already, its round goes on without us, and is waited for before the next offer."""
    m = Model()
    m.peer.planned = planned
    m.peer.slices = [2]
    m.announce(steps=1)
    m.step(2)
    assert m.offer() and m.settle() == (not planned)
    if planned:
        assert m.offer() and m.settle()
    (filling, none) = m.peer.fillings
    assert filling is not None and filling.stopped and none is None
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + 2 * STEP)) and not m.blocks


def test_of_an_announced_step_that_diverged_nothing_is_sent() -> None:
    m = Model()
    m.peer.slices = [1]
    m.announce()
    with torch.no_grad():
        next(m.model.parameters()).fill_(torch.nan)
    m.step()
    with pytest.raises(NotFinite):
        m.offer()
    m.blocks = []
    (filling,) = m.peer.fillings
    assert filling is not None and filling.stopped and m.peer.vectors[0].isnan().all()
    assert not m.loop.announced.free(0.0), "its round is on its way"
    assert m.loop.announced.free(0.0)
    assert m.loop.model.moved() and m.loop.rebase(m.work)
    m.step()
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1 + STEP))


def test_a_round_that_passes_during_the_announced_step_is_gone_on_from() -> None:
    m = Model()
    m.step()
    m.announce()
    m.step()
    m.others_round()
    assert m.loop.model.moved() and m.loop.rebase(m.work) and m.loop.announced.free(0.0)
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1.25 + 2 * STEP))
    m.announce()
    m.step()
    m.others_round()
    assert m.offer() and not m.settle()
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.theta(), torch.full((8,), 1.5 + 3 * STEP))


@pytest.mark.parametrize("options", [{"codec": "int8"}, {"hook": lambda d: d}], ids=["residual", "hook"])
def test_what_is_told_with_the_values_is_not_announced(options: dict[str, Any]) -> None:
    m = Model(**options)
    m.step()
    m.loop.announce(1.0, m.work, 0.0, 1.0)
    assert not timers()
    assert m.offer() and m.peer.fillings == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_each_step_is_counted_once_whatever_happens(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    m = Model(dtype)
    steps = 0
    for _ in range(25):
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.3:
                m.loop.announced.free(0.0)
                m.loop.announced.retract()
                if m.peer._pending is None or m.peer._pending.done:
                    m.announce(steps=rng.choice([1, 1, 2]), said=rng.random() < 0.5)
            m.step()
            steps += 1
            if rng.random() < 0.2:
                m.others_round()
                assert m.loop.model.moved() and m.loop.rebase(m.work)
        if not m.blocks:
            continue
        m.peer.misses = [rng.choice(["late", "dropped"])] if rng.random() < 0.3 else []
        m.peer.slices = [rng.randint(0, 2)] * 9
        m.peer.planned = rng.random() < 0.5
        assert m.offer()
        for _ in range(rng.randint(0, 3)):
            m.step()
            steps += 1
            if rng.random() < 0.3:
                assert m.loop.grow(float(len(m.blocks)), m.work)
        m.settle()
    m.peer.misses, m.peer.slices = [], []
    while m.blocks:
        assert m.offer()
        m.settle()
    rounding = 0.0 if dtype == torch.float32 else 2.0**-7 * steps  # of a step at a bf16 number near 2
    expected = torch.full((8,), 1 + steps * STEP + m.moved_by_others)
    torch.testing.assert_close(m.peer.theta(), expected, rtol=0.0, atol=rounding)
    assert sum(m.peer.weights) >= steps and m.peer.state.t > 0
