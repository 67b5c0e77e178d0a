"""The least time of a round over links whose rates are known: what `dlc bench allreduce --links` compares with.

Of a vector of V bytes on the wire, N hosts own the parts w_1 + ... + w_N = 1. In a round

    host i sends, and receives    (1 + (N - 2) w_i) V     2 (N - 1) / N times V where all parts are equal
    host i sends to host j        (w_i + w_j) V           2 / N times V

Neither a host's link nor a path can be faster than its bytes over its rate; the slowest of them all is the limit.

**Parts.** A round cuts the vector by the hosts' rates (`comm/partition.py`), or equally where it knows none. The limit
is the lesser of both. Rounds that know other rates than the file could cut it so that a slow path has less to carry.

**Hosts.** Only paths were measured, one at a time per host. A path is as fast as the sender's link, the receiver's, or
what is between them. It tells the sender's link where that sends to nobody faster, and the receiver is known to take
more; and the receiver's link likewise. Where it may be either, all are taken for the senders' links, and then all for
the receivers': the lesser limit counts. A link of which nothing is told limits nobody.
So a host is taken to carry no more at once than its best path does alone. Where single connections are slower than the
link (loss together with latency), a round may take less than this limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlc.comm.partition import Member, loads, optimum
from dlc.errors import UsageError

CLEARLY = 1.25
"""Two rates are not the same where one is greater by this: short measurements differ by 10 %."""
FREE_MBPS = 1e15
"""Of a link that limits nobody."""

Rates = Mapping[tuple[str, str], float]
"""(sender, receiver) -> Mbit/s, for all ordered pairs of two hosts or more."""


@dataclass(frozen=True)
class Limit:
    """The least time of a round, as far as the rates of single paths tell."""

    seconds: float
    by: str
    """What takes that long: "a:1 to b:1", "all that a:1 sends", "all that a:1 receives"."""


def read_links(links: Path, sites: Sequence[str]) -> Rates:
    """All directions between `sites`, out of what `dlc bench matrix --json` printed. UsageError: one is not there."""
    try:
        pairs = json.loads(links.read_text(encoding="utf-8"))["pairs"]
        rates = {(p["from"], p["to"]): p["up_mbps"] for p in pairs}
    except OSError as error:
        raise UsageError(f"the file {links} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{links} is no output of `dlc bench matrix --json`") from None
    wanted = [(a, b) for a in sites for b in sites if a != b]
    unknown = [f"{a} to {b}" for a, b in wanted if not _is_rate(rates.get((a, b)))]
    if unknown:
        raise UsageError(f"{links} has no rate for {', '.join(unknown[:3])}; measure these, or leave out --links")
    return {pair: float(rates[pair]) for pair in wanted}


def least(rates: Rates, wire_mbit: float) -> Limit:
    """The limit of a round of all hosts in `rates`, with `wire_mbit` (10^6 bit) of a vector on the wire."""
    sites = list(dict.fromkeys(sender for sender, _ in rates))
    equal = (1 / len(sites),) * len(sites)
    return min(
        (
            _slowest(rates, sites, hosts, parts, wire_mbit)
            for hosts in _hosts(rates, sites)
            for parts in (optimum(hosts, wire_mbit).shares, equal)
        ),
        key=lambda limit: limit.seconds,
    )


def _slowest(
    rates: Rates, sites: Sequence[str], hosts: Sequence[Member], parts: Sequence[float], wire_mbit: float
) -> Limit:
    part = dict(zip(sites, parts, strict=True))
    found = [Limit((part[a] + part[b]) * wire_mbit / rate, f"{a} to {b}") for (a, b), rate in rates.items()]
    for site, host, load in zip(sites, hosts, loads(hosts, parts, wire_mbit), strict=True):
        found.append(Limit(load.up / host.up_Bps, f"all that {site} sends"))
        found.append(Limit(load.down / host.down_Bps, f"all that {site} receives"))
    return max(found, key=lambda limit: limit.seconds)


def _hosts(rates: Rates, sites: Sequence[str]) -> Iterator[list[Member]]:
    """The hosts' links, in Mbit/s, in both readings."""
    out, into = dict.fromkeys(sites, 0.0), dict.fromkeys(sites, 0.0)
    for (a, b), rate in rates.items():
        out[a], into[b] = max(out[a], rate), max(into[b], rate)
    best_out = [(a, b) for (a, b), rate in rates.items() if not _less(rate, out[a])]
    best_in = [(a, b) for (a, b), rate in rates.items() if not _less(rate, into[b])]
    ups = {a for a, b in best_out if _less(rates[a, b], into[b])}
    downs = {b for a, b in best_in if _less(rates[a, b], out[a])}
    either = [(a, b) for a, b in {*best_out} & {*best_in} if a not in ups and b not in downs]
    for known_ups, known_downs in (
        (ups | {a for a, _ in either}, downs),
        (ups, downs | {b for _, b in either}),
    ):
        yield [
            Member(out[s] if s in known_ups else FREE_MBPS, into[s] if s in known_downs else FREE_MBPS) for s in sites
        ]


def _less(rate: float, than: float) -> bool:
    return rate * CLEARLY < than


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
