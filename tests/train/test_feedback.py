"""Error feedback: nothing that encoding loses is lost for good, and nothing is counted that was not delivered."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
from dlc.comm.grid import Grid
from dlc.errors import CheckpointError
from dlc.flat import FlatView
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, OuterSpec, RunSpec
from dlc.train import saver, saves
from dlc.train.diloco import DiLoCo
from dlc.train.feedback import Feedback
from dlc.train.offers import Work
from dlc.train.outer_loop import OuterLoop
from dlc.train.outgoing import Outgoing
from tests.train.fake_peer import FakeCheckpoint, FakePeer
from tests.train.test_trainer import LLAMA, H, Run

each_codec = pytest.mark.parametrize("codec", ["int8", "int4"])
LIMITS = {"int8": 127, "int4": 7}


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def quantised(grid: Grid, v: Tensor) -> Tensor:
    parts = [v[slice(*grid.span(chunk))] for chunk in range(grid.n_chunks)]
    return torch.cat([grid.coder.decode(grid.coder.encode(part), part.numel()) for part in parts])


def noise(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the residual itself


@each_codec
def test_what_was_delivered_is_the_sum_of_all_but_the_last_residual(codec: str) -> None:
    grid = Grid(1000, 300, codec)
    feedback, sent, given = Feedback(grid), torch.zeros(1000).double(), torch.zeros(1000).double()
    plain = torch.zeros(1000).double()
    for t in range(50):
        d = noise(t, 1000) * 1e-3 + 1e-4
        v = feedback.added((d,))
        assert torch.equal(v, d + feedback.residual)
        delivered = quantised(grid, v)
        step = v.abs().max() / LIMITS[codec]
        feedback.over(v, (True,) * 4)
        sent, given, plain = sent + delivered, given + d, plain + quantised(grid, d)
        assert float(feedback.residual.abs().max()) <= 0.501 * step
        torch.testing.assert_close(sent + feedback.residual.double(), given, rtol=0, atol=50 * 2.0**-24 * 0.02)
    assert float((sent - given).abs().max()) <= 0.501 * step
    assert float((plain - given).abs().max()) > 2 * step, "without the residual the errors add up"


@each_codec
def test_a_chunk_that_was_left_out_keeps_its_residual(codec: str) -> None:
    grid = Grid(1000, 300, codec)
    feedback = Feedback(grid)
    feedback.over(feedback.added((noise(0, 1000),)), (True,) * 4)
    before = feedback.residual.clone()
    v = feedback.added((noise(1, 1000),))
    expected = v - quantised(grid, v)
    feedback.over(v, (True, False, True, False))
    for chunk, is_in in enumerate((True, False, True, False)):
        span = slice(*grid.span(chunk))
        assert torch.equal(feedback.residual[span], (expected if is_in else before)[span])
        assert not torch.equal(expected[span], before[span])


def test_an_offer_that_was_not_counted_changes_nothing_and_needs_no_new_memory() -> None:
    feedback = Feedback(Grid(600, 300, "int4"))
    feedback.over(feedback.added(noise(0, 600)), (True, True))
    before, d = feedback.residual.clone(), noise(1, 600)
    v = feedback.added((d,))
    first, place = v.clone(), v.data_ptr()
    feedback.over(v)
    assert torch.equal(feedback.residual, before)
    again = feedback.added((d,))
    assert torch.equal(again, first) and again.data_ptr() == place
    assert feedback.added((d,)).data_ptr() != place, "that of an offer which is still out is not used"


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.zeros(599), "another model"),
        (torch.zeros(600, dtype=torch.float64), "float64"),
        (torch.zeros(2, 300), "another model"),
        (torch.full((600,), float("nan")), "NaN"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(residual: Tensor, message: str) -> None:
    feedback = Feedback(Grid(600, 300, "int4"))
    feedback.over(feedback.added(noise(0, 600)), (True, True))
    before = feedback.residual.clone()
    with pytest.raises(CheckpointError, match=message):
        feedback.load(residual)
    assert torch.equal(feedback.residual, before)


def test_a_residual_is_copied_and_nothing_is_zero() -> None:
    feedback, saved = Feedback(Grid(600, 300, "int4")), noise(0, 600)
    feedback.load(saved)
    feedback.over(feedback.added(noise(1, 600)), (True, True))
    assert torch.equal(saved, noise(0, 600)) and not torch.equal(feedback.residual, saved)
    feedback.load(None)
    assert not feedback.residual.any()


# ------------------------------------------------------------------ what is sent


def test_what_is_sent_of_each_vector_of_a_channel_has_its_own_residual_in_it_and_in_its_norm() -> None:
    grid = Grid(600, 300, "int4")
    out = Outgoing(grid, 2, None, clips=True)
    for vector in range(2):
        out.over(out.whole(noise(vector, 600), vector)[0], (True, True), vector)
    assert out.residual is not None
    first, second = (part.clone() for part in out.residual.split(600))
    d = noise(2, 600)
    v, norm = out.whole(d, 1)
    assert torch.equal(v, d + second) and norm == pytest.approx(float(v.norm()), rel=1e-6)
    assert abs(float(v.norm()) - float(d.norm())) > 1e-3
    expected = v - quantised(grid, v)
    out.over(v, (True, True), 1)
    assert torch.equal(out.residual, torch.cat((first, expected)))


def test_the_norm_of_what_comes_part_by_part_is_that_of_all_and_tells_it_only_then() -> None:
    grid, d = Grid(600, 300, "fp32"), noise(0, 600)
    out = Outgoing(grid, 1, None, clips=True)
    assert out.announced() is None and Outgoing(grid, 1, None, clips=False).announced() is not None
    assert out.streamed(iter(d.split(300)))[1] == pytest.approx(float(d.norm()), rel=1e-6)


def test_a_hook_may_change_what_it_is_given() -> None:
    d = noise(0, 600)
    out = Outgoing(Grid(600, 300, "fp32"), 1, lambda d: d.mul_(0.5), clips=False)
    assert torch.equal(out.hooked(d), noise(0, 600) * 0.5) and torch.equal(d, noise(0, 600))
    strided = Outgoing(out.grid, 1, lambda d: torch.stack((d, d), 1).requires_grad_()[:, 0], clips=False).hooked(d)
    assert torch.equal(strided, d) and strided.is_contiguous() and not strided.requires_grad, "as a round takes it"


# ------------------------------------------------------------------ in the outer loop

NUMEL, CHUNK, LEASE = 40, 16, 64


class Model:
    """A vector that `step` moves, one block a step, and a peer whose rounds go through the codec."""

    def __init__(self, codec: str, dtype: torch.dtype = torch.float32) -> None:
        self.peer = FakePeer()
        self.peer.lossy = True
        self.model = nn.ParameterList(
            [nn.Parameter(noise(99, 24).to(torch.float32)), nn.Parameter(noise(98, NUMEL - 24).to(dtype))]
        )
        mean = OuterSpec(lr=1.0, momentum=0.0)
        self.loop = OuterLoop(self.peer, FlatView.of(self.model), channel="train", outer=mean)
        self.loop.open(codec=codec, chunk_elems=CHUNK, lease_len=LEASE)
        self.blocks: list[int] = []
        self.steps = 0

    def step(self) -> None:
        if self.loop.displaced:
            assert self.loop.resume(self.work)
        lease = self.loop.model.newest().lease
        assert lease is not None
        self.blocks = lease.take(len(self.blocks) + 1)[0]
        self.steps += 1
        change = noise(self.steps, NUMEL) * 2.0**-6
        with torch.no_grad():
            self.model[0].add_(change[:24])
            self.model[1].add_(change[24:])

    @property
    def work(self) -> Work:
        return Work(tuple(self.blocks), self.blocks[-1] + 1) if self.blocks else Work()

    def offer(self) -> bool:
        return self.loop.offer(float(len(self.blocks)), self.work)

    def settle(self) -> bool:
        while not self.loop.wait(0.0):
            pass
        offered = len(self.loop.offered.blocks)
        settled = self.loop.settle(self.work)
        self.blocks = self.blocks[offered:] if settled.counted else self.blocks if settled.kept else []
        return settled.counted

    @property
    def residual(self) -> Tensor:
        assert self.loop.outgoing.residual is not None
        return self.loop.outgoing.residual

    def local(self) -> Tensor:
        return FlatView.of(self.model).gather(torch.empty(NUMEL))


def test_other_codecs_keep_nothing() -> None:
    m = Model("fp16")
    m.step()
    assert m.offer() and m.settle() and m.loop.outgoing.residual is None


@each_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_theta_is_the_sum_of_all_steps_but_for_the_residual(codec: str, dtype: torch.dtype) -> None:
    """Offers are missed, dropped and grown, steps go on meanwhile: each step still arrives, and arrives once."""
    m = Model(codec, dtype)
    start, moved, others = m.peer.theta(), torch.zeros(NUMEL), 0.0
    m.peer.misses = ["late", "", "dropped", "", "", "late"]
    m.peer.slices = [0, 2, 1] * 6
    for t in range(16):
        m.peer.planned = t % 3 == 0
        before = m.local()
        m.step()
        moved += m.local() - before
        assert m.offer()
        if t % 2:
            before = m.local()
            m.step()
            moved += m.local() - before
            assert m.loop.grow(float(len(m.blocks)), m.work)
        if t % 5 == 2:
            m.peer.pass_round(torch.full((NUMEL,), -0.25))
            others += 0.25
        m.settle()
        if m.loop.displaced:
            assert m.loop.resume(m.work)
    m.peer.misses, m.peer.slices = [], []
    while m.blocks:
        assert m.offer()
        m.settle()
    assert m.residual.any() and m.peer.state.t > 10
    # theta - start is minus the sum of what was delivered, and that is minus (moved + residual).
    rounding = 1e-5 if dtype == torch.float32 else 0.02 * 22
    torch.testing.assert_close(m.peer.theta() - m.residual, start + moved + others, rtol=0.0, atol=rounding)


@each_codec
def test_what_is_offered_is_d_and_the_residual_and_rest_is_without_it(codec: str) -> None:
    m = Model(codec)
    m.step()
    before = m.local()
    base = m.peer.theta()
    assert m.offer() and m.settle()
    assert torch.equal(m.peer.vectors[0], base - before)
    e = m.residual.clone()
    assert e.any() and torch.equal(e, m.peer.vectors[0] - quantised(m.peer.grid, m.peer.vectors[0]))
    assert torch.equal(m.local(), m.peer.theta()), "the residual is no part of the model"
    m.step()
    d = m.peer.theta() - m.local()
    m.peer.slices = [1]
    assert m.offer()
    m.step()
    rest = base_less(m, d)
    assert m.settle()
    assert torch.equal(m.peer.vectors[1], d + e)
    torch.testing.assert_close(m.peer.theta() - m.local(), rest, rtol=0, atol=1e-6)


def base_less(m: Model, d: Tensor) -> Tensor:
    """What was trained beyond d."""
    return m.peer.theta() - m.local() - d


@each_codec
@pytest.mark.parametrize("miss", ["late", "dropped", "refused: not finite"])
def test_a_miss_leaves_the_residual_alone(codec: str, miss: str) -> None:
    m = Model(codec)
    m.step()
    assert m.offer() and m.settle()
    before = m.residual.clone()
    m.peer.misses = [miss]  # a round that was committed has one chunk of ours nevertheless
    m.step()
    assert m.offer() and not m.settle()
    assert torch.equal(m.residual, before)
    if m.blocks:
        assert m.offer() and m.settle()
        assert torch.equal(m.peer.vectors[1], m.peer.vectors[2]), "offered again bit for bit"
        assert not torch.equal(m.residual, before)


@each_codec
def test_a_chunk_that_went_without_us_keeps_its_residual(codec: str) -> None:
    m = Model(codec)
    m.step()
    assert m.offer() and m.settle()
    before = m.residual.clone()
    m.peer.left_out = {1}
    m.step()
    assert m.offer() and m.settle()
    assert torch.equal(m.residual[16:32], before[16:32])
    assert not torch.equal(m.residual[:16], before[:16]) and not torch.equal(m.residual[32:], before[32:])


def test_an_offer_that_grows_needs_no_new_memory() -> None:
    m = Model("int4")
    m.peer.planned, m.peer.slices = False, [9, 0]
    m.step()
    assert m.offer() and m.loop._offer is not None
    place = m.loop._offer.sent.data_ptr()
    m.step()
    assert m.loop.grow(2.0, m.work) and m.loop._offer.sent.data_ptr() == place
    assert m.settle() and torch.equal(m.peer.vectors[1], m.peer.counted[0])


def test_what_is_given_up_stays_as_it_is_while_the_peer_may_still_send_it() -> None:
    m = Model("int4")
    m.step()
    assert m.offer() and m.settle()
    m.step()
    assert m.offer()
    out, frozen = m.loop._offer, m.peer.vectors[1]
    assert out is not None
    m.loop.give_up()
    m.peer._pending, m.blocks = None, []
    m.step()
    assert m.offer() and m.settle()
    assert torch.equal(out.sent, frozen)


# ------------------------------------------------------------------ checkpoints


def spec_of(folder: Path, codec: str) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    return RunSpec(
        rounds=3,
        sync_every=H,
        codec=codec,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16),
        inner=InnerSpec(batch_size=2, accumulate=2, warmup_steps=1),
    )


def lossy(spec: RunSpec) -> FakePeer:
    peer = FakePeer(spec)
    peer.lossy = True
    return peer


@each_codec
def test_a_checkpoint_brings_the_residual_back_bit_for_bit(tmp_path: Path, codec: str) -> None:
    spec = spec_of(tmp_path, codec)
    run = Run(lossy(spec), tmp_path / "state", checkpoint_every=1)
    run.go()
    kept = run.trainer.strategy.local().residual
    saved = saves.newest(tmp_path / "state", spec)
    assert kept is not None and kept.any() and saved is not None and saved.residual is not None
    assert saved.t == 3 and torch.equal(saved.residual, kept)
    again = Run(lossy(spec), tmp_path / "other", resume=saved)
    again.peer.start_t = saved.t
    again.go()
    assert torch.equal(again.trainer.strategy.local().residual, kept)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_residual_starts_at_zero(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "fp16")
    Run(lossy(spec), tmp_path / "state").go()
    saved = saves.newest(tmp_path / "state", spec)
    assert saved is not None and saved.residual is None


def test_a_checkpoint_is_of_the_moment_at_which_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, changed, write = spec_of(tmp_path, "int8"), threading.Event(), saver.save_checkpoint

    def late(*args: Any) -> None:
        assert changed.wait(120)
        write(*args)

    monkeypatch.setattr(saver, "save_checkpoint", late)
    residual, writer = noise(0, 5), saver.Saver(tmp_path / "state", spec, {})
    writer.start(FakeCheckpoint(b"the log", 1, 2.0, b"digest", memoryview(b"image")), saves.Local({}, residual))
    residual.zero_()  # as the next round would
    changed.set()
    writer.finish()
    saved = saves.newest(tmp_path / "state", spec)
    assert saved is not None and saved.residual is not None and torch.equal(saved.residual, noise(0, 5))


def test_what_somebody_keeps_beside_the_checkpoints_is_left_alone(tmp_path: Path) -> None:
    spec, state = spec_of(tmp_path, "int8"), tmp_path / "state"
    writer, folder = saver.Saver(state, spec, {}, kept=1), saves.folder_of(state, spec)

    def save(t: int) -> None:
        writer.save(FakeCheckpoint(b"the log", t, 2.0, b"digest", memoryview(b"image")), saves.Local({}))

    save(9)
    kept = [folder / f"{name}.safetensors" for name in ("best", "t-00000009-good", "v1")]
    for copy in kept:
        shutil.copy(folder / saves.name_of(9), copy)
    save(10)
    save(7)  # of a history that has won
    assert sorted(folder.iterdir()) == sorted([*kept, folder / saves.name_of(7)])
    found = saves.newest(state, spec)
    assert found is not None and found.t == 7


def test_a_residual_of_another_model_is_refused_before_a_seat_is_taken(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "int4")
    Run(lossy(spec), tmp_path / "state").go()
    saved = saves.newest(tmp_path / "state", spec)
    assert saved is not None and saved.residual is not None
    run = Run(lossy(spec), tmp_path / "other", resume=saved.__class__(**{**vars(saved), "residual": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"residual.*\(3,\).*another model"):
        run.go()
    assert not hasattr(run.peer, "state"), "the channel was not opened"


# ------------------------------------------------------------------ the library's DiLoCo, and what it is good for


class Quadratic(nn.Module):
    """A bowl in two parameters of different dtypes, with its minimum at `target`. Each hundredth gradient is loud, and
    nothing but noise: those of its block are a small part of one step of int4."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(600)), nn.Parameter(torch.zeros(100, dtype=dtype))
        self.target = noise(5, 700) * 0.02
        self.loud = torch.arange(700) % 100 == 0
        self.calls = 0

    def forward(self) -> Tensor:
        self.calls += 1
        x = torch.cat([self.a, self.b.float()])
        return (x - self.target).square().sum() / 2 + (x * noise(self.calls, 700).sign())[self.loud].sum()

    def loss(self) -> float:
        """Of the quiet ones."""
        x = torch.cat([self.a, self.b.float()]).detach()
        return float((x - self.target)[~self.loud].square().sum())


def trained(codec: str, rounds: int, keep: bool = True, dtype: torch.dtype = torch.float32) -> float:
    """The share of the loss that is left after so many rounds of two inner steps."""
    model, peer = Quadratic(dtype), FakePeer()
    peer.lossy = True
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    opt = DiLoCo(model, inner, peer, 2, outer=OuterSpec(momentum=0.5), codec=codec, chunk_elems=350)
    for _ in range(2 * rounds):
        model().backward()
        opt.step()
        opt.zero_grad()
        if not keep:
            opt._outer.outgoing.load_residual(None)
    return model.loss() / Quadratic().loss()


def test_int4_learns_with_feedback_what_it_does_not_learn_without() -> None:
    exact, kept, lost = trained("fp32", 60), trained("int4", 60), trained("int4", 60, keep=False)
    assert exact < 1e-6 and kept < 0.05 and lost > 0.2


@each_codec
def test_a_model_of_mixed_dtypes(codec: str) -> None:
    assert trained(codec, 60, dtype=torch.bfloat16) < 0.1


@each_codec
def test_a_state_dict_goes_on_as_if_nothing_had_been(codec: str) -> None:
    def one(opt: DiLoCo, model: Quadratic) -> None:
        model().backward()
        opt.step()
        opt.zero_grad()

    def build(peer: FakePeer) -> tuple[DiLoCo, Quadratic]:
        peer.lossy = True
        model = Quadratic()
        return DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, 1, codec=codec), model

    opt, model = build(FakePeer())
    for _ in range(3):
        one(opt, model)
    state = opt.state_dict()
    assert state["residual"].any()
    image = opt._outer.state.export()

    class Swarm(FakePeer):
        def open(self, channel, state, **grid):  # type: ignore[no-untyped-def]
            state.restore(image)
            return super().open(channel, state, **grid)

    other, other_model = build(Swarm())
    other_model.calls = model.calls
    other.load_state_dict(state)
    one(other, other_model)
    one(opt, model)
    assert torch.equal(other_model.a, model.a) and torch.equal(other_model.b, model.b)
    assert torch.equal(other.state_dict()["residual"], opt.state_dict()["residual"])
    other.load_state_dict({k: v for k, v in state.items() if k != "residual"})
    assert not other.state_dict()["residual"].any(), "a state of a version that had none"
    with pytest.raises(CheckpointError, match="another model"):
        other.load_state_dict({**state, "residual": torch.zeros(9)})
