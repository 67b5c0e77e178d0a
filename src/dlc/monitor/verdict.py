"""Did a recorded demo keep what it promises? Pure functions from recorded events to checks.

The record of each process is its events in order and its exit code. Nothing here trusts the one who ran the demo: who
was killed, in which round, and what the others made of it is read from what the processes said.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlc.monitor.table import read_report
from dlc.report import RoundReport

Event = Mapping[str, Any]
Role = Literal["peer", "victim", "newcomer", "alone"]
SIGKILL = 9
"""The number is the same on every POSIX system; Windows has no name for it."""


@dataclass
class Record:
    """One process of the demo."""

    name: str
    role: Role
    """"peer": there from start to end; "victim": killed half-way; "newcomer": joined after that; "alone": one peer
    that trains without any other, for comparison."""
    events: list[Event] = field(default_factory=list)
    exit_code: int | None = None
    """Negative: the signal that ended it. None: it was still running."""

    def all(self, kind: str) -> Iterator[Event]:
        """Its events of one kind, in order."""
        return (event for event in self.events if event.get("event") == kind)

    def last(self, kind: str) -> Event:
        """Its last event of one kind; an empty one if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})

    @property
    def id(self) -> str:
        return str(self.last("started").get("peer", ""))


@dataclass(frozen=True)
class Expected:
    """What was asked for."""

    rounds: int
    kill_round: int
    """The victim gets SIGKILL while this round is reduced; or a later one, where it was too late for this."""
    limit_s: float
    """All of it must take less."""


@dataclass(frozen=True)
class Check:
    name: str
    held: bool
    detail: str
    """What was seen."""


def verdict(records: Sequence[Record], expected: Expected, elapsed_s: float) -> list[Check]:
    """Every check, in the order in which they are printed; the demo held if all did."""
    return [
        _same_model(records, expected),
        _same_history(records),
        _rounds_done(records, expected),
        _killed_in_round(records, expected),
        _round_survived(records, expected),
        _newcomer_works(records, expected),
        _loss_fell(records),
        _beats_one_peer(records),
        _exits(records),
        Check(f"took less than {expected.limit_s:.0f} s", elapsed_s < expected.limit_s, f"{elapsed_s:.0f} s"),
    ]


def died_in(records: Sequence[Record], expected: Expected) -> int:
    """The round of the victim's death: the first from that of the order on that it has not told."""
    return max([expected.kill_round, *(_rounds_of(victim) + 1 for victim in of_role(records, "victim"))])


def reports_of_kill_round(records: Sequence[Record], expected: Expected) -> dict[str, RoundReport]:
    """What each survivor's own report says of the round in which the victim died. Who was not there at that round,
    and took it over afterwards, has none."""
    found, t = dict[str, RoundReport](), died_in(records, expected)
    for record in of_role(records, "peer"):
        for event in record.all("round"):
            if event.get("t") == t:
                found[record.name] = read_report(event)
    return found


def _rounds_of(record: Record) -> int:
    """Its last round."""
    return max((int(event.get("t", 0)) for event in record.all("round")), default=0)


def of_role(records: Sequence[Record], *roles: Role) -> list[Record]:
    return [record for record in records if record.role in roles]


def loss_before(records: Sequence[Record]) -> float | None:
    """Validation loss of the swarm's first model: the earliest that a peer of the start measured."""
    events = [event for record in of_role(records, "peer", "victim") for event in record.all("validation")]
    losses = [(event["t"], event["loss"]) for event in events if event.get("loss") is not None]
    return float(min(losses)[1]) if losses else None


def loss_after(records: Sequence[Record], *roles: Role) -> float | None:
    """Validation loss at the end; the worst of those processes, so that none can hide behind another."""
    losses = [record.last("end").get("validation_loss") for record in of_role(records, *roles)]
    known = [float(loss) for loss in losses if loss is not None]
    return max(known) if known and len(known) == len(losses) else None


def _same_model(records: Sequence[Record], expected: Expected) -> Check:
    swarm = of_role(records, "peer", "newcomer")
    ends = {record.name: (record.last("end").get("t"), record.last("end").get("digest")) for record in swarm}
    held = (
        len(set(ends.values())) == 1
        and all(t is not None and digest for t, digest in ends.values())
        and bool(of_role(records, "newcomer"))
    )
    detail = ", ".join(f"{name} {str(digest)[:12]} at round {t}" for name, (t, digest) in ends.items())
    return Check("survivors and newcomer hold the same model", held, detail)


def _same_history(records: Sequence[Record]) -> Check:
    """Whoever applied a round got the same bits, the victim up to its death included."""
    digests: dict[Any, set[Any]] = {}
    for record in of_role(records, "peer", "victim", "newcomer"):
        for event in record.all("round"):
            if event.get("digest"):  # empty where the next round was applied before this one was told
                digests.setdefault(event.get("t"), set()).add(event.get("digest"))
    split = sorted(str(t) for t, seen in digests.items() if len(seen) > 1)
    detail = f"they differ after round {', '.join(split)}" if split else f"{len(digests)} rounds compared"
    return Check("same digest after every round", bool(digests) and not split, detail)


def _rounds_done(records: Sequence[Record], expected: Expected) -> Check:
    ends = {record.name: record.last("end") for record in of_role(records, "peer", "newcomer", "alone")}
    held = bool(ends) and all(e.get("t") == expected.rounds and e.get("reason") == "rounds" for e in ends.values())
    detail = ", ".join(f"{name} {end.get('t', 'did not end')}" for name, end in ends.items())
    return Check(f"all {expected.rounds} rounds done", held, detail)


def _killed_in_round(records: Sequence[Record], expected: Expected) -> Check:
    """It had applied all rounds before that one; "reducing" are its last words, said when it owns unfinished chunks.
    It has contributed to no round from that of the order on."""
    name = f"the victim got SIGKILL in round {died_in(records, expected)}, while it owned unfinished chunks"
    victim = next(iter(of_role(records, "victim")), None)
    if victim is None:
        return Check(name, False, "there was none")
    done, phase = _rounds_of(victim), victim.last("phase").get("phase", "unknown")
    survived = any(event["t"] >= expected.kill_round and event.get("counted") for event in victim.all("round"))
    in_time = done >= expected.kill_round - 1 and not survived
    held = victim.exit_code == -SIGKILL and in_time and phase == "reducing"
    return Check(name, held, f"{victim.name} {exit_text(victim.exit_code)}, rounds done {done}, last phase {phase}")


def _round_survived(records: Sequence[Record], expected: Expected) -> Check:
    """The others finished that round, or a later one, and each report shows the failure: a second ballot, or the victim
    missing."""
    victims = {victim.id for victim in of_role(records, "victim")}
    survivors = of_role(records, "peer")
    reports, t = reports_of_kill_round(records, expected), died_in(records, expected)

    def shows_it(report: RoundReport) -> bool:
        return report.ballots > 1 or any(lost.peer in victims for lost in report.missing)

    finished = all(_rounds_of(record) >= t for record in survivors)
    held = bool(reports) and finished and all(map(shows_it, reports.values()))
    silent = [record.name for record in survivors if record.name not in reports]
    said = [f"{name}: {report.ballots} ballots, {_missing_text(report, records)}" for name, report in reports.items()]
    detail = "; ".join(said + [f"{name}: no such round" for name in silent])
    return Check("the survivors finished that round and report the failure", held, detail)


def _missing_text(report: RoundReport, records: Sequence[Record]) -> str:
    names = {record.id: record.name for record in records}
    missing = [f"{names.get(lost.peer, lost.peer[:8])} missing ({lost.reason})" for lost in report.missing]
    return ", ".join(missing) or "nobody missing"


def _newcomer_works(records: Sequence[Record], expected: Expected) -> Check:
    """It got the state after the round of the kill or a later one, and its work counted at least once. Who is there
    before that round has ended has an older state first."""
    newcomer = next(iter(of_role(records, "newcomer")), None)
    name = "the newcomer took the state over and contributed"
    if newcomer is None:
        return Check(name, False, "there was none")
    synced = [int(event.get("t", 0)) for event in newcomer.all("synced")]
    counted = [event.get("t") for event in newcomer.all("round") if event.get("counted")]
    late = [t for t in synced if t >= expected.kill_round]
    came = f"came in at round {(late or synced)[0]}" if synced else "never came in"
    held = bool(late) and bool(counted)
    return Check(name, held, f"{came}, counted in {len(counted)} rounds")


def _loss_fell(records: Sequence[Record]) -> Check:
    before, after = loss_before(records), loss_after(records, "peer", "newcomer")
    held = before is not None and after is not None and after < before
    return Check("validation loss fell", held, f"{loss_text(before)} before, {loss_text(after)} after")


def _beats_one_peer(records: Sequence[Record]) -> Check:
    swarm, alone = loss_after(records, "peer", "newcomer"), loss_after(records, "alone")
    held = swarm is not None and alone is not None and swarm <= alone
    detail = f"{loss_text(swarm)} against {loss_text(alone)}"
    return Check("validation loss is not worse than one peer's alone", held, detail)


def _exits(records: Sequence[Record]) -> Check:
    others = [record for record in records if record.role != "victim"]
    held = bool(others) and all(record.exit_code == 0 for record in others)
    detail = ", ".join(f"{record.name} {exit_text(record.exit_code)}" for record in others)
    return Check("every other process ended by itself with 0", held, detail)


def exit_text(code: int | None) -> str:
    if code is None:
        return "still runs"
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def loss_text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4f}"
