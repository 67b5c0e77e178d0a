"""`PowerSGDGradientAverager` against numpy, over peers without sockets."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dlc.compat.hivemind import DHT, Float16Compression, GradientAverager, NotOffered, Optimizer
from dlc.compat.hivemind.averaging.allreduce import AllreduceException
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.optim import PowerSGDGradientAverager, power_sgd_averager
from dlc.compat.hivemind.optim.power_sgd_averager import LowRank, as_matrix, orthonormal, product
from dlc.errors import DlcError, UsageError
from tests.compat import fake_swarm
from tests.compat.fake_swarm import Town

WAIT_S = 180.0
FOREVER_S = 300.0
SHAPES = ((24, 16), (7,), (3, 4, 8, 5), (2, 2))
"""A matrix, a vector, one of more dimensions (12 by 40), and a matrix too small to be worth it."""
LOW = {0: (24, 16), 2: (12, 40)}
RANK = 2


def params(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def averager(town: Town, parameters: list[nn.Parameter], rank: int = RANK, **options: Any) -> PowerSGDGradientAverager:
    dht = DHT(start=True, p2p=town.peer())
    given = {"prefix": "mine", "start": True, "min_matchmaking_time": FOREVER_S, **options}
    return PowerSGDGradientAverager(parameters, rank, dht=dht, **given)


def give(peer: GradientAverager, grads: list[Tensor], samples: int = 1) -> None:
    for parameter, grad in zip(peer.parameters, grads, strict=True):
        parameter.grad = grad.clone()
    peer.accumulate_grads_(samples)


def step(peers: list[PowerSGDGradientAverager], **options: Any) -> list[list[Tensor]]:
    """One round of all of them, and what each has then."""
    steps: list[StepControl] = [peer.step(wait=False, **options) for peer in peers]
    for one in steps:
        one.result(WAIT_S)
    means = []
    for peer in peers:
        with peer.use_averaged_gradients() as averaged:
            means.append([tensor.clone() for tensor in averaged])
    return means


def drawn(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Numpy:
    """The same in float64 for one matrix: one object for all peers."""

    def __init__(self, shape: tuple[int, int], start: Tensor, peers: int) -> None:
        self.q, self.errors = start.double().numpy(), [np.zeros(shape) for _ in range(peers)]

    def round(self, grads: list[Tensor], weights: list[float]) -> Any:
        shares = np.array(weights) / sum(weights)
        sums = [e + g.double().numpy().reshape(e.shape) for e, g in zip(self.errors, grads, strict=True)]
        p, _ = np.linalg.qr(sum(w * (m @ self.q) for w, m in zip(shares, sums, strict=True)))
        self.q = sum(w * (m.T @ p) for w, m in zip(shares, sums, strict=True))
        self.errors = [m - p @ self.q.T for m in sums]
        return p @ self.q.T


def starts(peer: PowerSGDGradientAverager) -> dict[int, Tensor]:
    return dict(zip(LOW, peer.get_current_state()[1], strict=True))


def test_rounds_are_those_of_numpy_with_weights_and_error_feedback_and_the_same_bits_for_all() -> None:
    town, samples = Town(), [1, 2, 5]
    peers = [averager(town, params(), client_mode=i == 2) for i in range(3)]
    oracle = {i: Numpy(shape, starts(peers[0])[i], 3) for i, shape in LOW.items()}
    for number in range(3):
        grads = [drawn(10 * number + i) for i in range(3)]
        for peer, grad, n in zip(peers, grads, samples, strict=True):
            give(peer, grad, n)
        first, *others = step(peers)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        for i, mean in enumerate(first):
            own = [grad[i] for grad in grads]
            if i in LOW:
                exact = oracle[i].round(own, [float(n) for n in samples]).reshape(mean.shape)
            else:
                exact = (sum(n * g.double() for n, g in zip(samples, own, strict=True)) / sum(samples)).numpy()
            np.testing.assert_allclose(mean.numpy(), exact, rtol=1e-4, atol=1e-5)
    assert len(town.rounds) == 6 and all(len(members) == 3 for _, members in town.rounds)


def test_a_default_device_of_the_caller_is_of_no_account() -> None:
    town, parameters = Town(), params()
    with torch.device("meta"):
        under = averager(town, parameters)
    plain = averager(town, parameters)
    for low, other in zip(under._low.values(), plain._low.values(), strict=True):
        assert torch.equal(low.q, other.q) and torch.equal(low.error, other.error)


def test_a_mean_of_low_rank_is_exact_and_fewer_numbers_travel() -> None:
    town = Town()
    sent: list[int] = []

    class Peer(PowerSGDGradientAverager):
        def _packed(self, pieces: Any) -> Any:
            packed = super()._packed(pieces)
            sent.append(sum(len(flat) for flat, _ in packed))
            return packed

    options: dict[str, Any] = {"prefix": "mine", "start": True, "min_matchmaking_time": FOREVER_S}
    peers = [Peer(params(), 2, dht=DHT(start=True, p2p=town.peer()), **options) for _ in range(2)]
    columns = drawn(1, ((24, 2), (16, 2)))
    matrix = columns[0] @ columns[1].T
    for peer, share in zip(peers, (0.5, 1.5), strict=True):
        give(peer, [share * matrix, *drawn(2)[1:]])
    (first, _) = step(peers)
    torch.testing.assert_close(first[0], matrix, rtol=1e-4, atol=1e-4)
    assert sorted(sent) == [2 * (24 + 12)] * 2 + [2 * (16 + 40) + 7 + 4] * 2


def test_what_a_round_leaves_out_comes_with_later_ones() -> None:
    """With gradients that stay the same the rounds add up to their mean, though each is of rank 1."""
    town, rounds = Town(), 40
    peers = [averager(town, params(((12, 12),)), rank=1, min_compression_ratio=0.1) for _ in range(2)]
    grads = [drawn(i, ((12, 12),)) for i in range(2)]
    mean = (grads[0][0] + grads[1][0]) / 2
    total, once = torch.zeros_like(mean), None
    for _ in range(rounds):
        for peer, grad in zip(peers, grads, strict=True):
            give(peer, grad)
        ((made,), _) = step(peers)
        once = made if once is None else once
        total += made
    assert once is not None and (once - mean).norm() > 0.5 * mean.norm(), "one round alone is far from it"
    assert (total / rounds - mean).norm() < 0.15 * mean.norm()


@pytest.mark.parametrize("exchange", [1, 2])
def test_a_round_that_failed_in_either_exchange_leaves_nothing_behind(exchange: int) -> None:
    """The next one is as if it had not been: no error and no gradient counts twice."""
    town = Town()
    peers = [averager(town, params(), compression=Float16Compression()) for _ in range(2)]
    other = Town()
    twins = [averager(other, params(), compression=Float16Compression()) for _ in range(2)]
    for number in range(2):
        for i in range(2):
            give(peers[i], drawn(10 * number + i))
            give(twins[i], drawn(10 * number + i))
        if number == 1:
            last = len(town.rounds) + exchange
            town.failing = lambda peer, last=last: len(town.rounds) == last  # type: ignore[misc]
            steps = [peer.step(wait=False, reset_accumulators=False, allow_retries=False) for peer in peers]
            assert all(isinstance(one.exception(WAIT_S), DlcError) for one in steps)
            town.failing = lambda peer: False
        made, same = step(peers), step(twins)
        assert all(torch.equal(a, b) for a, b in zip(made[0], same[0], strict=True))


def test_peers_with_another_p_do_not_meet_and_no_mean_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host would be whose arithmetic is another: its product with the others' would be nobody's mean."""
    town, calls, lock = Town(), [0], threading.Lock()

    def differs(p: Tensor) -> Tensor:
        with lock:
            calls[0] += 1
            return orthonormal(p) * (1 + 1e-6 * calls[0])

    monkeypatch.setattr(power_sgd_averager, "orthonormal", differs)
    monkeypatch.setattr(power_sgd_averager, "SECOND_S", 0.2)
    peers = [averager(town, params(((24, 16),))) for _ in range(2)]
    for i, peer in enumerate(peers):
        give(peer, drawn(i, ((24, 16),)))
    steps = [peer.step(wait=False, allow_retries=False) for peer in peers]
    assert all(isinstance(one.exception(WAIT_S), AllreduceException) for one in steps)
    assert len(town.rounds) == 1


def test_who_has_another_rank_or_none_is_not_met(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    plain = GradientAverager(
        params(), dht=DHT(start=True, p2p=town.peer()), prefix="mine", start=True, min_matchmaking_time=0.1
    )
    peers: list[GradientAverager] = [plain]
    peers += [averager(town, params(), rank=rank, min_matchmaking_time=0.1) for rank in (1, 2)]
    for i, peer in enumerate(peers):
        give(peer, drawn(i))
    steps = [peer.step(wait=False, timeout=0.5, allow_retries=False) for peer in peers]
    assert all(isinstance(one.exception(WAIT_S), AllreduceException) for one in steps)
    assert not town.rounds and "averager under this prefix" in caplog.text


def test_zeros_and_values_that_are_not_finite_leave_no_trace() -> None:
    town, shape = Town(), ((24, 16),)
    peers = [averager(town, params(shape)) for _ in range(2)]
    for value in (0.0, float("inf")):
        for peer in peers:
            give(peer, [torch.full(shape[0], value)])
        ((made,), _) = step(peers)
        assert not made.any() if not value else not torch.isfinite(made).all()
    columns = drawn(1, ((24, 2), (16, 2)))
    for peer in peers:
        give(peer, [columns[0] @ columns[1].T])
    ((made,), _) = step(peers)
    torch.testing.assert_close(made, columns[0] @ columns[1].T, rtol=1e-4, atol=1e-4)


def test_a_matrix_without_elements_is_left_alone() -> None:
    """That of no row and no column was taken for one that PowerSGD saves all of: every round failed at it."""
    town, shapes = Town(), ((24, 16), (0, 0), (0, 5))
    peers = [averager(town, params(shapes)) for _ in range(2)]
    for peer in peers:
        give(peer, drawn(1, shapes))
    for means in step(peers):
        assert [mean.shape for mean in means] == [torch.Size(shape) for shape in shapes] and means[0].any()


def test_what_a_matrix_keeps_is_finite_and_no_column_of_it_is_zero() -> None:
    q, error, start = torch.ones(3, 2), torch.ones(4, 3), torch.full((3, 2), 2.0)
    low = LowRank(4, 3, start)
    q[:, 0] = 0.0
    low.keep(q, error)
    assert low.q.tolist() == [[2.0, 1.0]] * 3 and torch.equal(low.error, error)
    for bad_q, bad_error in ((q / 0, error), (q, error / 0)):
        low.keep(q, error)
        low.keep(bad_q, bad_error)
        assert torch.equal(low.q, start) and not low.error.any()


def test_a_matrix_is_sent_as_it_is_where_its_products_save_less_than_the_ratio() -> None:
    for columns, n_low in ((8, 1), (7, 0)):
        assert len(averager(Town(), params(((8, columns),))).get_current_state()[1]) == n_low


def test_who_does_not_come_to_the_second_exchange_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    peers = [averager(town, params()) for _ in range(3)]
    for seed, peer in enumerate(peers):
        give(peer, drawn(seed))
    gone = peers[2].dht.swarm
    average = gone.average

    def once(key: str, *given: Any) -> Any:
        if "/q/" in key:
            monkeypatch.setattr(fake_swarm, "HASTE_S", FOREVER_S)  # the others have waited for long enough
            raise DlcError("this peer has other things to do")
        return average(key, *given)

    monkeypatch.setattr(gone, "average", once)
    steps = [peer.step(wait=False, allow_retries=peer is not peers[2]) for peer in peers]
    for one in steps[:2]:
        assert len(one.result(WAIT_S)) == 2
    assert isinstance(steps[2].exception(WAIT_S), DlcError)
    outcomes = [peer.last_outcome for peer in peers[:2]]
    assert all(outcome is not None and dict(outcome.missing) == {gone.id: "left"} for outcome in outcomes)


def test_who_comes_late_takes_over_the_matrices_of_another() -> None:
    town = Town()
    first = averager(town, params(), min_group_size=1)
    give(first, drawn(1))
    step([first])
    late = averager(town, params())
    late._low[0].error.fill_(1.0)
    assert late.load_state_from_peers(timeout=WAIT_S) is not None
    assert torch.equal(late._low[0].error, torch.ones(SHAPES[0])), "what this peer has left out is its own"
    assert all(torch.equal(a, b) for a, b in zip(starts(first).values(), starts(late).values(), strict=True))
    other = averager(town, params(), rank=1)
    with pytest.raises(UsageError, match="same model and rank"):
        other.load_state_from_peers(timeout=WAIT_S)


def test_an_optimizer_of_hivemind_trains_with_it() -> None:
    town, nets = Town(), []
    factory = partial(PowerSGDGradientAverager, averager_rank=1, min_compression_ratio=0.1)
    opts = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Linear(8, 8))
        opts.append(
            Optimizer(
                dht=DHT(start=True, p2p=town.peer()),
                run_id="run",
                target_batch_size=32,
                batch_size_per_step=8,
                params=nets[-1].parameters(),
                optimizer=partial(torch.optim.SGD, lr=0.1),
                matchmaking_time=WAIT_S,
                delay_state_averaging=False,
                grad_averager_factory=factory,
            )
        )
    for opt in opts:
        opt.tracker.report_local_progress(0, 1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    start = (nets[0](x) - x).square().mean().item()

    def train(opt: Optimizer, net: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while opt.local_epoch < 4:
            x = torch.randn(8, 8, generator=generator)
            (net(x) - x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    threads = [threading.Thread(target=train, args=(opts[i], nets[i], i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert isinstance(opts[0].grad_averager, PowerSGDGradientAverager) and opts[0].grad_averager._low
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert (nets[0](x) - x).square().mean().item() < start
    for opt in opts:
        opt.shutdown()


def test_orthonormal_and_product_are_those_of_numpy_and_dependent_columns_are_zero() -> None:
    p = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    p[:, 3] = p[:, 0] - 2 * p[:, 1]
    made = orthonormal(p)
    q, _ = np.linalg.qr(p[:, [0, 1, 2, 4]].double().numpy())
    np.testing.assert_allclose((made.double() @ made.double().T).numpy(), q @ q.T, atol=1e-6)
    assert not made[:, 3].any() and not orthonormal(torch.zeros(4, 2)).any()
    right = torch.randn(9, 5)
    torch.testing.assert_close(product(p, right), p @ right.T)
    assert torch.equal(product(p, right)[3:4], product(p[3:4], right)), "however the rows are cut"
    assert [as_matrix(shape) for shape in ((3, 4), (3, 4, 8, 5), (7,), (2, 3, 4))] == [(3, 4), (12, 40), (1, 7), (6, 4)]


def test_what_cannot_be_is_refused_by_name() -> None:
    town = Town()
    with pytest.raises(NotOffered, match="PowerSGDGradientAverager.auxiliary"):
        averager(town, params(), auxiliary=True)
    with pytest.raises(UsageError, match="averager_rank"):
        averager(town, params(), rank=0)
    tiny = [averager(town, params(((3,),))) for _ in range(2)]
    for i, peer in enumerate(tiny):
        give(peer, [torch.full((3,), float(i))])
    assert all(torch.equal(mean, torch.full((3,), 0.5)) for (mean,) in step(tiny)) and len(town.rounds) == 1
