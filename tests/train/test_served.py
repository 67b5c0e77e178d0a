"""The parts of the strategy "parameter-server" that need no swarm."""

from __future__ import annotations

import math

import pytest

from dlc.train.data import OWN_BLOCKS, first_block
from dlc.train.served import share_of_steps


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        (100.0, [], 20),
        (100.0, [50.0], 20),
        (50.0, [100.0, 80.0], 10),
        (10.0, [100.0], 2),
        (1.0, [1e9], 1),
        (100.0, [math.inf, math.nan, -5.0], 20),
    ],
)
def test_a_slower_trainer_makes_fewer_steps_in_proportion(own: float, others: list[float], steps: int) -> None:
    assert share_of_steps(20, own, others) == steps


def test_each_trainer_draws_samples_in_an_order_of_its_own() -> None:
    firsts = [first_block(0, f"peer{i}") for i in range(50)]
    assert len(set(firsts)) == 50 and all(first % OWN_BLOCKS == 0 for first in firsts)
    assert firsts[0] == first_block(0, "peer0") != first_block(1, "peer0")
