"""The step of a large model takes long: its peer is alive to others meanwhile, and nothing overtakes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dlc.comm import node as node_module
from dlc.comm.ids import Voter
from dlc.comm.messages import Ping
from dlc.comm.node import Node
from dlc.errors import SwarmClosed
from dlc.peer import Peer
from dlc.sim.toy import ToyState
from tests.helpers import wait_until
from tests.swarm import QUICK, swarm, together

ELEMENTS = 1000
LIMIT_S = 180.0


class SlowState(ToyState):
    """Stays in the middle of a step for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__(ELEMENTS, 1)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.steps: list[tuple[int, str]] = []
        """(round, the thread that moved the state)."""

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        self.entered.set()
        if not self.go_on.wait(LIMIT_S):
            raise AssertionError("nobody let the step go on")
        super().step(t, means)
        self.steps.append((t, threading.current_thread().name))


@contextmanager
def training(monkeypatch: pytest.MonkeyPatch, bytes_min: int = 0) -> Iterator[tuple[list[Peer], list[SlowState]]]:
    monkeypatch.setattr(node_module, "AT_LENGTH_BYTES_MIN", bytes_min)
    with swarm(2, timeouts=QUICK) as peers:  # which ping often
        states = [SlowState() for _ in peers]
        try:
            together(peers, lambda p, i: p.open("train", states[i], codec="fp32", chunk_elems=100))  # type: ignore[arg-type, return-value]
            yield peers, states
        finally:
            for state in states:
                state.go_on.set()


def contribute(peer: Peer, i: int) -> Callable[[], object]:
    pending = peer.contribute("train", torch.full((ELEMENTS,), float(i)), weight=1.0, patience_s=LIMIT_S)
    return lambda: pending.wait(LIMIT_S)


@pytest.mark.parametrize("slow", [0, 1])  # one of them coordinates
def test_a_peer_in_the_middle_of_a_long_step_answers_pings_and_holds_nobody_up(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Voter] = []
    breathe = Node.breathe

    def counted(self: Node, now: float, sender: Voter | None = None, message: object = None) -> object:
        if isinstance(message, Ping):
            answered.append(self.me)
        return breathe(self, now, sender, message)

    monkeypatch.setattr(Node, "breathe", counted)
    with training(monkeypatch) as (peers, states):
        fast = 1 - slow
        states[slow].go_on.clear()
        waits = [contribute(p, i) for i, p in enumerate(peers)]
        assert states[slow].entered.wait(LIMIT_S)
        waits[fast]()  # its round ends while the other still moves its state, whoever coordinated
        assert not states[slow].steps
        wait_until(lambda: answered.count(peers[slow].voter) >= 12, LIMIT_S, "a dozen pings are answered")
        assert [m.alive for m in peers[fast].members()] == [True, True]
        # Its own trainer goes on too: it looks at the others, and tells of itself.
        assert [m.alive for m in peers[slow].members()] == [True, True]
        peers[slow].describe(speed=5.0)
        assert not states[slow].steps
        # The next round's messages come now, and are taken when the step is done.
        more = contribute(peers[fast], fast)
        states[slow].go_on.set()
        waits[slow]()
        last = contribute(peers[slow], slow)
        more()
        last()
        assert [t for t, _ in states[slow].steps] == [t for t, _ in states[fast].steps] == [1, 2]
        assert states[0].digest() == states[1].digest()
        wait_until(lambda: [m.speed for m in peers[fast].members() if not m.me] == [5.0], LIMIT_S)
        assert {name for state in states for _, name in state.steps} == {"dlc-work"}


def test_a_short_step_is_made_at_once_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(monkeypatch, bytes_min=1 << 20) as (peers, states):
        for wait in [contribute(p, i) for i, p in enumerate(peers)]:
            wait()
        assert [name for state in states for _, name in state.steps] == ["dlc-driver", "dlc-driver"]


class TinyState(SlowState):
    """Tells whether numbers below the normal range were zero in a step."""

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        super().step(t, means)
        self.smallest = torch.full((1,), 1e-38).div_(100.0).view(torch.int32).item()


@pytest.mark.parametrize("bytes_min", [0, 1 << 20])
def test_a_program_that_flushes_tiny_numbers_to_zero_has_the_state_of_the_others(
    bytes_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_at_length.SlowState", TinyState)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        assert torch.full((1,), 1e-38).div_(100.0).view(torch.int32).item() == 0
        with training(monkeypatch, bytes_min) as (peers, states):
            for wait in [contribute(p, i) for i, p in enumerate(peers)]:
                wait()
            assert [state.smallest for state in states if isinstance(state, TinyState)] == [71362] * 2
        assert torch.full((1,), 1e-38).div_(100.0).view(torch.int32).item() == 0, "the program's own setting stays"
    finally:
        torch.set_flush_denormal(False)


def test_an_error_in_a_long_step_ends_the_peer_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(monkeypatch) as (peers, states):

        def broken(t: int, means: object) -> None:
            raise MemoryError("no room for the step")

        states[0].step = broken  # type: ignore[method-assign, assignment]
        waits = [contribute(p, i) for i, p in enumerate(peers)]
        with pytest.raises((MemoryError, SwarmClosed), match="no room for the step"):
            waits[0]()
        waits[1]()
        assert [t for t, _ in states[1].steps] == [1]
