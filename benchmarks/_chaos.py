"""The pure parts of chaos.py: a schedule of faults from a seed, and the verdict on what the processes told.

A schedule is applicable as it stands: it never names a peer that is down, and at most `down_max(n)` peers are down or
frozen at once, so that a quorum lives. Who was killed is restarted in its state directory; who left is replaced by a
newcomer sooner or later.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

KINDS = ("kill", "freeze", "leave", "join")
KILL_SPAN_S = (1.0, 15.0)
"""From a SIGKILL to the restart."""
FREEZE_SPAN_S = (2.0, 25.0)
"""From SIGSTOP to SIGCONT: below and beyond the 15 s after which a peer knows that it was frozen."""
GROWTH = 1
"""Newcomers beyond the number at the start."""
START_S = 20.0
"""A restarted process or a newcomer counts as down for so long: it imports, joins and fetches the state."""


@dataclasses.dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    """One of KINDS, or what ends one: "restart", "thaw"."""
    peer: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.kind:<7} {self.peer}"


def down_max(n: int) -> int:
    """How many of n may be out at once: fewer than half."""
    return max(1, (n - 1) // 2)


def schedule(seed: int, names: Sequence[str], every_s: float, until_s: float) -> list[Fault]:
    """A fault each `every_s`, with some jitter, and what ends each; nothing begins or ends after `until_s`."""
    rng = random.Random(seed)
    up, back = list(names), {}  # back: name -> when it is up again
    born, faults, kinds = len(names), [], Counter[str]()
    at_s = every_s * rng.uniform(0.5, 1.0)
    while at_s < until_s:
        for name in [name for name, when in back.items() if when <= at_s]:
            del back[name]
            up.append(name)
        up.sort()
        total = len(up) + len(back)
        may = [k for k in KINDS if k == "join" or len(back) < down_max(total) and len(up) > 2]
        if total >= len(names) + GROWTH:
            may = [k for k in may if k != "join"]
        if total < len(names):
            may = [k for k in may if k != "leave"]
        if may:
            kind = min(may, key=lambda k: (kinds[k], rng.random()))
            kinds[kind] += 1
            if kind == "join":
                name, born = f"p{born}", born + 1
                back[name] = at_s + START_S
            else:
                name = rng.choice(up)
                up.remove(name)
            faults.append(Fault(at_s, kind, name))
            if kind in ("kill", "freeze"):
                end_s = min(until_s, at_s + rng.uniform(*(KILL_SPAN_S if kind == "kill" else FREEZE_SPAN_S)))
                faults.append(Fault(end_s, "restart" if kind == "kill" else "thaw", name))
                back[name] = end_s + (START_S if kind == "kill" else 1.0)
        at_s += every_s * rng.uniform(0.75, 1.25)
    return sorted(faults, key=lambda f: f.at_s)


@dataclasses.dataclass
class Round:
    """What one process told of one round."""

    at_s: float
    t: int
    head: str
    digest: str
    weight: float


@dataclasses.dataclass
class Life:
    """One process."""

    name: str
    started_s: float
    rounds: list[Round] = dataclasses.field(default_factory=list)
    synced_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    ending: str = ""
    """What we did to end it: "kill", "leave" or "end"; empty: it had no reason to end."""
    frozen: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(from, to) of each freeze."""
    end_t: int | None = None
    end_digest: str = ""
    said: list[str] = dataclasses.field(default_factory=list)
    """The end of its log, if it ended badly."""


@dataclasses.dataclass(frozen=True)
class Span:
    """What is judged: from the first round of all until the last fault has had time to heal."""

    from_s: float
    to_s: float


EXIT_CODES = {"kill": -9, "leave": 0, "end": 0}


def living_s(lives: Sequence[Life], span: Span) -> float:
    """Peer-seconds: from having the swarm's state to the end, without the time frozen."""
    total = 0.0
    for life in lives:
        if life.synced_s is None:
            continue
        begin, end = max(span.from_s, life.synced_s), min(span.to_s, life.ended_s if life.ended_s else span.to_s)
        frozen = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in life.frozen)
        total += max(0.0, end - begin - frozen)
    return total


def throughput(lives: Sequence[Life], span: Span) -> float:
    """Tokens committed per second and living peer, from the span's first round to its last: no round is cut in two."""
    first: dict[str, Round] = {}
    for one in sorted((r for life in lives for r in life.rounds), key=lambda r: r.at_s):
        first.setdefault(one.head, one)  # every peer tells of it; it counts once
    rounds = [r for r in first.values() if span.from_s <= r.at_s < span.to_s]
    if len(rounds) < 2:
        return 0.0
    seconds = living_s(lives, Span(rounds[0].at_s, rounds[-1].at_s))
    return sum(r.weight for r in rounds[1:]) / seconds if seconds else 0.0


def problems(lives: Sequence[Life], span: Span, stuck_s: float) -> list[str]:
    """Everything that is wrong; empty if the run held."""
    found = []
    digests: dict[int, dict[str, list[str]]] = {}
    for life in lives:
        pairs = [(r.t, r.digest) for r in life.rounds] + [(life.end_t or 0, life.end_digest)]
        for t, digest in pairs:
            if digest:
                digests.setdefault(t, {}).setdefault(digest, []).append(life.name)
    for t, by_digest in sorted(digests.items()):
        if len(by_digest) > 1:
            found.append(f"round {t} has {len(by_digest)} digests: {by_digest}")
    for life in lives:
        lived = life.ended_s is None or life.ending == "end"
        if lived and life.ending == "end" and not life.end_digest:
            found.append(f"{life.name} told no digest at the end")
        last_s = life.rounds[-1].at_s if life.rounds else life.started_s
        if lived and span.to_s - last_s > stuck_s:
            found.append(f"{life.name} is stuck: its last round was {span.to_s - last_s:.0f} s before the end")
        if life.exit_code != EXIT_CODES.get(life.ending):
            why = f" after {life.ending}" if life.ending else ", which nobody asked for"
            found.append(f"{life.name} ended with {life.exit_code}{why}: {' | '.join(life.said)}")
    return found
