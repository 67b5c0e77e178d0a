"""Training in rounds against a reference that shares no code with it, over options and events that are drawn.

Up to four peers make inner steps, offer, are counted, counted in part or late, fall behind, come, leave, lose their
leases and are started again; with every outer optimizer, codec and overlap, fragments and mixing. After each event the
parameters of the peer are those that docs/ describe, what it offers is what it should, theta is moved by the weighted
mean of those whom the round names and by nothing else, and what encoding lost is kept once.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
from dlc.comm.grid import Grid
from dlc.flat import FlatView
from dlc.runspec import OuterSpec
from dlc.train.offers import Work
from dlc.train.outer_loop import OuterLoop
from tests.train import reference
from tests.train.reference import FEEDBACK, QUANTISED, Outer, Vector, clips_of, mean_of
from tests.train.table import Offered, Round, Table

EVENTS = 160
LEASE = 40
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of a parameter that is placed; twice what it can be."""
NEAR = 3e-5
"""Of sums of numbers near 1 in fp32."""


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


class Options:
    """Of one run, as they are drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.dtype = rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16])
        self.overlap = rng.choice(["none", "delayed", "eager"])
        self.fragments = rng.choice([1, 1, 2, 3])
        self.mixing = rng.choice([0.0, 0.25, 0.5]) if self.overlap != "none" else 0.0
        codecs = [codec for codec in QUANTISED if codec != "topk" or self.dtype == torch.float32]  # else there are ties
        self.codec = rng.choice(codecs)
        self.chunk_elems = rng.choice([5, 7, 16, 64, 1000])
        self.lease_len = rng.choice([0, LEASE])
        self.halves = rng.random() < 0.25
        """A hook offers half of what was learned."""
        optimizer, schedule = rng.choice(["nesterov", "nesterov", "sgd", "adam"]), rng.choice(["constant", "linear"])
        schedule = rng.choice([schedule, "cosine"])
        momentum = {"momentum": rng.choice([0.0, 0.5, 0.9])} if optimizer == "nesterov" else {}
        self.outer = OuterSpec(
            optimizer=optimizer,
            lr=rng.choice([0.3, 0.7, 1.0]),
            schedule=schedule,
            warmup_rounds=rng.choice([0, 2]),
            total_rounds=rng.choice([3, 6]) if schedule != "constant" else 0,
            clip=rng.choice(["none", "median"]),
            **momentum,
        )
        shapes = random.Random(rng.random())
        self.sizes = [(shapes.randint(1, 9), shapes.randint(1, 9)) for _ in range(shapes.randint(2, 4))]
        self.scalar, self.frozen = shapes.random() < 0.5, shapes.random() < 0.4

    def model(self) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in self.sizes))
        if self.scalar:
            model.register_parameter("scalar", nn.Parameter(torch.tensor(0.3)))
        model[0].requires_grad_(not self.frozen)
        return model.to(self.dtype)

    def __repr__(self) -> str:
        return str(vars(self))


class Sent:
    """What a peer has on the table, as the reference has it."""

    def __init__(self, offer: Offered, fragment: int, v: Vector, d: Vector, steps: int) -> None:
        self.offer, self.fragment, self.v, self.d, self.steps = offer, fragment, v, d, steps


class Peer:
    """One peer, and what it ought to hold."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.options, self.rng = run, run.options, run.rng
        self.seat = run.table.seat(name)
        self.model = self.options.model()
        self.view = FlatView.of(self.model)
        start = run.start if not run.table.rounds and len(run.table.seats) == 1 else run.start + 0.5
        self.view.scatter(torch.from_numpy(start).float())
        self.loop = self._opened()
        self.residual = [np.zeros(run.table.grid.numel) for _ in run.places]
        self.tokens: list[int] = []
        """Of the steps that no round has counted."""
        self.blocks: list[int] = []
        self.share = 1.0
        self.sent: Sent | None = None
        self.ahead: tuple[Any, Vector] | None = None
        """By how much an eager peer ought to have moved which of its parameters in advance."""
        self.leapt = np.zeros_like(run.start)
        """By how much it has."""
        self.missed = False
        """It may offer once more what it had offered, as it is; the next step begins at the newest theta."""
        self.base, self.d = run.thetas[self.seat.t], np.zeros_like(run.start)
        self.greatest = np.abs(self.base)
        """That each parameter has been since it was placed: what it was rounded to then."""
        self.check("begins")

    def _opened(self, residual: Tensor | None = None) -> OuterLoop:
        options = self.options
        loop = OuterLoop(
            self.seat,  # type: ignore[arg-type]
            self.view,
            channel="train",
            outer=options.outer,
            overlap=options.overlap,
            fragments=options.fragments,
            mixing=options.mixing,
            hook=(lambda d: d.mul_(0.5)) if options.halves else None,
        )
        if self.seat.state is not None:  # it was here before
            loop.state.restore(self.seat.state.export())
        lengths = {"chunk_elems": options.chunk_elems, "lease_len": options.lease_len}
        loop.open(codec=options.codec, residual=residual, **lengths)
        return loop

    # ---------------------------------------------------------------- what holds

    def local(self) -> Vector:
        return self.view.gather(torch.empty(self.view.numel)).double().numpy()

    def expected(self) -> Vector:
        local = self.base - self.d
        if self.ahead is not None:
            local[self.ahead[0]] += self.ahead[1]
        return local

    def check(self, what: str) -> None:
        local, expected = self.local(), self.expected()
        self.greatest = np.maximum(self.greatest, np.abs(expected))
        off = ROUNDING[self.options.dtype] * np.maximum(self.greatest, np.abs(self.base)) + NEAR
        assert (np.abs(local - expected) <= off).all(), f"{what}: the parameters are off by {local - expected}"
        theta = self.loop.state.vectors()[1][0].numpy()
        close(theta, self.run.thetas[self.seat.t], f"{what}: theta")
        residual = self.loop.outgoing.residual
        if residual is not None:
            close(residual.numpy(), np.concatenate(self.residual), f"{what}: the residual")

    def moved(self, kept: bool) -> None:
        """The peer goes on from its newest theta, with what it has learned or without."""
        self.base, self.ahead, self.missed = self.run.thetas[self.seat.t], None, False
        self.leapt = np.zeros_like(self.leapt)
        if not kept:
            self.d, self.tokens, self.blocks = np.zeros_like(self.d), [], []
        self.greatest = np.abs(self.expected())

    # ---------------------------------------------------------------- events

    @property
    def work(self) -> Work:
        return Work(tuple(self.blocks), self.blocks[-1] + 1) if self.blocks else Work()

    @property
    def weight(self) -> float:
        return float(sum(self.tokens))

    def step(self) -> None:
        """An inner step, as far as there is data; what has to be done before it."""
        if self.loop.displaced:
            kept = self.loop.resume(self.work)
            if not self.loop.waiting or self.missed:
                self.moved(kept or self.loop.waiting)
            if not kept and self.loop.waiting:
                self.settle()
                return
            self.check("resumes")
        blocks = list(range(len(self.blocks) + 1))
        if self.options.lease_len:
            lease = self.loop.model.newest().lease
            assert lease is not None
            blocks = lease.take(len(self.blocks) + 1)[0]
            if len(blocks) == len(self.blocks) or blocks[:-1] != self.blocks:
                return
        self.blocks = blocks
        self.tokens.append(self.rng.choice([1, 7, 64]))
        before, size = self.local(), 10 ** self.rng.uniform(-4, -1)
        noise = torch.Generator().manual_seed(self.rng.randrange(2**31))
        with torch.no_grad():
            for tensor in self.view.tensors:
                tensor.add_((torch.randn(tensor.shape, generator=noise) * size).to(tensor.dtype))
        self.d = self.d - (self.local() - before)

    def offer(self) -> None:
        before = self.local()
        if self.loop.offer(self.weight, self.work):
            self._is_offered()
            self.leapt = self.local() - before
        else:
            self.moved(kept=False)
        self.check("offers")

    def grow(self) -> None:
        assert self.sent is not None
        before = self.local()
        if not self.loop.grow(self.weight, self.work):
            self.sent = None
            self.moved(kept=False)
        elif self._offer() is not self.sent.offer:
            self._is_offered()
            self.leapt = self.leapt + self.local() - before
        self.check("offers more")

    def _offer(self) -> Offered:
        assert self.loop._offer is not None
        return self.loop._offer.pending  # type: ignore[return-value]

    def _is_offered(self) -> None:
        run, t = self.run, self.loop.position.t
        fragment = t % len(run.places)
        at, offer = run.places[fragment], self._offer()
        hooked = self.d[at] * (0.5 if self.options.halves else 1.0)
        v = np.zeros(run.table.grid.numel)
        v[: len(at)] = hooked
        v += FEEDBACK.get(self.options.codec, 0.0) * self.residual[fragment]
        self.sent = Sent(offer, fragment, v, self.d, len(self.tokens))
        if offer.overtaken:
            return
        offered = offer.values().double().numpy()
        coded = not isinstance(offer.vector, Tensor)
        off = 2 * reference.ROUNDING[self.options.codec] * np.abs(v).max() if coded else 0.0
        close(offered, v, "what is offered", off)
        assert offer.part.weight == self.weight and offer.part.upto == self.work.upto
        if self.options.outer.clip == "median":
            assert offer.norm == pytest.approx(float(np.linalg.norm(v)), rel=1e-4, abs=1e-5)
        if not coded:
            self.sent.v = offered
        if self.options.overlap == "eager" and self.seat.t == t:
            moved = run.outers[t].foreseen(hooked * self.share)
            self.ahead = at, moved - (self.base[at] - self.d[at])

    def settle(self) -> None:
        """The round is over."""
        assert self.sent is not None
        before, sent, self.sent = self.local(), self.sent, None
        steps_since = len(self.tokens) > sent.steps
        settled = self.loop.settle(self.work)
        if settled.counted:
            assert settled.report is not None
            at = self.run.places[sent.fragment]
            self._keep_lost(sent, self.run.table.rounds[settled.report.t - 1])
            weights = {share.peer: share.weight for share in settled.report.contributors}
            self.share = weights[self.seat.id] / sum(weights.values())
            self.tokens, self.blocks = self.tokens[sent.steps :], self.blocks[sent.steps :]
            self.d = self.d.copy()
            self.d[at] -= sent.d[at]
            mixed = self.options.mixing
            if settled.kept and mixed:
                theta, made = self.run.thetas[self.seat.t], before - self.leapt
                self.d[at] = theta[at] - ((1 - mixed) * (theta[at] - self.d[at]) + mixed * made[at])
            self.moved(settled.kept)
        elif self.loop.displaced and not steps_since:
            self.ahead, self.missed = None, True
        else:
            self.moved(settled.kept)
        self.check("settles")

    def _keep_lost(self, sent: Sent, done: Round) -> None:
        codec = self.options.codec
        for chunk in done.chunks:
            if codec in FEEDBACK and sent.offer.part in chunk.included:
                part = slice(chunk.start, chunk.stop)
                self.residual[sent.fragment][part] = sent.v[part] - QUANTISED[codec](sent.v[part])

    def look(self) -> None:
        """Between two steps: a round may have passed."""
        if self.loop.waiting or self.loop.displaced or not self.loop.model.moved():
            return
        if self.tokens:
            self.moved(self.loop.rebase(self.work))
        else:
            self.loop.refresh()
            self.moved(kept=self.options.fragments > 1 or self.options.mixing > 0)
        self.check("sees a round pass")

    def validate(self) -> None:
        if self.loop.waiting or self.loop.displaced:
            return
        before = self.local()
        with self.loop.model.at_rest():
            close(self.local(), self.base, "at rest", ROUNDING[self.options.dtype] * np.abs(self.base).max())
        assert (self.local() == before).all()

    def start_again(self) -> None:
        """From what a checkpoint has."""
        local = None if self.loop.waiting or self.loop.displaced else self.loop.model.local()
        if local is None:
            return
        residual = self.loop.outgoing.residual
        residual = residual.clone() if residual is not None else None
        self.view.scatter(torch.zeros(self.view.numel))
        self.loop, self.share = self._opened(residual), 1.0
        assert self.loop.take_up(local, self.loop.position.digest, Work())
        if self.options.dtype != torch.float32:  # theta is what it is: the rounding of what was saved is part of d
            self.d = self.loop.model.measure().double().numpy()
        self.check("starts again")


class Run:
    """Peers of one run, and the reference's theta after each of its rounds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.options = options = Options(self.rng)
        view = FlatView.of(options.model())
        self.places = reference.fragments(view.sizes(), options.fragments)
        noise = torch.Generator().manual_seed(seed)
        view.scatter(torch.randn(view.numel, generator=noise))
        self.start = view.gather(torch.empty(view.numel)).double().numpy()
        self.outers = [Outer(self.start, options.outer, self.places)]
        numel = max(map(len, self.places))
        self.table = Table(Grid(numel, options.chunk_elems, options.codec), options.lease_len)
        self.peers: list[Peer] = []
        for _ in range(self.rng.randint(1, 4)):
            self.join()

    @property
    def thetas(self) -> list[Vector]:
        return [outer.theta for outer in self.outers]

    def join(self) -> None:
        if self.peers:
            self.catch_up(self.peers[0])
        self.peers.append(Peer(self, f"{len(self.peers)}-{self.rng.randrange(2**20):05x}"))

    def leave(self) -> None:
        if len(self.peers) > 1:
            self.table.leave(self.peers.pop(self.rng.randrange(len(self.peers))).seat)

    def catch_up(self, peer: Peer) -> None:
        while peer.seat.t < len(self.table.rounds):
            peer.seat.catch_up()

    def round(self) -> None:
        """Of some of those who have offered, not all of them in all chunks."""
        rng, n_chunks = self.rng, self.table.grid.n_chunks
        ready = [p for p in self.peers if p.seat.offered is not None and p.seat.t == len(self.table.rounds)]
        chosen = rng.sample(ready, rng.randint(1, len(ready))) if ready else []
        if not chosen:
            return
        shares = [1.0 if rng.random() < 0.7 else rng.choice([0.3, 0.8]) for _ in chosen]
        included = {
            p.seat: [rng.random() < share for _ in range(n_chunks)] for p, share in zip(chosen, shares, strict=True)
        }
        offers = {p.seat.voter: p.sent for p in chosen if p.sent is not None}
        done = self.table.commit(included)
        norms = [float(np.linalg.norm(sent.v)) for sent in offers.values()]
        clipped = self.options.outer.clip == "median"
        clips = dict(zip(offers, clips_of(norms) if clipped else [1.0] * len(norms), strict=True))
        mean, there = np.zeros(self.table.grid.numel), np.zeros(self.table.grid.numel, bool)
        for k, chunk in enumerate(done.chunks):
            part = slice(chunk.start, chunk.stop)
            inside = [p for p in chosen if included[p.seat][k]]
            assert {p.seat.voter for p in inside} == {given.voter for given in chunk.included}
            if chunk.mean is None:
                assert not inside
                continue
            of = [offers[p.seat.voter].offer for p in inside]
            sent = [QUANTISED[self.options.codec](offer.values()[part].double().numpy()) for offer in of]
            weights = [offer.part.weight for offer in of]
            exact = mean_of(sent, weights, [clips[p.seat.voter] for p in inside])
            given = chunk.mean.double().numpy()
            off = 1.1 * reference.ROUNDING[self.options.codec] * np.abs(exact).max() + 1e-6 * np.abs(sent).max()
            close(given, exact, f"the mean of chunk {k}", off, 0.0)
            mean[part], there[part] = given, True  # as it is told: nothing of its encoding adds up
        size = len(self.outers[-1].next)
        self.outers.append(self.outers[-1].after(mean[:size], there[:size]))
        for peer in self.peers:
            if rng.random() < 0.75 and peer.seat.t < len(self.table.rounds):
                peer.seat.catch_up()

    def event(self) -> None:
        rng = self.rng
        peer = rng.choice(self.peers)
        loop, seat, x = peer.loop, peer.seat, rng.random()
        if x < 0.3:
            rests = self.options.overlap == "none" and loop.waiting and rng.random() < 0.7
            for _ in range(0 if rests else rng.randint(1, 3)):
                peer.step()
        elif x < 0.6:
            if peer.tokens and not loop.waiting:
                peer.offer()
        elif x < 0.72:
            if seat.t < len(self.table.rounds):
                seat.catch_up()
        elif x < 0.76:
            if peer.sent is not None and len(peer.tokens) > peer.sent.steps:
                peer.grow()
        elif x < 0.8:
            seat.knows, seat.planned = rng.random() < 0.5, rng.random() < 0.5
        elif x < 0.82:
            if len(self.peers) < 5:
                self.join()
        elif x < 0.83:
            self.leave()
        elif x < 0.86:
            peer.validate()
        elif x < 0.89:
            peer.start_again()
        elif x < 0.9 and seat.t == len(self.table.rounds):
            self.table.lose_lease(seat)
        if rng.random() < 0.3:
            self.round()
        if peer in self.peers and peer.sent is not None and seat.offered is None and rng.random() < 0.7:
            peer.settle()
        elif rng.random() < 0.7:
            peer.look()


def close(given: Any, exact: Vector, what: str, off: float = 0.0, near: float = NEAR) -> None:
    worst = float(np.abs(given - exact).max())
    assert worst <= off + near * (1.0 + float(np.abs(exact).max())), f"{what} is off by {worst}"


@pytest.mark.parametrize("seed", range(24))
def test_peers_hold_what_the_papers_say_whatever_happens(seed: int) -> None:
    run = Run(seed)
    for number in range(EVENTS):
        try:
            run.event()
        except AssertionError as error:
            raise AssertionError(f"event {number} of {run.options}: {error}") from error
    for peer in run.peers:
        run.catch_up(peer)
    assert len({peer.seat.position("train").digest for peer in run.peers}) == 1
