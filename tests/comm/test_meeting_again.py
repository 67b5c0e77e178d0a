"""Calls of one key again and again, by peers that come late, give up, wait anew, die, freeze and lose messages: nobody
waits for ever, a call is in one group at most, and each chunk is the mean of those that the report names."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dlc.comm.calls import Call, GroupDone, GroupFailed, MeetingFailed
from dlc.comm.crowd import GATHER_SHOWN_MAX
from dlc.comm.grid import Grid
from dlc.sim.meshnet import Host, MeshNet

NUMEL, CHUNK, KEY = 96, 32, "k"
LATENCIES = ((0.001, 0.002), (0.05, 0.15), (0.2, 0.3))


class Attempt:
    """One call of one peer; its vector is `value` everywhere."""

    def __init__(self, net: MeshNet, host: Host, value: float, **options: Any) -> None:
        self.host, self.value, self.first = host, value, len(host.told)
        self.out, self.given_up = torch.full((NUMEL,), float("nan")), False
        self.call = call = Call(KEY, Grid(NUMEL, CHUNK, "fp32"), torch.full((NUMEL,), value), self.out, **options)
        net.act(host, lambda mesh, now: mesh.meet(call, now))

    @property
    def end(self) -> Any:
        told = [] if self.given_up else self.host.told[self.first :]
        return next((e for e in told if isinstance(e, GroupDone | GroupFailed | MeetingFailed)), None)

    @property
    def over(self) -> bool:
        return self.given_up or self.end is not None or self.host.dead or self.host.frozen


class Schedule:
    """What happens with one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        loss, duplicates = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.05])
        latency_s, detect_s = rng.choice(LATENCIES), rng.uniform(0.3, 3.0)
        self.net = net = MeshNet(seed, loss=loss, duplicates=duplicates, latency_s=latency_s, detect_s=detect_s)
        self.hosts = net.add(rng.randint(2, 4), up_Bps=rng.choice([1e3, 1e5]))
        self.each, self.made = rng.randint(2, 4), dict.fromkeys((host.name for host in self.hosts), 0)
        self.attempts: list[Attempt] = []
        for host in self.hosts:
            self._later(rng.choice([0.0, 0.0, 0.01, 0.1, 1.0]), self.start, host)
        if rng.random() < 0.3:
            fault = rng.choice([net.kill, net.freeze, net.leave])
            self._later(rng.uniform(0.0, 3.0), fault, rng.choice(self.hosts))

    def _later(self, seconds: float, act: Any, *args: Any) -> None:
        self.net.clock.at(self.net.now + seconds, act, *args)

    def start(self, host: Host) -> None:
        rng, names = self.rng, [h.name for h in self.hosts]
        if host.dead or host.frozen or self.made[host.name] == self.each:
            return
        self.made[host.name] += 1
        least = rng.choice([1, 2, len(names)])
        options: dict[str, Any] = {"least": least, "patience_s": rng.choice([2.0, 6.0]), "budget_s": 8.0}
        match rng.randrange(12):
            case 0 | 1:
                options["gather"] = bytes(GATHER_SHOWN_MAX + 1)
            case 2:
                options["target"] = max(least, rng.randint(2, len(names)))
            case 3:
                options["expected"] = tuple(rng.sample(names, rng.randint(1, len(names))))
            case 4:
                options["owns"] = False
        self.attempts.append(attempt := Attempt(self.net, host, rng.uniform(1, 1000), **options))
        if rng.random() < 0.2:
            self._later(rng.choice([0.01, 0.1, 0.3, 1.0, 3.0]), self.give_up, attempt)
        self._look(attempt)

    def _look(self, attempt: Attempt) -> None:
        """The next call of this peer follows when this one has ended."""
        if attempt.end is not None:
            self._later(self.rng.choice([0.0, 0.05, 0.5]), self.start, attempt.host)
        elif not attempt.over:
            self._later(0.01, self._look, attempt)

    def give_up(self, attempt: Attempt) -> None:
        if not attempt.over:
            attempt.given_up = True
            self.net.act(attempt.host, lambda mesh, now: mesh.give_up(attempt.call, now))
            self._later(self.rng.choice([0.0, 0.05, 0.2, 0.6]), self.start, attempt.host)

    def run(self) -> list[Attempt]:
        def done() -> bool:
            alive = [host for host in self.hosts if not (host.dead or host.frozen)]
            return all(a.over for a in self.attempts) and all(self.made[h.name] == self.each for h in alive)

        self.net.until(done, 240.0)
        return [attempt for attempt in self.attempts if isinstance(attempt.end, GroupDone)]


def means(names: Iterable[str], values: dict[str, list[float]]) -> Iterable[tuple[tuple[str, ...], float]]:
    """Of all sets of these peers, the largest first, and whichever call each may be in with."""
    names = sorted(names)
    for n in range(len(names), 0, -1):
        for some in itertools.combinations(names, n):
            for given in itertools.product(*(values[name] for name in some)):
                yield some, sum(given) / n


@pytest.mark.parametrize("seed", range(40))
def test_each_call_ends_in_one_group_at_most_and_with_a_true_mean(seed: int) -> None:
    schedule = Schedule(seed)
    averaged = schedule.run()
    all_values, of_group = defaultdict[str, list[float]](list), dict[tuple[int, str], Attempt]()
    for attempt in schedule.attempts:
        all_values[attempt.host.name].append(attempt.value)
    for attempt in averaged:
        member = attempt.end.outcome.nonce, attempt.host.name
        assert of_group.setdefault(member, attempt) is attempt, "twice in one group"
    for attempt in averaged:
        outcome = attempt.end.outcome
        values = dict(all_values)
        for name in all_values:
            if (outcome.nonce, name) in of_group:
                values[name] = [of_group[outcome.nonce, name].value]
        counted = dict.fromkeys(outcome.included, 0)
        for start in range(0, NUMEL, CHUNK):
            chunk = attempt.out[start : start + CHUNK]
            assert (chunk == chunk[0]).all(), "a chunk of several calls"
            got = chunk[0].item()
            found = next((some for some, mean in means(counted, values) if abs(mean - got) <= 3e-7 * got), None)
            assert found is not None, "a chunk is no mean of those named"
            for name in found:
                counted[name] += CHUNK
        assert counted == outcome.included
    for host in schedule.hosts:
        assert not host.bad and (host.dead or host.frozen or not host.mesh._meetings)
