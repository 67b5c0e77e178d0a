import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dlc.errors import CheckpointError, DlcError, UsageError
from dlc.train.outer import IMAGE_HEADER, OuterState, pseudo_gradient

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


def moved(steps: int = 3, **kwargs: int) -> OuterState:
    state = OuterState(vector(0), lr=0.7, momentum=0.9, **kwargs)
    for t in range(1, steps + 1):
        state.step(t, whole(vector(t)))
    return state


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.0)])
def test_follows_torch_sgd_nesterov(lr: float, momentum: float) -> None:
    state = OuterState(vector(0), lr=lr, momentum=momentum)
    p = nn.Parameter(vector(0))
    oracle = torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for t in range(1, 101):
        p.grad = vector(t)
        oracle.step()
        state.step(t, whole(vector(t)))
    torch.testing.assert_close(theta_of(state), p.detach(), rtol=1e-5, atol=1e-5)
    assert state.t == 100


def test_every_operation_is_rounded_on_its_own() -> None:
    """The exact bits, one float32 operation at a time: a fused multiply-add would differ in some of the elements."""
    import numpy as np

    lr, mu = np.float32(0.7), np.float32(0.9)
    theta, m = vector(0).numpy().copy(), np.zeros(N, np.float32)
    for t in range(1, 6):
        g = vector(t).numpy()
        m = (m * mu).astype(np.float32) + g
        theta = theta - ((m * mu).astype(np.float32) + g).astype(np.float32) * lr
    assert theta.dtype == np.float32
    assert theta_of(moved(5)).numpy().tobytes() == theta.tobytes()


@pytest.mark.parametrize("slice_elements", [1, 7, 64, 1000, 4096])
def test_slices_and_chunks_do_not_change_a_bit(slice_elements: int) -> None:
    state = OuterState(vector(0), lr=0.7, momentum=0.9, slice_elements=slice_elements)
    state.step(1, cut(vector(1), 1, 2, 333))
    state.step(2, cut(vector(2), 500, 500))
    state.step(3, whole(vector(3)))
    assert state.digest() == moved(3).digest()


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
    same_theta = OuterState(theta_of(moved(2)), lr=0.7, momentum=0.9, t=2)  # momentum is zero here
    later = moved(2)
    later.step(3, [])
    config = [OuterState(vector(0), lr=lr, momentum=mu) for lr, mu in ((0.7, 0.9), (0.6, 0.9), (0.7, 0.8))]
    assert len({base, same_theta.digest(), later.digest(), *(s.digest() for s in config)}) == 6


def test_large_digest_uses_threads_and_agrees() -> None:
    state = OuterState(torch.zeros(3 * 2**20), lr=0.7, momentum=0.9)
    import blake3

    assert state.digest() == blake3.blake3(bytes(state.export())).digest()


def test_export_is_frozen_and_restores() -> None:
    state = moved(3)
    image, digest = state.export(), state.digest()
    assert image.readonly and image.nbytes == state.image_bytes() == 64 + 8 * N
    state.step(4, whole(vector(4)))
    other = OuterState(vector(9), lr=0.7, momentum=0.9)
    other.restore(image)
    assert (other.t, other.digest()) == (3, digest)
    other.step(4, whole(vector(4)))
    assert other.digest() == state.digest()
    state.restore(bytes(image))
    assert state.digest() == digest


def test_restore_refuses_and_changes_nothing() -> None:
    state = moved(3)
    image, digest = bytes(state.export()), state.digest()
    wrong_numel = bytearray(image)
    IMAGE_HEADER.pack_into(wrong_numel, 0, b"dlcouter", 1, 0, 3, N + 1, 0.7, 0.9)
    bad = [
        image[:-1],
        image + b"\0",
        b"",
        b"X" + image[1:],
        bytes(wrong_numel),
        bytes(OuterState(vector(0), lr=0.5, momentum=0.9).export()),
    ]
    for b in bad:
        with pytest.raises(CheckpointError):
            state.restore(b)
    assert state.digest() == digest


def test_an_empty_channel_works() -> None:
    state = OuterState(torch.empty(0), lr=1.0, momentum=0.0)
    state.step(1, [])
    other = OuterState(torch.empty(0), lr=1.0, momentum=0.0)
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


def test_rounds_only_go_up() -> None:
    state = moved(3)
    with pytest.raises(UsageError, match="round 3"):
        state.step(3, [])
    assert state.digest() == moved(3).digest()


def test_a_reader_never_sees_half_a_step() -> None:
    """A thread reads while another is in the middle of a step: it gets the state before or after, never a mixture."""
    state = OuterState(torch.zeros(1000), lr=1.0, momentum=0.0)
    half, seen = threading.Event(), []

    def means() -> Iterator[tuple[int, int, Tensor | None]]:
        yield 0, 500, torch.ones(500)
        half.set()
        yield 500, 1000, torch.ones(500)

    def read() -> None:
        assert half.wait(10)
        out = torch.empty(1000)
        seen.append((state.read(out), out.unique().tolist()))

    reader = threading.Thread(target=read)
    reader.start()
    state.step(1, means())
    reader.join(10)
    assert seen == [(1, [-1.0])]


def test_pseudo_gradient_in_place() -> None:
    theta, local = vector(1), vector(2)
    expected = theta - local
    assert torch.equal(pseudo_gradient(theta, local, out=local), expected) and torch.equal(local, expected)
