"""The layout of a parameter server, and the state of one span against torch.optim and against a second replica."""

from __future__ import annotations

import pytest
import torch

from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.servermessages import NUMBERS_AHEAD_MAX, Counted, Origin, Push, Update
from dlc.comm.spans import Spans, assign
from dlc.comm.spanstate import COUNTED_MAX, Optimizer, SpanState
from dlc.errors import ConfigError, ProtocolError
from dlc.runspec import OuterSpec
from dlc.server import optimizer_of
from dlc.strategyspec import ServerSpec
from dlc.train.outer_step import Adam, Nesterov, Sgd

SPANS = Spans(Grid(1000, 64, "fp32"), 3)
ORIGIN = Origin(b"o" * 16)


def state(optimizer: Optimizer, span: int = 1, seed: int = 0) -> SpanState:
    theta = torch.randn(SPANS.numel(span), generator=torch.Generator().manual_seed(seed))
    return SpanState(SPANS, span, optimizer, theta, ORIGIN)


def move(state: SpanState, g: torch.Tensor, n: int = 1, step: int = 0, peer: str = "a") -> tuple[Update, list[bytes]]:
    version = state.version + 1
    first = SPANS.elements(state.span)[0]
    update = Update(version, step or version, n, (Push(Voter(peer, 1), version, 1.0),), ())
    cuts = [[at - first for at in SPANS.grid.span(c)] for c in SPANS.chunks(state.span)]
    payloads = [SPANS.grid.coder.encode(g[a:b].contiguous()) for a, b in cuts]
    state.apply(update, payloads)
    return update, payloads


def nesterov(asynchronous: bool = False, weight_decay: float = 0.0) -> Optimizer:
    momentum = 0.9 if asynchronous else None
    return Optimizer("nesterov", Nesterov(0.9), lambda t: 0.5, asynchronous, momentum, weight_decay)


def test_spans_cover_the_vector_once_and_are_about_equal() -> None:
    for n_spans in (1, 3, 5, 16):
        spans = Spans(Grid(1000, 60, "fp16"), n_spans)
        pieces = [spans.elements(s) for s in range(n_spans)]
        assert pieces[0][0] == 0 and pieces[-1][1] == 1000
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        assert max(len(spans.chunks(s)) for s in range(n_spans)) <= -(-17 // n_spans)
        assert sum(sum(spans.wire_sizes(s)) for s in range(n_spans)) == spans.grid.total_wire_bytes
    assert Spans.usual(Grid(100, 60, "fp32")).n == 2
    with pytest.raises(ConfigError, match="use fp32, fp16, bf16"):
        Spans(Grid(100, 60, "int4"), 1)
    with pytest.raises(ConfigError, match="one per chunk"):
        Spans(Grid(100, 60, "fp32"), 3)


@pytest.mark.parametrize("n_helpers", [1, 2, 3, 5, 16, 20])
def test_every_span_has_an_owner_and_a_standby_and_no_helper_more_than_its_share(n_helpers: int) -> None:
    helpers = tuple(f"helper{i}" for i in range(n_helpers))
    found = assign(16, helpers)
    assert found == assign(16, helpers[::-1])
    room = -(-16 // n_helpers)
    for helper in helpers:
        assert 16 // n_helpers <= sum(owner == helper for owner, _ in found) <= room
        assert sum(standby == helper for _, standby in found) <= room + 1
    for owner, standby in found:
        assert standby is None if n_helpers == 1 else standby not in (None, owner)


def test_who_is_shunned_owns_nothing_and_the_others_share_it() -> None:
    helpers = ("a", "b", "c")
    found = assign(16, helpers, frozenset({"b"}))
    assert [sum(owner == helper for owner, _ in found) for helper in helpers] == [8, 0, 8]
    assert any(standby == "b" for _, standby in found) and all(owner != standby for owner, standby in found)
    with pytest.raises(ValueError, match="at least one helper"):
        assign(16, helpers, frozenset(helpers))


def test_who_leaves_moves_few_spans_beside_its_own() -> None:
    helpers = tuple(f"helper{i}" for i in range(8))
    before, after = assign(64, helpers), assign(64, helpers[1:])
    moved = sum(b[0] != a[0] for b, a in zip(before, after, strict=True) if b[0] != helpers[0])
    assert moved <= 32


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
def test_rounds_follow_torch_optim(name: str) -> None:
    rules = {"sgd": (Sgd(), 0.0), "nesterov": (Nesterov(0.9), 0.0), "adamw": (Adam((0.9, 0.95), 1e-8), 0.1)}
    rule, decay = rules[name]
    span = state(Optimizer(name, rule, lambda t: 0.01, weight_decay=decay))
    known = torch.nn.Parameter(span.theta.clone())
    optimizer: torch.optim.Optimizer = {
        "sgd": torch.optim.SGD([known], lr=0.01),
        "nesterov": torch.optim.SGD([known], lr=0.01, momentum=0.9, nesterov=True),
        "adamw": torch.optim.AdamW([known], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    }[name]
    for seed in range(1, 8):
        g = torch.randn(known.numel(), generator=torch.Generator().manual_seed(seed))
        known.grad = g.clone()
        optimizer.step()
        move(span, g)
    torch.testing.assert_close(span.theta, known.detach(), rtol=1e-5, atol=1e-6)


def test_n_asynchronous_updates_move_as_far_as_the_round_of_their_mean() -> None:
    several, one = state(nesterov(asynchronous=True)), state(nesterov())
    for seed in range(5):
        gs = [torch.randn(one.theta.numel(), generator=torch.Generator().manual_seed(4 * seed + i)) for i in range(4)]
        for g in gs:
            move(several, g, n=4)
        move(one, torch.stack(gs).mean(0))
    torch.testing.assert_close(several.theta, one.theta, rtol=1e-4, atol=1e-5)
    assert several.step == one.step == 5


def test_n_asynchronous_updates_of_adam_move_as_far_as_a_round() -> None:
    """Its step does not shrink with the gradient, so its rate has to."""
    n, rule = 4, Adam((0.9, 0.95), 1e-8)
    start = state(Optimizer("adamw", rule, lambda t: 0.01)).theta.clone()
    several = state(Optimizer("adamw", rule, lambda t: 0.01, asynchronous=True, weight_decay=0.1))
    one = state(Optimizer("adamw", rule, lambda t: 0.01, weight_decay=0.1))
    g = torch.randn(start.numel(), generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        for _ in range(n):
            move(several, g, n=n)
        move(one, g, n=n)
    torch.testing.assert_close(several.theta, one.theta, rtol=0.0, atol=1e-4)
    assert float((one.theta - start).abs().min()) > 0.02 and several.step == one.step == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_made_in_the_middle_ends_in_the_same_bits(asynchronous: bool) -> None:
    optimizer = nesterov(asynchronous, weight_decay=0.01)
    first, replica = state(optimizer), None
    for seed in range(7):
        g = torch.randn(first.theta.numel(), generator=torch.Generator().manual_seed(seed))
        update, payloads = move(first, g, n=3, peer=f"p{seed % 3}")
        if replica is not None:
            replica.apply(update, payloads)
        if seed == 3:
            replica = SpanState.restored(SPANS, 1, optimizer, first.image())
    assert replica is not None and replica.digest() == first.digest() and len(first.image()) == first.image_bytes()
    known = [replica.has(voter, seq) for voter, seq in ((Voter("p1", 1), 5), (Voter("p1", 1), 6), (Voter("p1", 2), 1))]
    assert known == [5, None, None]
    assert replica.has(Voter("p1", 0), 99) == 0, "an older process of a peer has nothing left to count"


def test_a_late_push_of_a_peers_older_process_is_not_remembered_in_place_of_its_newer_ones() -> None:
    span = state(nesterov(asynchronous=True))
    old, new = Voter("a", 1), Voter("a", 2)
    payloads = [bytes(size) for size in SPANS.wire_sizes(1)]
    for version, voter, seq in ((1, old, 8), (2, new, 1), (3, old, 9)):
        span.apply(Update(version, 0, 1, (Push(voter, seq, 1.0),), ()), payloads)
    assert [span.has(old, 9), span.has(new, 1), span.has(new, 2)] == [0, 2, None]
    assert span.newest(new) == 1, "it would be told that its own are set aside"


def test_a_push_of_an_older_process_of_the_same_number_is_not_taken_for_the_newest() -> None:
    span = state(nesterov(asynchronous=True))
    payloads = [bytes(size) for size in SPANS.wire_sizes(1)]
    span.apply(Update(1, 0, 1, (Push(Voter("a", 2), 5, 1.0),), ()), payloads)
    assert [span.has(Voter("a", 2), 5), span.has(Voter("a", 1), 5)] == [1, 0]


def test_where_some_are_forgotten_it_is_not_said_of_an_unknown_one_that_none_of_its_pushes_counted() -> None:
    span = state(nesterov(asynchronous=True))
    known = [Counted(Voter(f"t{i}", 1), 1, 1) for i in range(COUNTED_MAX)]
    span.counted = {push.voter.peer: push for push in known[1:]}
    assert span.newest(Voter("x", 1)) == 0
    span.counted[known[0].voter.peer] = known[0]
    assert span.newest(Voter("x", 1)) == -1 and span.newest(known[0].voter) == 1


def test_what_cannot_be_applied_changes_nothing() -> None:
    span = state(nesterov())
    before = span.digest()
    sizes = SPANS.wire_sizes(1)
    payloads = [bytes(size) for size in sizes]
    for update, given in (
        (Update(2, 1, 1, (), ()), payloads),
        (Update(1, 1, 0, (), ()), payloads),
        (Update(1, 1, 1, (), ()), payloads[:-1]),
        (Update(1, 1, 1, (), ()), [payloads[0][:-1], *payloads[1:]]),
    ):
        with pytest.raises(ProtocolError):
            span.apply(update, given)
    for image in (b"", span.image()[:-1], state(nesterov(), span=0).image()):
        with pytest.raises(ProtocolError):
            SpanState.restored(SPANS, 1, span.optimizer, image)
    other = Optimizer("sgd", Sgd(), lambda t: 1.0)
    with pytest.raises(ProtocolError, match="under nesterov"):
        SpanState.restored(SPANS, 1, other, span.image())
    assert span.digest() == before


def test_an_empty_payload_leaves_its_chunk_as_it_is() -> None:
    span = state(nesterov())
    before = span.theta.clone()
    sizes = SPANS.wire_sizes(1)
    span.apply(Update(1, 1, 1, (), ()), [b"", *(SPANS.grid.coder.encode(torch.ones(s // 4)) for s in sizes[1:])])
    assert torch.equal(span.theta[:64], before[:64]) and not torch.equal(span.theta[64:], before[64:])


def test_an_update_of_a_round_that_cannot_follow_changes_nothing() -> None:
    """Of round 0 there is no learning rate: a standby that was offered one ended."""
    span = state(optimizer_of(OuterSpec(), ServerSpec()))
    payloads = [bytes(size) for size in SPANS.wire_sizes(1)]
    for made, steps in enumerate([(0, 1 + NUMBERS_AHEAD_MAX), (0, 1, 2 + NUMBERS_AHEAD_MAX)]):
        before = span.digest()
        for step in steps:
            with pytest.raises(ProtocolError, match=f"round {step} cannot follow round {made}"):
                span.apply(Update(made + 1, step, 1, (), ()), payloads)
        assert span.digest() == before
        move(span, torch.ones(span.theta.numel()))
    assert span.step == 2
    span.apply(Update(3, 2 + NUMBERS_AHEAD_MAX, 1, (), ()), payloads)
    assert span.step == 2 + NUMBERS_AHEAD_MAX, "rounds that were lost have no number here"
