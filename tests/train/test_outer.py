import dataclasses
import math
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor, nn

from dlc.errors import CheckpointError, ConfigError, DlcError, UsageError
from dlc.flat import Layout
from dlc.runspec import OuterSpec
from dlc.train.outer import OuterState, pseudo_gradient
from dlc.train.outer_step import half_cosine, outer_lr, power

N = 1003


def vector(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def whole(g: Tensor) -> list[tuple[int, int, Tensor | None]]:
    return [(0, len(g), g)]


def cut(g: Tensor, *bounds: int) -> list[tuple[int, int, Tensor | None]]:
    edges = [0, *bounds, len(g)]
    return [(a, b, g[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def theta_of(state: OuterState) -> Tensor:
    out = torch.empty(state.numel)
    state.read(out)
    return out


NESTEROV = OuterSpec(lr=0.7, momentum=0.9)
SGD = OuterSpec(optimizer="sgd", lr=0.5, schedule="linear", warmup_rounds=2, total_rounds=9)
ADAM = OuterSpec(optimizer="adam", lr=0.3, schedule="cosine", warmup_rounds=2, total_rounds=9)
each_optimizer = pytest.mark.parametrize("spec", [NESTEROV, SGD, ADAM], ids=lambda spec: spec.optimizer)


def moved(steps: int = 3, spec: OuterSpec = NESTEROV, slice_elements: int = 4096) -> OuterState:
    state = OuterState(vector(0), spec, slice_elements=slice_elements)
    for t in range(1, steps + 1):
        state.step(t, whole(vector(t)))
    return state


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.0)])
def test_follows_torch_sgd_nesterov(lr: float, momentum: float) -> None:
    state = OuterState(vector(0), OuterSpec(lr=lr, momentum=momentum))
    p = nn.Parameter(vector(0))
    oracle = torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for t in range(1, 101):
        p.grad = vector(t)
        oracle.step()
        state.step(t, whole(vector(t)))
    torch.testing.assert_close(theta_of(state), p.detach(), rtol=1e-5, atol=1e-5)
    assert state.t == 100


def test_sgd_and_adam_follow_torch() -> None:
    """Adam's eps is small here, where the order of its operations matters most."""
    sgd, adam = OuterSpec(optimizer="sgd", lr=0.3), OuterSpec(optimizer="adam", lr=0.01, betas=(0.9, 0.95), eps=1e-6)
    for spec in (sgd, adam):
        state, p = OuterState(vector(0), spec), nn.Parameter(vector(0))
        oracle: torch.optim.Optimizer = torch.optim.SGD([p], lr=0.3)
        if spec is adam:
            oracle = torch.optim.Adam([p], lr=0.01, betas=(0.9, 0.95), eps=1e-6)
        for t in range(1, 101):
            p.grad = vector(t)
            oracle.step()
            state.step(t, whole(vector(t)))
        torch.testing.assert_close(theta_of(state), p.detach(), rtol=1e-5, atol=1e-5)


def test_adam_rounds_every_operation_on_its_own() -> None:
    """One float32 operation at a time, and the root by way of float64, where rounding twice is as rounding once."""
    spec = OuterSpec(optimizer="adam", lr=0.3, betas=(0.9, 0.95), eps=0.1)
    f = np.float32
    theta, m, v = vector(0).numpy().copy(), np.zeros(N, f), np.zeros(N, f)
    b1, b2, c1, c2, eps = f(0.9), f(0.95), f(1 - 0.9), f(1 - 0.95), f(0.1)
    for t in range(1, 6):
        g = vector(t).numpy()
        m = (m * b1) + (g * c1)
        v = (v * b2) + ((g * g) * c2)
        root = np.sqrt(v.astype(np.float64)).astype(f) * f(1.0 / math.sqrt(1.0 - power(0.95, t)))
        theta = theta - (m / (root + eps)) * f(0.3 / (1.0 - power(0.9, t)))
    assert {a.dtype for a in (theta, m, v)} == {np.dtype(f)}
    assert theta_of(moved(5, spec)).numpy().tobytes() == theta.tobytes()


def test_the_schedule_of_the_outer_step() -> None:
    def rates(schedule: str) -> list[float]:
        spec = OuterSpec(lr=0.8, schedule=schedule, warmup_rounds=4, total_rounds=24, min_lr_ratio=0.25)
        return [outer_lr(spec, t) for t in (1, 4, 5, 15, 25, 10**6)]

    assert rates("constant") == [0.2, 0.8, 0.8, 0.8, 0.8, 0.8]
    assert rates("linear") == pytest.approx([0.2, 0.8, 0.8, 0.5, 0.2, 0.2])
    assert rates("cosine") == pytest.approx([0.2, 0.8, 0.8, 0.5, 0.2, 0.2])
    for k in range(1001):
        assert half_cosine(k / 1000) == pytest.approx(0.5 * (1 + math.cos(math.pi * k / 1000)), abs=1e-15)
    assert [power(0.9, t) for t in (0, 1, 2, 1000)] == pytest.approx([1, 0.9, 0.81, 0.9**1000], rel=1e-12)


def test_the_rate_of_the_round_is_what_moves_theta() -> None:
    state = OuterState(torch.zeros(3), OuterSpec(optimizer="sgd", lr=1.0, warmup_rounds=4))
    moves = []
    for t in (1, 2, 3, 4, 9):
        before = theta_of(state)
        state.step(t, whole(torch.ones(3)))
        moves.append(float((before - theta_of(state))[0]))
    assert moves == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outer\.total_rounds"):
        OuterState(vector(0), OuterSpec(schedule="cosine"))


def test_every_operation_is_rounded_on_its_own() -> None:
    """The exact bits, one float32 operation at a time: a fused multiply-add would differ in some of the elements."""
    lr, mu = np.float32(0.7), np.float32(0.9)
    theta, m = vector(0).numpy().copy(), np.zeros(N, np.float32)
    for t in range(1, 6):
        g = vector(t).numpy()
        m = (m * mu).astype(np.float32) + g
        theta = theta - ((m * mu).astype(np.float32) + g).astype(np.float32) * lr
    assert theta.dtype == np.float32
    assert theta_of(moved(5)).numpy().tobytes() == theta.tobytes()


@each_optimizer
@pytest.mark.parametrize("slice_elements", [1, 7, 64, 1000, 4096])
def test_slices_and_chunks_do_not_change_a_bit(slice_elements: int, spec: OuterSpec) -> None:
    state = OuterState(vector(0), spec, slice_elements=slice_elements)
    state.step(1, cut(vector(1), 1, 2, 333))
    state.step(2, cut(vector(2), 500, 500))
    state.step(3, whole(vector(3)))
    assert state.digest() == moved(3, spec).digest()


def test_nobody_contributed_means_unchanged() -> None:
    state, before = moved(3), theta_of(moved(3))
    state.step(4, [(0, 100, vector(4)[:100]), (100, 300, None), (300, 400, vector(4)[300:400])])
    after, full = theta_of(state), theta_of(moved(4))
    assert torch.equal(after[100:300], before[100:300]) and torch.equal(after[400:], before[400:])
    assert torch.equal(after[:100], full[:100]) and torch.equal(after[300:400], full[300:400])
    other = moved(3)  # momentum was left alone too: the next step is as if round 4 had not been there
    other.step(5, whole(vector(5)))
    state.step(5, whole(vector(5)))
    assert torch.equal(theta_of(state)[100:300], theta_of(other)[100:300])
    assert state.t == 5


def test_digest_covers_everything() -> None:
    base = moved(2).digest()
    assert len(base) == 32 and base == moved(2).digest()
    same_theta = OuterState(theta_of(moved(2)), OuterSpec(lr=0.7, momentum=0.9), t=2)  # momentum is zero here
    later = moved(2)
    later.step(3, [])
    config = [OuterState(vector(0), OuterSpec(lr=lr, momentum=mu)) for lr, mu in ((0.7, 0.9), (0.6, 0.9), (0.7, 0.8))]
    assert len({base, same_theta.digest(), later.digest(), *(s.digest() for s in config)}) == 6


def test_large_digest_uses_threads_and_agrees() -> None:
    state = OuterState(torch.zeros(3 * 2**20), OuterSpec(lr=0.7, momentum=0.9))
    assert state.digest() == blake3(bytes(state.export())).digest()


@each_optimizer
def test_export_is_frozen_and_restores(spec: OuterSpec) -> None:
    state = moved(3, spec)
    image, digest = state.export(), state.digest()
    per_parameter = {"sgd": 4, "nesterov": 8, "adam": 12}[spec.optimizer]
    assert image.readonly and image.nbytes == state.image_bytes() == 128 + per_parameter * N
    copied = bytearray(image.nbytes)
    for start in range(0, len(copied), 1000):
        state.copy_image(start, memoryview(copied)[start : start + 1000])
    assert bytes(image) == copied and blake3(image).digest() == digest
    state.step(4, whole(vector(4)))
    other = OuterState(vector(9), spec)
    other.restore(image)
    assert (other.t, other.digest()) == (3, digest)
    other.step(4, whole(vector(4)))
    assert other.digest() == state.digest()
    state.restore(bytes(image))
    assert state.digest() == digest
    state.restore(memoryview(copied))  # it is the state's own memory from now on
    for t in range(4, 13):
        state.step(t, whole(vector(t)))
    assert state.digest() == moved(12, spec).digest()


def test_restore_refuses_and_changes_nothing() -> None:
    state = moved(3)
    image, digest = bytes(state.export()), state.digest()
    wrong_numel = bytearray(image)
    struct.pack_into("<Q", wrong_numel, 24, N + 1)
    bad = [
        image[:-1],
        image + b"\0",
        b"",
        b"X" + image[1:],
        bytes(wrong_numel),
        bytes(OuterState(vector(0), OuterSpec(lr=0.5, momentum=0.9)).export()),
    ]
    for b in bad:
        with pytest.raises(CheckpointError):
            state.restore(b)
    assert state.digest() == digest


def test_an_image_of_another_outer_step_is_refused_by_name() -> None:
    image = moved(3, SGD).export()
    with pytest.raises(CheckpointError, match=r"optimizer 'sgd', here 'nesterov'.*lr 0\.5, here 0\.7"):
        moved(1).restore(image)
    for changed in ({"warmup_rounds": 3}, {"total_rounds": 10}, {"min_lr_ratio": 0.2}, {"schedule": "cosine"}):
        with pytest.raises(CheckpointError, match=next(iter(changed))):
            moved(1, dataclasses.replace(SGD, **changed)).restore(image)
    for changed in ({"betas": (0.8, 0.95)}, {"betas": (0.9, 0.9)}, {"eps": 0.2}):
        assert moved(0, dataclasses.replace(ADAM, **changed)).digest() != moved(0, ADAM).digest()


@each_optimizer
def test_an_empty_channel_works(spec: OuterSpec) -> None:
    state = OuterState(torch.empty(0), spec)
    state.step(1, [])
    other = OuterState(torch.empty(0), spec)
    other.restore(state.export())
    assert other.digest() == state.digest()


@pytest.mark.parametrize(
    "means",
    [
        [(0, N + 1, torch.zeros(N + 1))],
        [(0, 5, torch.zeros(4))],
        [(0, 5, torch.zeros(5).double())],
        [(0, 5, torch.zeros(5)), (4, 6, torch.zeros(2))],
        [(-1, 2, torch.zeros(3))],
    ],
)
def test_a_step_that_fails_leaves_a_torn_state_that_nobody_reads(means: list[tuple[int, int, Tensor | None]]) -> None:
    state = moved(3)
    image = state.export()
    with pytest.raises(UsageError):
        state.step(4, means)
    for use in (state.digest, state.export, lambda: theta_of(state), lambda: state.step(4, [])):
        with pytest.raises(DlcError, match="torn"):
            use()
    state.restore(image)
    assert state.digest() == moved(3).digest()


@each_optimizer
def test_moments_are_loaded_as_copies_before_the_first_round_only(spec: OuterSpec) -> None:
    """And so are the vectors that tell them: what a caller holds is neither moved by a step, nor moves the state."""
    state = moved(0, spec)
    given = [vector(5 + i).abs() for i in range(state.image_bytes() // (4 * N) - 1)]
    kept = [moment.clone() for moment in given]
    state.load_moments(given)
    t, (_, *told) = state.vectors()
    assert t == 0 and all(map(torch.equal, told, kept)) and len(told) == len(kept)
    state.step(1, whole(vector(1)))
    assert all(map(torch.equal, given, kept)) and all(map(torch.equal, told, kept))
    assert not any(map(torch.equal, state.vectors()[1][1:], kept))
    digest = state.digest()
    with pytest.raises(UsageError, match="after 1 rounds"):
        state.load_moments(given)
    with pytest.raises(UsageError, match="can be loaded"):
        moved(0, spec).load_moments([*given, vector(9)])
    assert state.digest() == digest


def test_a_state_that_did_not_know_its_layout_has_that_of_the_image_and_so_its_digest() -> None:
    known = OuterState(vector(0), NESTEROV, layout=Layout(b"s" * 8, b"n" * 8))
    state = OuterState(vector(1), NESTEROV)
    state.restore(known.export())
    assert state.digest() == known.digest()
    with pytest.raises(CheckpointError, match="in other shapes"):
        OuterState(vector(0), NESTEROV, layout=Layout(b"o" * 8, b"n" * 8)).restore(state.export())


def test_rounds_only_go_up() -> None:
    state = moved(3)
    with pytest.raises(UsageError, match="round 3"):
        state.step(3, [])
    assert state.digest() == moved(3).digest()


def test_a_reader_never_sees_half_a_step() -> None:
    """A thread reads while another is in the middle of a step: it gets the state before or after, never a mixture."""
    state = OuterState(torch.zeros(1000), OuterSpec(lr=1.0, momentum=0.0))
    half, seen = threading.Event(), []

    def means() -> Iterator[tuple[int, int, Tensor | None]]:
        yield 0, 500, torch.ones(500)
        half.set()
        yield 500, 1000, torch.ones(500)

    def read() -> None:
        assert half.wait(120)
        out = torch.empty(1000)
        seen.append((state.read(out), out.unique().tolist()))

    reader = threading.Thread(target=read)
    reader.start()
    state.step(1, means())
    reader.join(120)
    assert seen == [(1, [-1.0])]


def test_pseudo_gradient_in_place() -> None:
    theta, local = vector(1), vector(2)
    expected = theta - local
    assert torch.equal(pseudo_gradient(theta, local, out=local), expected) and torch.equal(local, expected)


# ------------------------------------------------------------------ theta that is lent


def one_step(state: OuterState) -> None:
    state.step(state.t + 1, [(0, state.numel, torch.full((state.numel,), 0.5))])


def test_theta_that_is_lent_takes_no_memory_until_it_moves_and_stays_as_it_was() -> None:
    state, twin = (OuterState(torch.arange(5.0), OuterSpec()) for _ in range(2))
    lent = state.lend()
    assert lent.theta.data_ptr() == state._theta.data_ptr()
    one_step(state)
    one_step(twin)
    assert lent.theta.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and state.digest() == twin.digest()
    place = state._theta.data_ptr()
    one_step(state)
    assert state._theta.data_ptr() == place and lent.theta[4] == 4.0, "one copy is enough"


def test_what_may_be_spent_is_gone_with_the_step_that_spends_it() -> None:
    state = OuterState(torch.arange(5.0), OuterSpec())
    lent, place, counts = state.lend(), state._theta.data_ptr(), True
    lent.spend(lambda: counts)
    one_step(state)
    assert state._theta.data_ptr() == place and not lent.reclaim()
    with pytest.raises(UsageError):
        _ = lent.theta
    lent, counts = state.lend(), False
    before = lent.theta.clone()
    lent.spend(lambda: counts)
    one_step(state)
    assert torch.equal(lent.theta, before), "another round has moved theta"
    lent, counts = state.lend(), True
    before = lent.theta.clone()
    lent.spend(lambda: counts)
    assert lent.reclaim()
    one_step(state)
    assert torch.equal(lent.theta, before)


@pytest.mark.parametrize("writable", [False, True])
def test_theta_that_is_lent_outlives_a_state_that_is_replaced(writable: bool) -> None:
    other = OuterState(torch.full((5,), 9.0), OuterSpec())
    state = OuterState(torch.arange(5.0), OuterSpec())
    lent = state.lend()
    lent.spend(lambda: True)
    state.restore(memoryview(bytearray(other.export())) if writable else other.export())
    one_step(state)
    one_step(other)
    assert lent.reclaim() and lent.theta.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert state.digest() == other.digest()


def test_a_step_that_fails_before_theta_moves_does_not_forget_what_is_lent() -> None:
    """Nobody could be asked, or there was no memory for the copy."""
    state, other = OuterState(torch.arange(5.0), OuterSpec()), OuterState(torch.full((5,), 9.0), OuterSpec())
    lent = state.lend()

    def fails() -> bool:
        raise MemoryError

    lent.spend(fails)
    with pytest.raises(MemoryError):
        one_step(state)
    with pytest.raises(DlcError, match="torn"):
        one_step(state)
    state.restore(other.export())
    one_step(state)
    assert lent.reclaim() and lent.theta.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_there_is_one_loan_at_a_time() -> None:
    state = OuterState(torch.arange(5.0), OuterSpec())
    first, second = state.lend(), state.lend()
    assert not first.reclaim() and second.reclaim()
