"""From a seed to a scenario: who starts how, over which network, and which faults happen when.

A `Scenario` is plain data that can be read, shortened (`dataclasses.replace`) and run again. Peers are named by number
modulo those that exist when the fault happens, so that a shortened schedule still means something.

`FAULTS` names everything that may be asked for. The first eight kinds draw from one stream of random numbers, in the
order of FIRST_KINDS, the others from a second one, the latest from one each, so that a seed keeps its schedule when
kinds are added.

Sizes: where the range of peers goes from below SMALL_PEERS to above, four of five swarms have SMALL_PEERS at most.
Small swarms show as many faults as great ones, and cost a tenth.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from dlc.comm.donations import PIECE_BYTES
from dlc.comm.log import HISTORY_BYTES_MAX
from dlc.comm.timeouts import Timeouts
from dlc.sim.network import Weather

FAULTS = {
    "crash": "a process dies, at once or in the middle of a batch of messages",
    "freeze": "a process sleeps, for less or more than T_evict; its input waits for it",
    "cut": "one direction of one link carries nothing for a while",
    "loss": "messages are lost and doubled throughout",
    "restart": "a process dies; another one starts on that host, with or without its checkpoint",
    "join": "a newcomer, with two addresses",
    "leave": "a process says that it goes",
    "partition": "two sides, for less or more than T_evict",
    "slow": "a process gets to its events up to a second late, for a while",
    "corrupt": "an element of one peer's state flips",
    "move": "a restart at another address",
    "drift": "clocks begin anywhere and run up to a thousandth too fast or slow",
    "roles": "some joiners are helpers or observers",
    "channels": "a second channel with state, or an all-reduce without, beside the training",
    "images": "images of several pieces, histories of a few rounds",
    "eager": "trainers tell their pace, and go on while a round waits: they take back what they offered and offer more",
    "probes": "peers measure their links before they know them from rounds",
    "filling": "contributions that become final while they are offered, later than expected, in part, or not at all",
    "patient": "rounds of the training wait for everybody who is alive, however late",
    "misfits": "second channels: half of the hosts bring states of other kinds, of which the run can have one",
    "turns": "trainers also offer what brings no samples",
    "orphans": "second channels: all who hold their states may be gone",
    "breaks": "a connection for bulk ends: what is on its way is lost, and what follows until its sender hears of it",
}
"""Kind: what it is. What is no event (loss, drift, roles, channels, images, eager, probes, filling, patient, misfits,
turns, orphans) shapes all of a schedule."""
FIRST_KINDS = ("crash", "freeze", "cut", "loss", "restart", "join", "leave", "partition")
"""Drawn from the first stream."""
MORE_KINDS = ("slow", "corrupt", "move")
"""Events drawn from the second stream."""
TRAIN, SECOND, REDUCE = "train", "second", "reduce"
"""Channels: with state and leases; with state only; a library all-reduce."""
KINDS = ((0, 0), (1, 0), (0, 1))
"""Of second states: chunks, and bytes of an image, beyond those of the usual kind, which is the first."""
TIMEOUTS = Timeouts(evict_s=20.0)
"""T_evict is a third of the default: virtual seconds cost real time. All relations between the deadlines hold."""
SPLIT_S_MAX = 0.7 * TIMEOUTS.evict_s
"""Longest short cut; whether it counts as a partition is the checker's to say."""
TARGETS = ("Plan", "Result", "Held", "Promise", "Commit")
"""A targeted fault strikes after a random part of one batch of these."""
FIRST_FAULT_S = 8.0
UNHEARD_S_MAX = 8.0
"""How long the sender goes on giving to a connection that is no more: until the kernel's timers tell."""
SMALL_PEERS = 8
SMALL_SHARE = 0.8
"""Swarms of at most SMALL_PEERS where the range allows both."""
DRIFT_MAX = 1e-3
SMALL_PIECE_BYTES = 64
"""An image of the toy state has 32 to 320 bytes: up to five pieces."""
ROUNDS_KEPT = 3
"""Rounds of the training whose results a short history holds."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    """One of FAULTS; crash and freeze strike at once, or in the middle of the next batch of `target`."""
    who: int = 0
    other: int = 0
    for_s: float = 0.0
    target: str = ""
    part: float = 0.0
    """Share of the batch that still goes out."""

    def __str__(self) -> str:
        text = f"{self.at_s:.2f} s: {self.kind} #{self.who}"
        text += f" -> #{self.other}" if self.kind in ("cut", "breaks") else ""
        text += f" for {self.for_s:.1f} s" if self.for_s else ""
        return text + (f" after {self.part:.0%} of a batch of {self.target}" if self.target else "")


@dataclass(frozen=True)
class Start:
    at_s: float
    listed: tuple[int, ...]
    """Numbers of the peers whose addresses it was given; empty: it founds."""
    role: str = "trainer"


@dataclass(frozen=True)
class Scenario:
    seed: int
    starts: tuple[Start, ...]
    faults: tuple[Fault, ...] = ()
    weather: Weather = Weather()
    timeouts: Timeouts = TIMEOUTS
    n_chunks: int = 3
    chunk_elems: int = 8
    codec: str = "fp32"
    inner_s: float = 2.0
    uplink_Bps: float = 50_000.0
    """Slow against the toy's few hundred bytes, so that faults strike while chunks are on their way."""
    equal_states: bool = True
    """All peers start from the same first state; else they differ, and the opening decides."""
    drift: float = 0.0
    """Clocks run at up to 1 ± this; 0: all clocks are one."""
    channels: tuple[str, ...] = (TRAIN,)
    piece_bytes: int = PIECE_BYTES
    history_bytes: int = HISTORY_BYTES_MAX
    eager: bool = False
    """Trainers describe themselves, and offer more while they wait."""
    probes: bool = False
    """Links are measured beside the rounds."""
    filling: bool = False
    """Some contributions become final while they are offered."""
    patient: bool = False
    """A round of the training waits for everybody who is alive, however late."""
    misfits: bool = False
    """Hosts bring second states of several kinds."""
    turns: bool = False
    """Some contributions to the training bring no samples."""
    orphans: bool = False
    """Faults spare who alone holds the training's state, and not who alone holds a second one."""

    @property
    def last_fault_s(self) -> float:
        ends = [f.at_s + f.for_s for f in self.faults] + [s.at_s for s in self.starts]
        return max(ends, default=0.0)


def scenario(seed: int, peers_min: int, peers_max: int, kinds: Collection[str]) -> Scenario:
    """The schedule of this seed: `kinds` of FAULTS, from `peers_min` to `peers_max` peers at the start."""
    rng, more = random.Random(f"schedule {seed}"), random.Random(f"more {seed}")
    n = rng.randint(peers_min, peers_max)
    if peers_min < SMALL_PEERS < peers_max:
        small = more.random() < SMALL_SHARE
        n = more.randint(peers_min, SMALL_PEERS) if small else more.randint(SMALL_PEERS + 1, peers_max)
    weather = Weather(
        latency_max_s=rng.choice((0.02, 0.1, 0.2)),
        jitter=rng.choice((0.1, 0.3, 1.0)),
        loss=rng.choice((0.0, 0.01, 0.05, 0.1)) if "loss" in kinds else 0.0,
        duplicates=rng.choice((0.0, 0.05)) if "loss" in kinds else 0.0,
    )
    starts = _starts(rng, n)
    faults = _faults(rng, [k for k in FIRST_KINDS if k in kinds and k != "loss"])
    n_chunks, chunk_elems, codec = rng.randint(1, 5), rng.choice((4, 8)), rng.choice(("fp32", "fp16"))
    inner_s, uplink_Bps = rng.uniform(0.5, 3.0), rng.choice((5_000.0, 50_000.0, 1e6))
    equal_states = rng.random() < 0.7
    if "roles" in kinds and more.random() < 0.4:
        starts = _roles(more, starts)
    beside = more.choice(((), (), (), (SECOND,), (REDUCE,), (SECOND, REDUCE))) if "channels" in kinds else ()
    small_images = "images" in kinds and more.random() < 0.5
    return Scenario(
        seed=seed,
        starts=starts,
        faults=_breaks(seed, _more_faults(more, faults, [k for k in MORE_KINDS if k in kinds]), kinds),
        weather=weather,
        n_chunks=n_chunks,
        chunk_elems=chunk_elems,
        codec=codec,
        inner_s=inner_s,
        uplink_Bps=uplink_Bps,
        equal_states=equal_states,
        drift=DRIFT_MAX if "drift" in kinds and more.random() < 0.5 else 0.0,
        channels=(TRAIN, *beside),
        piece_bytes=SMALL_PIECE_BYTES if small_images else PIECE_BYTES,
        history_bytes=ROUNDS_KEPT * 4 * n_chunks * chunk_elems if small_images else HISTORY_BYTES_MAX,
        eager="eager" in kinds and random.Random(f"eager {seed}").random() < 0.5,
        probes="probes" in kinds and random.Random(f"probes {seed}").random() < 0.5,
        filling="filling" in kinds and random.Random(f"filling {seed}").random() < 0.5,
        patient="patient" in kinds and random.Random(f"patient {seed}").random() < 0.3,
        misfits="misfits" in kinds and SECOND in beside and random.Random(f"misfits {seed}").random() < 0.5,
        turns="turns" in kinds and random.Random(f"turns {seed}").random() < 0.3,
        orphans="orphans" in kinds and SECOND in beside and random.Random(f"orphans {seed}").random() < 0.5,
    )


def _starts(rng: random.Random, n: int) -> tuple[Start, ...]:
    """One founder and joiners, or all at once with the same list."""
    if n > 1 and rng.random() < 0.3:
        everyone = tuple(range(n))
        return tuple(Start(rng.uniform(0, 2.0), everyone) for _ in range(n))
    joiners = (Start(rng.uniform(0, 6.0), tuple({0, rng.randrange(max(1, i))})) for i in range(1, n))
    return (Start(0.0, ()), *joiners)


def _roles(rng: random.Random, starts: tuple[Start, ...]) -> tuple[Start, ...]:
    """Some of the joiners are helpers or observers; who is listed by all founds with all, and must be able to vote."""
    together = bool(starts[0].listed)
    roles = ("trainer", "trainer", "helper") if together else ("trainer", "trainer", "helper", "observer")
    joiners = (Start(s.at_s, s.listed, rng.choice(roles)) for s in starts[1:])
    return (starts[0], *joiners)


def _faults(rng: random.Random, kinds: list[str]) -> tuple[Fault, ...]:
    """A dozen or less in a minute or two, sometimes in bursts."""
    if not kinds:
        return ()
    at, faults = FIRST_FAULT_S, []
    pace_s = rng.choice((2.0, 6.0, 15.0))
    for _ in range(rng.randint(1, 10)):
        at += rng.expovariate(1 / pace_s)
        faults.append(_fault(rng, rng.choice(kinds), at))
    return tuple(faults)


def _fault(rng: random.Random, kind: str, at: float) -> Fault:
    who, other = rng.randrange(1 << 16), rng.randrange(1 << 16)
    if kind in ("crash", "freeze") and rng.random() < 0.6:
        target, part = rng.choice(TARGETS), rng.random()
    else:
        target, part = "", 0.0
    evict_s = TIMEOUTS.evict_s
    for_s = 0.0
    if kind == "freeze":
        for_s = rng.choice((rng.uniform(0.5, evict_s / 4), rng.uniform(0.5, 3 * evict_s)))
    elif kind == "cut":
        for_s = rng.uniform(1.0, SPLIT_S_MAX)
    elif kind == "partition":
        for_s = rng.choice((rng.uniform(1.0, SPLIT_S_MAX), rng.uniform(evict_s, 4 * evict_s)))
    return Fault(at, kind, who, other, for_s, target, part)


def _more_faults(rng: random.Random, faults: tuple[Fault, ...], kinds: list[str]) -> tuple[Fault, ...]:
    """Up to two of the later kinds among the others."""
    if not kinds:
        return faults
    end_s = max([f.at_s for f in faults], default=30.0)
    added = []
    for _ in range(rng.randint(0, 2)):
        kind = rng.choice(kinds)
        for_s = rng.uniform(1.0, 15.0) if kind == "slow" else 0.0
        added.append(Fault(rng.uniform(FIRST_FAULT_S, end_s), kind, rng.randrange(1 << 16), 0, for_s))
    return tuple(sorted((*faults, *added), key=lambda fault: fault.at_s))


def _breaks(seed: int, faults: tuple[Fault, ...], kinds: Collection[str]) -> tuple[Fault, ...]:
    """In half of the schedules some connections end among the other faults."""
    rng = random.Random(f"breaks {seed}")
    if "breaks" not in kinds or rng.random() < 0.5:
        return faults
    end_s = max([f.at_s for f in faults], default=30.0)
    added = []
    for _ in range(rng.randint(1, 8)):
        unheard_s = rng.choice((0.0, rng.uniform(0.1, UNHEARD_S_MAX)))
        at_s, who, other = rng.uniform(FIRST_FAULT_S, end_s), rng.randrange(1 << 16), rng.randrange(1 << 16)
        added.append(Fault(at_s, "breaks", who, other, unheard_s))
    return tuple(sorted((*faults, *added), key=lambda fault: fault.at_s))
