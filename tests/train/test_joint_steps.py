"""Data-parallel steps of several peers against a reference in float64 that shares no code with them.

Peers come, go, and die in the middle of a step, when some of its chunks have their gradients and others do not; with
every codec, optimizer, clipping and schedule. After each step theta is what AdamW or SGD makes of the mean gradient, by
tokens, of those who are in it, and has the same bits on all peers, those who came late too.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from dlc.comm.grid import Grid
from dlc.runspec import InnerSpec, RunSpec
from dlc.train.inner import learning_rate
from dlc.train.joint import JointState, joint_spec
from dlc.train.outer_step import outer_lr
from tests.train.reference import QUANTISED, ROUNDING, Joint, Vector, mean_of
from tests.train.table import Seat, Table

STEPS = 20
SHAPES = [(7,), (5, 6), (3,), (4, 2, 2), (1,), (9, 3)]


class Run:
    """Peers at one table, and what theta ought to be."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.codec = rng.choice(["fp32", "fp32", "fp16", "bf16"])
        optimizer, total = rng.choice(["adamw", "adamw", "sgd"]), rng.choice([0, STEPS])
        options = {"betas": (0.8, 0.95)} if optimizer == "adamw" and rng.random() < 0.5 else {}
        self.inner = InnerSpec(
            optimizer=optimizer,
            lr=0.02,
            warmup_steps=rng.choice([1, 5]),
            weight_decay=rng.choice([0.0, 0.3]),
            clip_norm=rng.choice([0.0, 1.0]),
            min_lr_ratio=0.1,
            **options,
        )
        self.spec = RunSpec(strategy="data-parallel", rounds=total, codec=self.codec, inner=self.inner)
        numel = sum(int(np.prod(shape)) for shape in SHAPES)
        self.start = self.noise.standard_normal(numel)
        self.table = Table(Grid(numel, rng.choice([5, 16, 200]), self.codec), 0)
        decays = np.concatenate([np.full(int(np.prod(shape)), len(shape) > 1) for shape in SHAPES])
        self.joint = Joint(self.start, self.inner, total, decays)
        self.states: dict[Seat, JointState] = {}
        for _ in range(rng.randint(1, 4)):
            self.join()

    def join(self) -> None:
        """A peer, which holds something else before it has the state of the others."""
        theta = torch.from_numpy(self.start + (1.0 if self.states else 0.0)).float()
        tensors = [torch.empty(shape) for shape in SHAPES]
        state = JointState(theta, tensors, joint_spec(self.spec), self.inner)
        seat = self.table.seat(f"{len(self.table.rounds)}-{len(self.states)}")
        seat.open("train", state, codec=self.codec, chunk_elems=self.table.grid.chunk_elems)
        self.states[seat] = state

    def step(self) -> None:
        sent: dict[Seat, tuple[Vector, float]] = {}
        size = 10.0 ** self.rng.uniform(-5, 1)
        for seat in self.states:
            g = torch.from_numpy(self.noise.standard_normal(len(self.start)) * size).float()
            tokens = float(self.rng.choice([64, 64, 32, 7]))
            seat.contribute("train", g, weight=tokens)
            sent[seat] = g.double().numpy(), tokens
        late = {seat for seat in sent if self.rng.random() < 0.1}
        dying = {seat for seat in sent if self.rng.random() < 0.15}
        chunks = range(self.table.grid.n_chunks)
        included = {s: [s not in dying or self.rng.random() < 0.5 for _ in chunks] for s in sent if s not in late}
        self.table.commit(included)
        mean, there = np.zeros_like(self.start), np.zeros(len(self.start), bool)
        for chunk in chunks:
            part = slice(*self.table.grid.span(chunk))
            who = [seat for seat, whether in included.items() if whether[chunk]]
            if who:
                parts = [QUANTISED[self.codec](sent[seat][0][part]) for seat in who]
                weights = [sent[seat][1] for seat in who]
                mean[part] = QUANTISED[self.codec](mean_of(parts, weights, [1.0] * len(who)))
                there[part] = True
        self.joint.step(mean, there)
        for seat in list(self.states):
            if seat in dying and len(self.states) > 1:
                del self.states[seat]
                self.table.leave(seat)
            else:
                seat.catch_up()

    def check(self) -> None:
        thetas: list[Tensor] = [state.vectors()[1][0] for state in self.states.values()]
        assert len({state.digest() for state in self.states.values()}) == 1
        # A mean that lies between two numbers of the codec may be rounded either way; Adam's steps have one size.
        off = 1e-5 + self.joint.moved * 2 * ROUNDING[self.codec]
        assert np.abs(thetas[0].double().numpy() - self.joint.theta).max() <= off


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_peers_that_come_and_die_are_those_of_one_process(seed: int) -> None:
    run = Run(seed)
    for _ in range(STEPS):
        run.step()
        run.check()
        if run.rng.random() < 0.15 and len(run.states) < 4:
            run.join()


@pytest.mark.parametrize(("rounds", "warmup"), [(9, 0), (9, 4), (3, 7), (0, 4), (0, 0)])
def test_the_rate_of_each_step_is_that_of_the_inner_schedule_also_where_the_run_ends_in_the_warm_up(
    rounds: int, warmup: int
) -> None:
    inner = InnerSpec(lr=0.02, warmup_steps=warmup, min_lr_ratio=0.1)
    rule = joint_spec(RunSpec(strategy="data-parallel", rounds=rounds, inner=inner))
    here = [outer_lr(rule, t) for t in range(1, 13)]
    assert here == pytest.approx([learning_rate(step, 0.02, warmup, rounds, 0.1) for step in range(12)], rel=1e-12)
