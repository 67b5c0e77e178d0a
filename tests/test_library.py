"""`dlc.DiLoCo` over real peers: the algorithm's own limits, through sockets, votes and all."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dlc
import dlc.comm.node
from dlc.comm.straggler import NEVER_S
from dlc.errors import CheckpointError, UsageError
from dlc.train.outer_loop import OuterLoop
from tests.helpers import wait_until
from tests.swarm import DEADLINE_S, JOIN_S, PATIENT, ROUND_S, swarm

STEPS = 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def batches(n: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 6, generator=generator) for _ in range(STEPS)] for _ in range(n)]


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_int4_over_real_peers_gives_equal_bits_and_keeps_what_each_has_lost() -> None:
    data, nets = batches(2), [model(), model()]

    def run(peer: dlc.Peer, net: nn.Module, xs: list[torch.Tensor]) -> torch.Tensor:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        mean = dlc.OuterSpec(lr=1.0, momentum=0.0)
        opt = dlc.DiLoCo(net, inner, peer, sync_every=1, outer=mean, codec="int4", chunk_elems=30, patience_s=ROUND_S)
        for x in xs:
            loss_of(net, x).backward()
            report = opt.step()
            assert report is not None and report.complete and len(report.contributors) == 2
            opt.zero_grad()
        return opt.state_dict()["residual"]  # type: ignore[no-any-return]

    start = loss_of(nets[0], torch.cat(data[0] + data[1]))
    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, p, n, x) for p, n, x in zip(peers, nets, data, strict=True)]
        residuals = [f.result(DEADLINE_S) for f in futures]
    assert torch.equal(flat(nets[0]), flat(nets[1]))
    assert loss_of(nets[0], torch.cat(data[0] + data[1])) < start
    assert all(r.any() for r in residuals) and not torch.equal(*residuals)


def train(peer: dlc.Peer, net: nn.Module, inner: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[object]:
    """One peer: an ordinary loop; outer lr 1 without momentum, so that each round is the plain mean."""
    mean = dlc.OuterSpec(lr=1.0, momentum=0.0)
    opt = dlc.DiLoCo(net, inner, peer, sync_every=1, outer=mean, codec="fp32", patience_s=ROUND_S)
    reports = []
    for x in data:
        loss_of(net, x).backward()
        reports.append(opt.step())
        opt.zero_grad()
    return reports


def test_a_contribution_that_is_far_too_large_is_clipped_to_the_median_norm_of_its_round() -> None:
    n, nets, start = 3, [model() for _ in range(3)], flat(model())
    moves = [torch.randn(start.numel(), generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(n)]
    outer = dlc.OuterSpec(lr=1.0, momentum=0.0, clip="median")

    def run(peer: dlc.Peer, net: nn.Module, move: torch.Tensor) -> dlc.RoundReport | None:
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        opt = dlc.DiLoCo(net, inner, peer, sync_every=1, outer=outer, codec="fp32", chunk_elems=20, patience_s=ROUND_S)
        parts = move.split([p.numel() for p in net.parameters()])
        for p, part in zip(net.parameters(), parts, strict=True):
            p.grad = part.view(p.shape).clone()
        return opt.step()

    with swarm(n) as peers, ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run, *of) for of in zip(peers, nets, moves, strict=True)]
        reports = [f.result(DEADLINE_S) for f in futures]
    assert all(report is not None and len(report.contributors) == n for report in reports)
    assert all(torch.equal(flat(nets[0]), flat(net)) for net in nets)
    clipped = moves[2] * (moves[1].norm() / moves[2].norm())
    torch.testing.assert_close(start - flat(nets[0]), (moves[0] + moves[1] + clipped) / n, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("overlap", ["delayed", "eager"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_what_mixing_leaves_undone_takes_nothing_back_that_the_peers_have_learned(overlap: str, fragments: int) -> None:
    """With "eager" each round undid a part of the one before it, a quarter with two peers."""
    n, steps, start = 2, 12, flat(model())
    nets = [model() for _ in range(n)]
    moves = [torch.randn(start.numel(), generator=torch.Generator().manual_seed(i)) for i in range(n)]
    options: dict[str, Any] = {"overlap": overlap, "mixing": 0.5, "fragments": fragments, "patience_s": ROUND_S}

    def run(peer: dlc.Peer, net: nn.Module, move: torch.Tensor) -> None:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        mean = dlc.OuterSpec(lr=1.0, momentum=0.0)
        opt = dlc.DiLoCo(net, inner, peer, sync_every=2, outer=mean, codec="fp32", **options)
        parts = move.split([p.numel() for p in net.parameters()])
        for _ in range(steps):
            for p, part in zip(net.parameters(), parts, strict=True):
                p.grad = part.view(p.shape).clone()
            opt.step()
        opt.finish()

    with swarm(n) as peers, ThreadPoolExecutor(n) as pool:
        for done in [pool.submit(run, *of) for of in zip(peers, nets, moves, strict=True)]:
            done.result(DEADLINE_S)
    assert torch.equal(flat(nets[0]), flat(nets[1]))
    torch.testing.assert_close(flat(nets[0]), start - 0.1 * steps * sum(moves) / n, rtol=1e-4, atol=1e-5)


def test_three_peers_with_sgd_inside_follow_one_process_with_the_joint_batch() -> None:
    n, data = 3, batches(3)
    nets = [model() for _ in range(n)]
    alone = copy.deepcopy(nets[0])
    with swarm(n) as peers, ThreadPoolExecutor(n) as pool:
        futures = [
            pool.submit(train, p, net, torch.optim.SGD(net.parameters(), lr=0.1), x)
            for p, net, x in zip(peers, nets, data, strict=True)
        ]
        reports = [f.result(DEADLINE_S) for f in futures]
    assert all(r is not None and len(r.contributors) == n for rs in reports for r in rs)  # type: ignore[attr-defined]
    assert all(torch.equal(flat(nets[0]), flat(net)) for net in nets)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(alone, torch.cat([x[step] for x in data])).backward()
        optimizer.step()
    torch.testing.assert_close(flat(nets[0]), flat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"overlap": "delayed"}, {"overlap": "eager"}, {"overlap": "delayed", "fragments": 2}]
)
def test_a_newcomer_that_comes_while_a_delayed_round_is_on_its_way_takes_part(options: dict[str, Any]) -> None:
    """The first has offered and steps on, the second has not; each of the three has a contribution in both rounds."""
    nets, start = [model() for _ in range(3)], flat(model())
    data = [itertools.cycle(xs) for xs in batches(3)]

    def follow(peer: dlc.Peer, me: int) -> dlc.DiLoCo:
        inner = torch.optim.SGD(nets[me].parameters(), lr=0.1)
        return dlc.DiLoCo(nets[me], inner, peer, 4, codec="fp32", chunk_elems=20, patience_s=ROUND_S, **options)

    def steps(opt: dlc.DiLoCo, n: int) -> None:
        for _ in range(n):
            loss_of(nets[opts.index(opt)], next(data[opts.index(opt)])).backward()
            assert opt.step() is None, "nobody waits, and no round ends"
            opt.zero_grad()

    phase = 4 // options.get("fragments", 1)
    with swarm(2) as peers, ThreadPoolExecutor(3) as pool:
        opts = list(pool.map(follow, peers, range(2)))
        steps(opts[0], phase + 1)
        with dlc.Peer.join(peers[0].address, timeouts=PATIENT, join_timeout_s=JOIN_S) as late:
            opts.append(follow(late, 2))
            assert opts[2].t == 0 and torch.equal(flat(nets[2]), start)
            steps(opts[2], phase)
            steps(opts[1], phase)
            one = list(pool.map(dlc.DiLoCo.flush, opts))
            steps(opts[0], phase - 2)
            steps(opts[1], phase - 1)
            steps(opts[2], phase - 1)
            for me, opt in enumerate(opts):
                loss_of(nets[me], next(data[me])).backward()
                opt.step()
            two = list(pool.map(dlc.DiLoCo.flush, opts))
            assert len({peer.position("train").digest for peer in (*peers, late)}) == 1
    for reports in (one, two):
        assert all(r is not None and r.complete and len(r.contributors) == 3 for r in reports)
        assert len({r.head for r in reports if r is not None}) == 1
    if "fragments" not in options:  # else steps on the part that had its round before come on top
        assert all(torch.equal(flat(nets[0]), flat(net)) for net in nets) and not torch.equal(flat(nets[0]), start)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (dlc.OuterSpec(lr=0.5), "lr 0.7, here 0.5"),
        (dlc.OuterSpec(lr=0.7, optimizer="sgd", momentum=0.0), "it has 712 bytes, the one here 420"),
    ],
)
def test_who_comes_with_another_outer_optimizer_is_told_what_differs(other: dlc.OuterSpec, why: str) -> None:
    """It waited for ever, or as long as it was given, and fetched the state again and again."""

    def begin(peer: dlc.Peer, outer: dlc.OuterSpec) -> dlc.DiLoCo:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        return dlc.DiLoCo(net, inner, peer, sync_every=1, outer=outer, timeout_s=ROUND_S)

    with swarm(1) as (first,):
        begin(first, dlc.OuterSpec(lr=0.7))
        with dlc.Peer.join(first.address, join_timeout_s=JOIN_S) as late:
            with pytest.raises(CheckpointError, match=f"channel 'train' is of another kind.*{why}; give all peers"):
                begin(late, other)
            assert begin(late, dlc.OuterSpec(lr=0.7)).t == 0, "with the right one it may try again"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (nn.Sequential(nn.Linear(9, 1), nn.Tanh(), nn.Linear(6, 9)), "in other shapes"),
        (nn.Sequential(nn.Identity(), *model()), "of other names, or in another order"),
    ],
)
def test_who_comes_with_another_model_of_as_many_elements_is_refused(other: nn.Module, why: str) -> None:
    """They averaged one model's parameters with another's, and every round was complete."""

    def begin(peer: dlc.Peer, net: nn.Module) -> dlc.DiLoCo:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        return dlc.DiLoCo(net, inner, peer, sync_every=1, timeout_s=ROUND_S)

    before = flat(other)
    with swarm(1) as (first,):
        begin(first, model())
        with dlc.Peer.join(first.address, join_timeout_s=JOIN_S) as late:
            with pytest.raises(CheckpointError, match=f"as many parameters as this model, but {why}"):
                begin(late, other)
            assert torch.equal(flat(other), before)
            begin(late, nn.ModuleDict({"module": model()}))  # as DDP names them


def test_who_cuts_its_offers_into_other_chunks_is_told_so() -> None:
    """It was told that 14 elements in fp32 are not 14 elements in fp32."""
    nets = [nn.Linear(6, 2), nn.Linear(6, 2)]

    def begin(peer: dlc.Peer, net: nn.Module, chunk_elems: int) -> dlc.DiLoCo:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        return dlc.DiLoCo(net, inner, peer, 1, codec="fp32", chunk_elems=chunk_elems, patience_s=ROUND_S)

    def step(opt: dlc.DiLoCo, net: nn.Module) -> dlc.RoundReport | None:
        net(torch.ones(6)).sum().backward()
        return opt.step()

    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        opts = list(pool.map(begin, peers, nets, (7, 5)))
        one, two = (pool.submit(step, opt, net) for opt, net in zip(opts, nets, strict=True))
        said = "14 elements in fp32, in chunks of {}, but this peer offers 14 elements in fp32, in chunks of {}: all"
        refused = [e for e in (one.exception(DEADLINE_S), two.exception(DEADLINE_S)) if e is not None]
        assert len(refused) == 1 and isinstance(refused[0], UsageError)
        assert said.format(7, 5) in str(refused[0]) or said.format(5, 7) in str(refused[0])


def test_who_says_nothing_of_chunks_cuts_its_offers_as_the_run_does() -> None:
    """What is usual may be another number in the version that began the run."""
    nets = [nn.Linear(6, 2), nn.Linear(6, 2)]

    def begin(peer: dlc.Peer, net: nn.Module, chunk_elems: int = 0) -> dlc.DiLoCo:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        return dlc.DiLoCo(net, inner, peer, 1, codec="int4", chunk_elems=chunk_elems, patience_s=ROUND_S)

    def step(opt: dlc.DiLoCo, net: nn.Module) -> dlc.RoundReport | None:
        net(torch.ones(6)).sum().backward()
        return opt.step()

    with swarm(1) as (first,), ThreadPoolExecutor(2) as pool:
        opened = begin(first, nets[0], 7)
        with dlc.Peer.join(first.address, join_timeout_s=JOIN_S, timeouts=PATIENT) as late:
            opts = [opened, begin(late, nets[1])]
            for report in pool.map(step, opts, nets):
                assert report is not None and len(report.contributors) == 2


def test_an_average_by_the_name_of_a_trainings_channel_is_refused() -> None:
    """The mean was taken for a step of the training, which moved every peer's parameters, and no error told so."""
    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        model = nn.Linear(4, 2)
        helper = dlc.Peer.join(peers[0].address, role="helper", timeouts=PATIENT, join_timeout_s=JOIN_S)
        with helper:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            opening = pool.submit(dlc.DiLoCo, model, inner, peers[0], 1, timeout_s=ROUND_S)
            other = nn.Linear(4, 2)
            dlc.DiLoCo(other, torch.optim.SGD(other.parameters(), lr=0.1), peers[1], 1, timeout_s=ROUND_S)
            opt, before = opening.result(DEADLINE_S), flat(model)
            wait_until(lambda: helper.position("train").head == peers[0].position("train").head, what="it is told")
            for peer in (*peers, helper):
                with pytest.raises(UsageError, match="'train' is the channel of a state that is trained.*another name"):
                    peer.all_reduce(torch.ones(10), name="train", timeout_s=10.0, patience_s=0.1)
            assert opt.outer_state.t == 0 and peers[0].position("train").t == 0
            opt.reload()
            assert torch.equal(flat(model), before)


def test_a_creation_that_failed_can_be_tried_again_though_nobody_else_has_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state stayed on the channel: each further try was refused, and the rounds of the others waited for it."""
    with swarm(1) as (peer,):
        model = nn.Linear(4, 2)
        adopt, image = OuterLoop.adopt, list[bytes]()

        def interrupted(loop: OuterLoop) -> None:
            image.append(bytes(loop.state.export()))
            raise KeyboardInterrupt

        monkeypatch.setattr(OuterLoop, "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dlc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, sync_every=1)
        monkeypatch.setattr(OuterLoop, "adopt", adopt)
        wrong = nn.Linear(5, 2)
        with pytest.raises(CheckpointError, match="of another kind.*holds 10 parameters, this model 12"):
            dlc.DiLoCo(wrong, torch.optim.SGD(wrong.parameters(), lr=0.1), peer, sync_every=1)
        with torch.no_grad():
            model.weight.zero_()
        opt = dlc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, sync_every=1)
        assert bytes(opt.outer_state.export()) == image[0], "the run's, and not what the model held"
        assert not torch.equal(model.weight, torch.zeros(2, 4))
        model(torch.ones(4)).sum().backward()
        report = opt.step()
        assert report is not None and report.complete and report.t == 1
        with pytest.raises(UsageError, match="has a state on channel 'train' already"):
            dlc.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), peer, sync_every=1)
        assert opt.step() is not None, "the one that is in use goes on"


def test_no_round_waits_for_a_peer_that_has_ended_its_training_and_stays() -> None:
    """It waited for as long as the others' patience, in every round."""
    (data,) = batches(1)
    nets = [model(), model()]

    def begin(peer: dlc.Peer, net: nn.Module) -> dlc.DiLoCo:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        return dlc.DiLoCo(net, inner, peer, sync_every=1, patience_s=10 * ROUND_S, timeout_s=ROUND_S)

    def train_on(opt: dlc.DiLoCo, net: nn.Module, xs: list[torch.Tensor]) -> list[int]:
        missing = []
        for x in xs:
            loss_of(net, x).backward()
            report = opt.step()
            assert report is not None
            missing.append(len(report.missing))
        return missing

    def rests() -> bool:
        """The second peer knows that the first one does not train."""
        return bool(peers[1]._ask(lambda node, now: node.record_of(peers[0].id).eta_s) == NEVER_S)

    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        opts = list(pool.map(begin, peers, nets))
        assert list(pool.map(train_on, opts, nets, [data[:2]] * 2)) == [[0, 0], [0, 0]]
        opts[0].finish()
        wait_until(rests, ROUND_S, "the other hears of it")
        rest = pool.submit(train_on, opts[1], nets[1], data[2:])
        assert rest.result(ROUND_S) == [1] * len(data[2:])
        back = pool.submit(train_on, opts[0], nets[0], data[:1])
        wait_until(lambda: not rests(), ROUND_S, "the other hears of it: a round that it begins earlier is its own")
        assert train_on(opts[1], nets[1], data[:1]) == back.result(ROUND_S) == [0], "it trains once more"
        opts[0].finish()
        last = pool.submit(peers[1].barrier, "end", timeout_s=10 * ROUND_S)
        peers[0].barrier("end", timeout_s=10 * ROUND_S)  # the other came first, and a round is not begun without us
        last.result(ROUND_S)


def test_one_peer_with_h_1_outer_lr_1_and_no_momentum_follows_plain_adamw() -> None:
    (data,) = batches(1)
    net, alone = model(), model()
    with dlc.Peer.join() as peer:
        train(peer, net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for x in data:
        optimizer.zero_grad()
        loss_of(alone, x).backward()
        optimizer.step()
    torch.testing.assert_close(flat(net), flat(alone), rtol=1e-5, atol=1e-6)


def test_a_whole_swarm_that_is_started_again_goes_on_with_its_momentum(tmp_path: Path) -> None:
    """Two rounds, and after a restart two more, are the same in bits as four."""
    (data,) = batches(1)

    def rounds(xs: list[torch.Tensor], net: nn.Module, saved: dict[str, Any] | None = None) -> dict[str, Any]:
        resume = None if saved is None else dlc.Resume.of(saved)
        with dlc.Peer.join(found=True, resume=resume, state_dir=tmp_path) as peer:  # by the same name as before
            opt = dlc.DiLoCo(
                net, torch.optim.SGD(net.parameters(), lr=0.1), peer, sync_every=1, codec="fp32", resume=saved
            )
            for x in xs:
                loss_of(net, x).backward()
                assert opt.step() is not None
                opt.zero_grad()
            state = opt.state_dict(outer=True)
            if saved is not None:
                other = model()
                with dlc.Peer.join([peer.address], join_timeout_s=JOIN_S) as second:
                    late = dlc.DiLoCo(other, torch.optim.SGD(other.parameters(), lr=0.1), second, codec="fp32")
                    assert late.t == opt.t and torch.equal(flat(other), flat(net))
            return state

    whole, parts = model(), model()
    rounds(data[:4], whole)
    saved = rounds(data[:2], parts)
    image = saved["outer"]["image"].clone()
    parts = model()  # what it held is in the state
    with dlc.Peer.join() as peer, pytest.raises(UsageError, match="round 2.*join with resume"):
        dlc.DiLoCo(parts, torch.optim.SGD(parts.parameters(), lr=0.1), peer, resume=saved)
    resumed = dlc.Peer.join(found=True, resume=dlc.Resume.of(saved), state_dir=tmp_path)
    with resumed as peer, pytest.raises(UsageError, match="resumed at round 2.*give resume= here, too"):
        dlc.DiLoCo(parts, torch.optim.SGD(parts.parameters(), lr=0.1), peer, sync_every=1, codec="fp32")
    after = rounds(data[2:4], parts, saved)
    assert torch.equal(flat(parts), flat(whole)) and after["t"] == 4
    assert torch.equal(saved["outer"]["image"], image), "what was saved is the caller's"
    with pytest.raises(UsageError, match="outer=True"):
        dlc.Resume.of({"t": 2})


def test_a_newcomer_joins_while_eager_rounds_of_fragments_are_on_their_way() -> None:
    """Digests are equal on all peers after every round, though each trains ahead on parameters of its own."""
    data, nets = batches(3), [model() for _ in range(3)]
    joined = threading.Event()

    def run(peer: dlc.Peer, net: nn.Module, xs: list[torch.Tensor], newcomer: bool) -> tuple[dict[int, bytes], int]:
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        outer = dlc.OuterSpec(momentum=0.5)
        opt = dlc.DiLoCo(net, inner, peer, 4, outer=outer, overlap="eager", fragments=2, chunk_elems=20)
        digests, counted, end = dict[int, bytes](), 0, time.monotonic() + DEADLINE_S
        for x in itertools.cycle(xs):
            loss_of(net, x).backward()
            report = opt.step()
            opt.zero_grad()
            position = peer.position("train")
            digests[position.t] = position.digest
            counted += report is not None
            if newcomer and counted >= 2:
                joined.set()
            if (joined.is_set() and counted >= 2) or time.monotonic() > end:
                break
        peer.leave()
        return digests, counted

    with swarm(2) as (first, second), ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run, first, nets[0], data[0], False)]
        futures.append(pool.submit(run, second, nets[1], data[1], False))
        with dlc.Peer.join([first.address], timeouts=PATIENT, join_timeout_s=JOIN_S) as third:
            futures.append(pool.submit(run, third, nets[2], data[2], True))
            seen = [future.result(2 * DEADLINE_S)[0] for future in futures]
    for t in {t for digests in seen for t in digests}:
        assert len({digests[t] for digests in seen if digests.get(t)}) == 1
    assert joined.is_set()
    assert seen[0].keys() & seen[1].keys() and seen[2].keys() & (seen[0].keys() | seen[1].keys())


@pytest.mark.parametrize("bytes_min", [0, 1 << 30])  # the step of a large state is made by a thread of its own
def test_a_round_that_counts_this_peer_moves_theta_where_it_is(bytes_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.comm.node, "AT_LENGTH_BYTES_MIN", bytes_min)
    net = model()
    with swarm(1) as peers:
        opt = dlc.DiLoCo(net, torch.optim.SGD(net.parameters(), lr=0.1), peers[0], sync_every=1)
        assert not peers[0].counts("train")
        place = opt.outer_state._theta.data_ptr()
        for x in batches(1)[0]:
            loss_of(net, x).backward()
            assert opt.step() is not None
            assert opt.outer_state._theta.data_ptr() == place
        assert not peers[0].counts("train")


def rounds_of_two(codec: str, spoil: bool) -> list[torch.Tensor]:
    """The parameters of both after some rounds. spoil: whatever is in a model once it was offered is overwritten."""
    data, nets = batches(2), [model(), model()]

    def run(peer: dlc.Peer, net: nn.Module, xs: list[torch.Tensor]) -> torch.Tensor:
        contribute = peer.contribute

        def spoiled(*args: Any, **options: Any) -> dlc.Pending:
            pending = contribute(*args, **options)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.fill_(float("nan"))
            return pending

        if spoil:
            peer.contribute = spoiled  # type: ignore[method-assign]
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        opt = dlc.DiLoCo(net, inner, peer, sync_every=1, codec=codec, chunk_elems=30, patience_s=ROUND_S)
        for x in xs:
            loss_of(net, x).backward()
            report = opt.step()
            assert report is not None and report.complete and len(report.contributors) == 2
            opt.zero_grad()
        return flat(net)

    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, p, n, x) for p, n, x in zip(peers, nets, data, strict=True)]
        return [f.result(DEADLINE_S) for f in futures]


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_what_becomes_of_a_model_after_its_offer_is_no_part_of_the_mean(codec: str) -> None:
    spoiled, plain = rounds_of_two(codec, spoil=True), rounds_of_two(codec, spoil=False)
    assert torch.equal(*spoiled) and torch.equal(*plain) and torch.equal(spoiled[0], plain[0])
