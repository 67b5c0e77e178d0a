"""A model cut into fragments: every element is in one, and each of them is trained as if it were alone."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
from dlc.errors import CheckpointError, ConfigError
from dlc.flat import FlatView
from dlc.runspec import OuterSpec
from dlc.train.diloco import DiLoCo
from dlc.train.fragments import Fragments, Span
from dlc.train.offers import Work
from dlc.train.outer import OuterState
from dlc.train.outer_loop import OuterLoop
from tests.train.fake_peer import FakePeer

STEP = 2.0**-6
"""What an inner step here adds to each parameter: sums of it are exact in fp32."""


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def spans_of(fragments: Fragments, p: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b, _ in fragments.pieces(p)]


def test_fragments_hold_strided_layers() -> None:
    layers = [(f"model.layers.{i}.{name}", 4) for i in range(4) for name in ("attn.weight", "mlp.weight")]
    fragments = Fragments.strided(layers, 2)
    assert spans_of(fragments, 0) == [(0, 8), (16, 24)] and spans_of(fragments, 1) == [(8, 16), (24, 32)]
    assert [fragments.of_round(t) for t in range(1, 6)] == [0, 1, 0, 1, 0]
    assert [fragments.turn(t) for t in range(1, 6)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_each_element_is_in_one_fragment_of_equal_length(k: int) -> None:
    rng = random.Random(k)
    tensors = [("embed", 301)] + [(f"h.{i}.w", rng.randint(1, 90)) for i in range(9)] + [("head.bias", 3)]
    fragments = Fragments.strided(tensors, k)
    numel = sum(size for _, size in tensors)
    seen = [i for p in range(k) for a, b in spans_of(fragments, p) for i in range(a, b)]
    assert sorted(seen) == list(range(numel)) and len(fragments) == k
    assert fragments.packed_numel == -(-numel // k)
    flat, back = torch.randn(numel), torch.zeros(numel)
    for p in range(k):
        packed = fragments.take(flat, p)
        assert packed.shape == (fragments.packed_numel,)
        fragments.put(packed, p, back)
    assert torch.equal(flat, back)
    for p, (start, stop) in itertools.product(range(k), [(0, 7), (5, 60), (60, fragments.packed_numel)]):
        part = torch.cat([flat[a:b] for a, b, _ in fragments.pieces(p, start, stop)] or [torch.empty(0)])
        assert torch.equal(part, fragments.take(flat, p)[start : start + len(part)])


def test_what_fills_up_the_last_fragment_is_zero_in_whatever_memory() -> None:
    """It is sent and averaged like the rest, and counts in the norm that is told."""
    fragments, flat = Fragments.strided([("a.0.w", 5), ("a.1.w", 4)], 2), torch.ones(9)
    for p, own in enumerate((5, 4)):
        out = torch.full((5,), float("nan"))
        assert fragments.take(flat, p, out) is out and out.tolist() == [1.0] * own + [0.0] * (5 - own)


def test_the_fingerprint_tells_in_which_fragment_each_span_is() -> None:
    a, b, c = Span(0, 4), Span(8, 12), Span(4, 8)
    ways = [[a], [b], [c]], [[a, b], [c]], [[a], [b, c]], [[a], [c], [b]]
    assert len({Fragments(way).fingerprint for way in ways} | {bytes(8)}) == len(ways) + 1
    assert Fragments([[a, b, c]]).fingerprint == bytes(8)


def test_too_many_fragments_are_refused() -> None:
    for size, k in ((3, 4), (5, 4), (9, 0)):
        with pytest.raises(ConfigError, match="cannot be cut"):
            Fragments.strided([("w", size)], k)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_fragment_moves_as_a_model_of_its_own(optimizer: str) -> None:
    """Moments, warm-up and bias correction are those of its own rounds; bits, not only values, are equal."""
    spec = OuterSpec(optimizer=optimizer, warmup_rounds=2)
    fragments = Fragments([[Span(0, 30), Span(70, 90)], [Span(30, 70), Span(90, 99)]])
    theta = torch.randn(99)
    state = OuterState(theta, spec, fragments=fragments, slice_elements=16)
    alone = [OuterState(fragments.take(theta, p)[: 50 - p].clone(), spec) for p in range(2)]
    for t in range(1, 8):
        p, mean = fragments.of_round(t), torch.randn(50)
        cuts = [(0, 20, mean[:20]), (20, 35, None), (35, 50, mean[35:])]
        state.step(t, cuts)
        stop = 50 - p
        alone[p].step(fragments.turn(t), [(0, 20, mean[:20]), (20, 35, None), (35, stop, mean[35:stop])])
    out = torch.empty(99)
    assert state.read(out) == 7
    for p in range(2):
        own = torch.empty(50 - p)
        alone[p].read(own)
        assert torch.equal(fragments.take(out, p)[: 50 - p], own)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_foreseen_round_is_the_one_that_comes_and_changes_nothing(optimizer: str) -> None:
    spec = OuterSpec(optimizer=optimizer, warmup_rounds=2)
    fragments = Fragments([[Span(0, 20), Span(30, 40)], [Span(20, 30), Span(40, 60)]])
    state = OuterState(torch.randn(60), spec, fragments=fragments, slice_elements=7)
    for t in range(1, 6):
        mean, ahead, after = torch.randn(30), torch.empty(30), torch.empty(60)
        before = state.digest()
        assert state.foresee(t, mean, ahead) and state.digest() == before
        assert not state.foresee(t + 1, mean, torch.empty(30))
        state.step(t, [(0, 30, mean)])
        state.read(after)
        assert torch.equal(fragments.take(after, fragments.of_round(t)), ahead)


def test_who_foresees_a_round_lets_others_at_the_state_meanwhile() -> None:
    """A donor's driver waited for the whole vector, and answered nobody."""
    state = OuterState(torch.randn(60), OuterSpec(), slice_elements=7)
    lock, held = state._lock, list[int]()

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()
            held.append(0)

        def __exit__(self, *exc: object) -> None:
            lock.release()

    rule = state._rule

    def counted(*args: Any) -> None:
        held[-1] += args[2].numel()
        rule.apply(*args)

    state._lock = Lock()  # type: ignore[assignment]
    state._rule = SimpleNamespace(apply=counted)  # type: ignore[assignment]
    assert state.foresee(1, torch.randn(60), torch.empty(60))
    assert sum(held) == 60 and max(held) == 7

    def overtaken(*args: Any) -> None:
        rule.apply(*args)
        state._t = 1

    state._rule = SimpleNamespace(apply=overtaken)  # type: ignore[assignment]
    assert not state.foresee(1, torch.randn(60), torch.empty(60)), "a round came in between"


def test_an_image_of_other_fragments_is_refused() -> None:
    two, three = (Fragments.strided([(f"h.{i}.w", 6) for i in range(6)], k) for k in (2, 3))
    state = OuterState(torch.randn(36), OuterSpec(), fragments=two)
    other = OuterState(torch.zeros(36), OuterSpec(), fragments=three)
    with pytest.raises(CheckpointError, match="fragments"):
        other.restore(state.export())
    same = OuterState(torch.zeros(36), OuterSpec(), fragments=two)
    same.restore(state.export())
    assert same.digest() == state.digest()


class Model:
    """The local parameters are the start, STEP for each step, and what others' rounds brought, whatever happens."""

    def __init__(self, dtype: torch.dtype, fragments: int, eager: bool) -> None:
        self.peer = FakePeer()
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).to(dtype)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        self.view, mean = FlatView.of(self.model), OuterSpec(lr=1.0, momentum=0.0)
        self.loop = OuterLoop(
            self.peer,
            self.view,
            channel="train",
            outer=mean,
            fragments=fragments,
            overlap="eager" if eager else "delayed",
        )
        self.loop.open(codec="fp32", chunk_elems=8, lease_len=256)
        self.fragments = self.loop.state.fragments
        self.expected = torch.ones(self.view.numel)
        self.blocks: list[int] = []

    def step(self) -> None:
        if self.loop.displaced:
            assert self.loop.resume(self.work)
        lease = self.loop.model.newest().lease
        assert lease is not None
        self.blocks = lease.take(len(self.blocks) + 1)[0]
        self.expected += STEP
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(STEP)

    @property
    def work(self) -> Work:
        return Work(tuple(self.blocks), self.blocks[-1] + 1) if self.blocks else Work()

    def others_round(self) -> None:
        moved = self.fragments.of_round(self.peer.state.t + 1)
        self.peer.pass_round(torch.full((self.peer.state.numel,), -0.25))  # lr 1: theta grows by it
        for a, b, _ in self.fragments.pieces(moved):
            self.expected[a:b] += 0.25

    def settle(self) -> bool:
        while not self.loop.wait(0.0):
            pass
        offered = len(self.loop.offered.blocks)
        settled = self.loop.settle(self.work)
        assert settled.kept
        if settled.counted:
            self.blocks = self.blocks[offered:]
        return settled.counted

    def local(self) -> Tensor:
        if self.loop.displaced:
            assert self.loop.resume(self.work)
        return self.view.gather(torch.empty(self.view.numel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fragments", "eager"), [(1, True), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("seed", range(4))
def test_each_step_is_counted_once_in_each_fragment_whatever_happens(
    seed: int, fragments: int, eager: bool, dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    m = Model(dtype, fragments, eager)
    steps = 0
    for _ in range(25):
        for _ in range(rng.randint(0, 3)):
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
        if rng.random() < 0.2:
            m.peer.on_contribute = m.others_round
        assert m.loop.offer(float(len(m.blocks)), m.work)
        m.peer.on_contribute = lambda: None
        for _ in range(rng.randint(0, 3)):
            m.step()
            steps += 1
            if rng.random() < 0.3:
                assert m.loop.grow(float(len(m.blocks)), m.work)
        m.settle()
    m.peer.misses, m.peer.slices = [], []
    for _ in range(fragments):
        m.step()
        steps += 1
        while m.blocks:
            assert m.loop.offer(float(len(m.blocks)), m.work)
            m.settle()
    rounding = 1e-5 if dtype == torch.float32 else 2.0**-7 * steps  # of a step at a bf16 number near 2
    torch.testing.assert_close(m.local(), m.expected, rtol=0.0, atol=rounding)
    last = m.fragments.of_round(m.peer.state.t)
    theta, expected = (m.fragments.take(flat, last) for flat in (m.peer.theta(), m.expected))
    torch.testing.assert_close(theta, expected, rtol=0.0, atol=rounding)
    assert sum(m.peer.weights) >= steps and m.peer.state.t > fragments


def test_refreshing_keeps_what_has_not_had_its_turn() -> None:
    """All blocks are counted, but two thirds of what they taught are in no round yet when another one passes."""
    m = Model(torch.float32, 3, False)
    m.step()
    assert m.loop.offer(1.0, m.work) and m.settle() and not m.blocks
    m.others_round()
    m.loop.refresh()
    torch.testing.assert_close(m.local(), m.expected, rtol=0.0, atol=1e-6)


def test_diloco_exchanges_one_fragment_after_the_other() -> None:
    peer = FakePeer()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    view = FlatView.of(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = DiLoCo(model, inner, peer, 4, outer=OuterSpec(lr=1.0, momentum=0.0), codec="fp32", fragments=2)
    start = view.gather(torch.empty(view.numel))
    reports = []
    for _ in range(8):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        reports.append(opt.step())
    assert [report.t if report else None for report in reports] == [None, 1, None, 2, None, 3, None, 4]
    assert [vector[0].item() for vector in peer.vectors] == pytest.approx([2.0, 4.0, 4.0, 4.0])
    moved = start - peer.theta()
    torch.testing.assert_close(moved, torch.tensor([6.0] * 12 + [8.0] * 12))
    opt.finish()
    assert torch.equal(view.gather(torch.empty(view.numel)), peer.theta())


def test_sync_every_is_a_multiple_of_the_fragments() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="multiple of fragments"):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), FakePeer(), 5, fragments=2)


def test_what_int4_loses_of_a_fragment_comes_back_with_its_next_turn() -> None:
    torch.manual_seed(0)
    peer = FakePeer()
    peer.lossy = True
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    view = FlatView.of(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = DiLoCo(model, inner, peer, 2, outer=OuterSpec(lr=1.0, momentum=0.0), codec="int4", fragments=2)
    start = view.gather(torch.empty(view.numel))
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    rounds = 40
    for _ in range(rounds):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        opt.step()
    whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
    # Of a fragment's last turn at most half a step of the grid is lost, and what came after it is not in yet.
    lost = (whole * rounds - (start - peer.theta())).abs().max()
    assert lost <= float(whole.abs().max()) * (1.0 + 2.5 / 7)
    residual = opt.state_dict()["residual"]
    assert residual.shape == (view.numel,) and bool(residual.any())
