"""Many peers on the virtual clock: `python -m dlc.sim.scale` prints a table, and draws it with --plot FILE.

Moshpit: one averaging of a fixed vector by everybody, started within half a second. How long it takes, what it costs
each peer in bytes beside the bound d 2 (M - 1) / M vectors, how exact it is; then the same while 1% of the peers die in
every round. Gossip: how fast the distance to the mean shrinks, beside what the graph's spectral gap says. Membership:
what it costs each peer while nothing changes, and how soon all know of a death. The machines are those that real peers
run (dlc.comm); links, clocks and deaths are made here.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlc.comm.calls import Call, GroupDone, GroupFailed, MeetingFailed
from dlc.comm.cells import grid_of
from dlc.comm.gossip import Gossip, absorb, give_away
from dlc.comm.graphs import contraction, hops, neighbours
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.moshpit import Course
from dlc.sim.meshnet import Host, MeshNet
from dlc.sim.swim import Watch, membership

NUMEL, CHUNK = 8192, 256
"""Of Moshpit's vector: a chunk for each member of a group of 32."""
GOSSIP_NUMEL = 128
RATE_Bps = 20e3
"""Of each uplink: a vector of 32 KiB takes 1.6 s, as 40 MB do at 200 Mbit/s."""
CHURN = 0.01
GOSSIP_STEPS = 20
LIMIT_S = 600.0


class Averager:
    """One peer that goes through the grid once."""

    def __init__(self, net: MeshNet, host: Host, i: int, course: Course) -> None:
        self.net, self.host, self.course = net, host, course
        self.grid = Grid(NUMEL, CHUNK, "fp32")
        self.z = torch.randn(NUMEL, generator=torch.Generator().manual_seed(i))
        self.weight, self.label, self.out = 1.0, "", torch.empty(0)
        self.over = False
        self.ended = math.nan
        self.members: Sequence[str] = ()
        host.heard = self.heard

    def go(self) -> None:
        if self.host.dead:
            return
        up = self.host.seen.up
        members = [n for n in self.members if n == self.host.name or up(self.net.hosts[n].voter)]
        leg = self.course.leg(members, self.host.name, ())
        self.out = torch.empty(NUMEL)
        call = Call(leg.key, self.grid, self.z, self.out, self.weight, label=self.label, expected=leg.peers)
        self.net.act(self.host, lambda mesh, now: mesh.meet(call, now))

    def heard(self, event: object) -> None:
        if isinstance(event, GroupDone):
            outcome = event.outcome
            seats = {seat.voter.peer: seat.weight for seat in outcome.seats}
            self.weight = sum(seats[p] for p in outcome.included)
            self.z, self.label = self.out, f"{outcome.leader}/{outcome.nonce}"
        elif not isinstance(event, GroupFailed | MeetingFailed):
            return
        if self.course.passed():
            self.over, self.ended = True, self.net.now
        else:
            self.net.clock.at(self.net.now, self.go)


@dataclass(frozen=True)
class Averaged:
    """One averaging of all peers on the grid."""

    n: int
    sides: tuple[int, ...]
    died: int
    seconds: float
    """Until the last of those left had ended."""
    bulk: float
    """Vectors that a peer sent, on average; headers left aside."""
    bound: float
    control_bytes: float
    """Of all other messages, per peer."""
    error: float
    """Greatest distance of an element from the mean of all, in standard deviations of an element among the peers."""


def moshpit(n: int, group_size: int, churn: float, seed: int) -> Averaged:
    rng, net = random.Random(seed), MeshNet(seed, latency_s=(0.01, 0.08))
    hosts = net.add(n, up_Bps=RATE_Bps)
    peers = [Averager(net, host, i, Course("scale", group_size, None)) for i, host in enumerate(hosts)]
    mean = torch.stack([p.z for p in peers]).double().mean(0)
    names = sorted(net.hosts)
    cells, start = grid_of(n, group_size), net.now
    for peer in peers:
        peer.members = names
        net.clock.at(start + rng.uniform(0, 0.5), peer.go)
    round_s = 2 * 4 * NUMEL / RATE_Bps
    victims = rng.sample(hosts, round(churn * n) * cells.dims)
    for k, victim in enumerate(victims):
        net.clock.at(start + round_s * (k % cells.dims + rng.random()), net.kill, victim)
    net.until(lambda: net.clock.events % 256 == 0 and all(p.over or p.host.dead for p in peers), LIMIT_S)
    left = [p for p in peers if not p.host.dead]
    payload = sum(h.bulk_bytes for h in hosts) / n / (4 * NUMEL) * (4 * CHUNK) / (4 * CHUNK + 100)
    return Averaged(
        n,
        cells.sides,
        len(victims),
        max(p.ended for p in left) - start,
        payload,
        sum(2 * (side - 1) / side for side in cells.sides),
        sum(h.control_bytes for h in hosts) / n,
        max(float((p.z.double() - mean).abs().max()) for p in left),
    )


@dataclass(frozen=True)
class Mixed:
    """Some steps of gossip, all peers at once."""

    graph: str
    n: int
    steps: int
    theory: float
    """Factor by which the distance to the mean shrinks in a step."""
    measured: float
    """0: below what fp32 tells."""
    control_bytes: float
    """Per peer and step."""


def gossip(graph: str, n: int, seed: int) -> Mixed:
    net = MeshNet(seed)
    hosts, grid = net.add(n, up_Bps=1e6), Grid(GOSSIP_NUMEL, GOSSIP_NUMEL, "fp32")
    machines = [host.mesh.gossip("g", grid) for host in hosts]
    voters = sorted(host.voter for host in hosts)
    zs, weights = _beginning(graph, n, seed), [1.0] * n
    mean = torch.stack(zs).double().mean(0)
    steps = hops(n) if graph == "exponential" else GOSSIP_STEPS
    before = _distance(zs, mean)
    sent = sum(h.control_bytes for h in hosts)
    for t in range(steps):
        for i, host in enumerate(hosts):
            gifts = [(to, weights[i] * share) for to, share in neighbours(graph, voters, host.voter, t, seed)]
            if gifts:
                payloads, weights[i] = give_away(grid, zs[i], weights[i], sum(w for _, w in gifts))
                _give(net, host, machines[i], gifts, t, payloads)
        net.until(lambda: not any(m.unsettled for m in machines), LIMIT_S)
        for i, machine in enumerate(machines):
            for share in machine.arrivals().taken:
                weights[i] = absorb(grid, zs[i], weights[i], share)
    ratio = _distance(zs, mean) / before
    measured = ratio ** (1 / steps) if ratio > 1e-5 else 0.0
    sent = sum(h.control_bytes for h in hosts) - sent
    return Mixed(graph, n, steps, contraction(graph, n), measured, sent / n / steps)


def _give(
    net: MeshNet, host: Host, machine: Gossip, gifts: list[tuple[Voter, float]], t: int, payloads: list[memoryview]
) -> None:
    net.act(host, lambda mesh, now: mesh.with_gossip(machine, lambda: machine.give(gifts, t, payloads, LIMIT_S), now))


def _beginning(graph: str, n: int, seed: int) -> list[Tensor]:
    """Random vectors; on a ring waves around it, of which the theory speaks: all else is gone sooner."""
    generator = torch.Generator().manual_seed(seed)
    if graph != "ring":
        return [torch.randn(GOSSIP_NUMEL, generator=generator) for _ in range(n)]
    phase = 2 * math.pi * torch.rand(GOSSIP_NUMEL, generator=generator)
    return [torch.cos(2 * math.pi * i / n + phase) for i in range(n)]


def _distance(zs: Sequence[Tensor], mean: Tensor) -> float:
    return math.sqrt(sum(float((z.double() - mean).square().sum()) for z in zs) / len(zs))


# ------------------------------------------------------------------ table and plot


def table(averaged: Sequence[Averaged], mixed: Sequence[Mixed], watches: Sequence[Watch]) -> str:
    lines = ["moshpit      peers  grid     died  seconds  vectors sent (bound)  control kB  largest error"]
    for a in averaged:
        grid = "x".join(map(str, a.sides))
        lines.append(
            f"             {a.n:5}  {grid:7} {a.died:5} {a.seconds:8.1f} {a.bulk:8.2f} ({a.bound:.2f})"
            f" {a.control_bytes / 1e3:14.1f} {a.error:14.2g}"
        )
    lines.append("gossip       peers  steps  a step shrinks the distance to  theory  control kB a step")
    for m in mixed:
        lines.append(
            f"{m.graph:12} {m.n:5} {m.steps:6} {m.measured:31.4f} {m.theory:7.4f} {m.control_bytes / 1e3:18.2f}"
        )
    lines.append("membership   peers  kB/s sent by each  seconds until all know of a death")
    lines += [f"             {w.n:5} {w.sent_Bps / 1e3:18.2f} {w.seconds:34.1f}" for w in watches]
    return "\n".join(lines)


def plot(averaged: Sequence[Averaged], mixed: Sequence[Mixed], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for died, name in ((False, "nobody fails"), (True, "1% die in each round")):
        some = [a for a in averaged if bool(a.died) is died]
        left.plot([a.n for a in some], [a.seconds for a in some], marker="o", label=f"Moshpit, {name}")
    left.set(xscale="log", xlabel="peers", ylabel="seconds per averaging", ylim=(0, None))
    left.legend()
    for graph in dict.fromkeys(m.graph for m in mixed):
        of = [m for m in mixed if m.graph == graph]
        (line,) = right.plot([m.n for m in of], [m.measured for m in of], "o", label=graph)
        right.plot([m.n for m in of], [m.theory for m in of], "--", color=line.get_color())
    right.set(xscale="log", xlabel="peers", ylabel="factor of the distance per step", ylim=(0, 1.05))
    right.legend(title="dashed: theory")
    figure.tight_layout()
    figure.savefig(path)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dlc.sim.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", default="64,256,1024", help="numbers of peers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, too (needs dlc[plots])")
    args = parser.parse_args(words)
    averaged, mixed, watches, began = list[Averaged](), list[Mixed](), list[Watch](), time.monotonic()
    for n in (int(word) for word in args.peers.split(",")):
        size = math.isqrt(n) if math.isqrt(n) ** 2 == n else max(2, round(math.sqrt(n)))
        averaged += [moshpit(n, size, churn, args.seed) for churn in (0.0, CHURN)]
        mixed += [gossip(graph, n, args.seed) for graph in ("ring", "exponential", "random-pairs")]
        watches.append(membership(n, args.seed))
        print(f"{n} peers: {time.monotonic() - began:.0f} s of computing so far", flush=True)
    print(table(averaged, mixed, watches))
    if args.plot is not None:
        plot(averaged, mixed, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
