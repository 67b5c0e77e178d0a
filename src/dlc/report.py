"""RoundReport: what a round tells its caller. Every round returns one, whatever happened in it.

Who is in the mean, and with what, is read from the committed entry, and so the same on all peers. Of a peer that is not
in it at all the reason is what each knows of it: one may say "dead" where another says "not ready". Bytes, seconds and
paths are this peer's own. A peer that was included in part stands in both lists: with the fraction of elements
that include it among the contributors, with the rest among the missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Reason = Literal["late", "dead", "refused: not finite", "not ready", "no room", "left"]
"""Why elements lack a peer. "late": it passed a deadline; "dead": it was not alive when its chunks were closed;
"refused: not finite": it sent NaN or Inf; "not ready": the plan was made without it; "no room":
as many others contributed as results of this codec can hold (topk), and it is in one of the next rounds; "left": it
announced its leave."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A peer whose contribution is part of the mean."""

    peer: str
    """Peer id."""
    weight: float
    """Its weight in the mean; tokens, in training."""
    fraction: float
    """Part of the elements that include it, above 0 and at most 1."""

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)


@dataclasses.dataclass(frozen=True)
class Missing:
    """A peer that some elements of the mean lack."""

    peer: str
    """Peer id."""
    reason: Reason
    """Why."""
    fraction: float
    """Part of the elements that lack it, above 0 and at most 1."""

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)
        if self.reason not in get_args(Reason):
            raise ValueError(f"{self.reason!r} is no reason; known: {get_args(Reason)}")


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What happened in one round, as a value that `json.dumps(report.to_dict())` accepts."""

    channel: str
    """What was averaged: "train", or the name of a library all-reduce."""
    t: int
    """Number of the round within its channel, the first is 1."""
    head: str
    """Hash of the committed log entry, hex."""
    contributors: tuple[Share, ...]
    """Who is part of the mean, in roster order."""
    missing: tuple[Missing, ...]
    """Who is not, in part or wholly, and why; empty if all that were known are in."""
    weight: float
    """Sum of the contributors' weights."""
    bytes_sent: int
    """Bulk bytes that this peer sent for this round."""
    bytes_received: int
    """Bulk bytes that this peer received for this round."""
    seconds: float
    """From this peer's own ready to the commit."""
    waiting_s: float
    """Part of `seconds` before the plan, waiting for other peers, and before any of what this one offered was final."""
    reduce_s: float
    """Part of `seconds` from the plan to the last byte of the result; all of them with a parameter server, where the
    two cannot be told apart."""
    ballots: int
    """Ballots that it took; 1 means that no owner or coordinator failed."""
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Peer id to the way its messages took: "direct", or "relayed via <peer id>"."""
    owned: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Peer id to the part of the elements whose mean it computed; by the plan, more on better links."""

    @property
    def complete(self) -> bool:
        """Every known peer is in every element of the mean, and there is one: where all have weight 0 there is none."""
        return bool(self.contributors) and not self.missing and all(s.fraction == 1.0 for s in self.contributors)

    def refused(self, peer: str) -> bool:
        """An owner refused what this peer contributed, because it was not finite."""
        return any(missing.peer == peer and missing.reason.startswith("refused") for missing in self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, keys in the order of the fields."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["contributors"] = [dataclasses.asdict(share) for share in self.contributors]
        plain["missing"] = [dataclasses.asdict(missing) for missing in self.missing]
        plain["paths"] = dict(self.paths)
        plain["owned"] = dict(self.owned)
        return plain

    def summary(self, own: bool = True) -> str:
        """One line for a log. own: with this peer's seconds and bytes, which one that only looked on does not have."""
        known = {share.peer for share in self.contributors} | {missing.peer for missing in self.missing}
        counted = f"{len(self.contributors)} of {len(known)} peers"
        parts = [f"{self.channel} round {self.t}: {counted}, weight {self.weight:g}"]
        if own:
            told_apart = self.reduce_s < self.seconds
            split = f" (waiting {self.waiting_s:.2f}, reduce {self.reduce_s:.2f})" if told_apart else ""
            parts += [
                f"{self.seconds:.2f} s{split}",
                f"sent {self.bytes_sent / 1e6:.2f} MB, received {self.bytes_received / 1e6:.2f} MB",
            ]
        if self.ballots > 1:
            parts.append(f"{self.ballots} ballots")
        if self.missing:
            parts.append("missing " + ", ".join(_missing_text(missing) for missing in self.missing))
        relayed = [f"{peer[:8]} {path}" for peer, path in self.paths.items() if path != "direct"]
        return "; ".join([*parts, *relayed])


@dataclasses.dataclass(frozen=True)
class Absent:
    """A member of a group that some elements of its mean lack."""

    peer: str
    """Peer id."""
    reason: str
    """Why, as it was seen here: "late", "dead", "left", "refused: ..."."""
    fraction: float
    """Part of the elements that lack it, above 0 and at most 1."""

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What one all-reduce in a group gave, as this peer saw it: without a log, others may have seen it otherwise."""

    name: str
    """Of the group."""
    contributors: tuple[Share, ...]
    """Whose vectors are part of the mean, with their weights in it; of the elements that are known here."""
    missing: tuple[Absent, ...]
    """Contributors of the group that the mean lacks, in part or wholly, and why."""
    gathered: Mapping[str, bytes] = dataclasses.field(hash=False)
    """Peer id to the small bytes that it gave; all members of the group, contributors or not."""
    owned: Mapping[str, float] = dataclasses.field(hash=False)
    """Peer id to the part of the elements that it was to reduce."""
    lost: Mapping[str, str] = dataclasses.field(hash=False)
    """Peer id to the reason why others reduced its part, for this peer."""
    weight: float
    """Sum of the contributors' weights."""
    bytes_sent: int
    """Bulk bytes that this peer has sent in groups, of any name, since the report before this one: when its own mean is
    there, others may still fetch theirs."""
    bytes_received: int
    seconds: float
    """From the call to the mean."""
    waiting_s: float
    """Part of it before the group began."""

    @property
    def complete(self) -> bool:
        """Every contributor of the group is in every element."""
        return not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; gathered bytes as their number."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["contributors"] = [dataclasses.asdict(share) for share in self.contributors]
        plain["missing"] = [dataclasses.asdict(absent) for absent in self.missing]
        plain["gathered"] = {peer: len(value) for peer, value in self.gathered.items()}
        plain["owned"], plain["lost"] = dict(self.owned), dict(self.lost)
        return plain

    def summary(self) -> str:
        """One line for a log."""
        known = {share.peer for share in self.contributors} | {absent.peer for absent in self.missing}
        parts = [
            f"{self.name}: {len(self.contributors)} of {len(known)} peers, weight {self.weight:g}",
            f"{self.seconds:.2f} s (waiting {self.waiting_s:.2f})",
            f"sent {self.bytes_sent / 1e6:.2f} MB, received {self.bytes_received / 1e6:.2f} MB",
        ]
        if self.missing:
            parts.append("missing " + ", ".join(_missing_text(absent) for absent in self.missing))
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class GossipReport:
    """What one step of gossip gave. Weights are of push-sum: shares of the mass that all peers hold together."""

    name: str
    t: int
    """Number of the step here; peers count for themselves."""
    peers: int
    """Who gossips, as far as it is known here, this peer included."""
    gave: Mapping[str, float] = dataclasses.field(hash=False)
    """Peer id to the weight that was given to it in this step."""
    took: Mapping[str, float] = dataclasses.field(hash=False)
    """Peer id to the weight that was taken in, since the step before."""
    returned: Mapping[str, str] = dataclasses.field(hash=False)
    """Peer id to the reason why a share came back that had been given to it."""
    unsettled: float
    """Weight that is on its way: neither here nor there as far as this peer knows."""
    weight: float
    """That this peer holds after the step; with what is on its way to it, 1 on average where nobody was lost."""
    overdrawn: float
    """Weight given up because a share was taken back that the other had; 0 but after cuts longer than a minute."""
    unsure: float
    """Weight that came back from peers who are gone, or dead, and had been sent all of it: if one of them had taken it
    in, and its answer was lost, what it gave on of it counts twice. No more weight than this counts twice."""
    distance: float | None
    """Consensus distance: root mean square over the peers of the distance to their mean, from sketches (about 10%
    exact). Each of the others counts at the step that it told last, beside this peer at that step. None: no step of
    theirs can be compared."""
    bytes_sent: int
    """Bulk bytes, of gifts that were settled since the step before."""
    bytes_received: int
    seconds: float
    waiting_s: float
    """Part of it that was spent waiting for the gifts of others."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, keys in the order of the fields."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}

    def summary(self) -> str:
        """One line for a log."""
        apart = "not known" if self.distance is None else f"{self.distance:.3g}"
        parts = [
            f"{self.name} step {self.t}: gave to {len(self.gave)}, took from {len(self.took)} of {self.peers - 1}",
            f"weight {self.weight:.3g}, distance {apart}",
            f"{self.seconds:.2f} s (waiting {self.waiting_s:.2f})",
            f"sent {self.bytes_sent / 1e6:.2f} MB, received {self.bytes_received / 1e6:.2f} MB",
        ]
        parts += [f"back from {peer[:8]} ({why})" for peer, why in self.returned.items()]
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class MoshpitReport:
    """What one averaging on Moshpit's grid gave: a group's report per round."""

    name: str
    cycle: int
    """Times that the grid was gone through before, as the peers count together."""
    axes: tuple[int, ...]
    """Of the rounds that were made."""
    sides: tuple[int, ...]
    """Of the grid; everybody has the mean after as many rounds as it has sides."""
    peers: int
    """Who takes part in the grid, as far as it was known here when the cycle began."""
    rounds: tuple[GroupReport, ...]
    """Of each round that gave a mean."""
    failed: tuple[str, ...]
    """Why the others gave none; the vector went on as it was."""
    absent: Mapping[str, str] = dataclasses.field(hash=False)
    """Peer id to why it was in none of the groups, though it was to be in one: it did not come while it was waited for,
    or had gone on to a later round. Of one that followed others it is the last round that tells. Who failed in a group
    is in that one's `missing`."""
    weight: float
    """Sum of the weights of all that are in the mean, if nobody failed; the peers' number, with weights of 1."""
    complete: bool
    """All rounds of a cycle were made, and everybody's vector is in what came of them: the mean is exact."""
    seconds: float
    waiting_s: float
    """Part of them in which this peer waited for others to come."""

    @property
    def bytes_sent(self) -> int:
        return sum(report.bytes_sent for report in self.rounds)

    @property
    def bytes_received(self) -> int:
        return sum(report.bytes_received for report in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, keys in the order of the fields."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["rounds"] = [report.to_dict() for report in self.rounds]
        plain["absent"] = dict(self.absent)
        return plain | {"bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received}

    def summary(self) -> str:
        """One line for a log."""
        grid = "x".join(map(str, self.sides)) or "1"
        sizes = "+".join(str(len(report.contributors)) for report in self.rounds)
        parts = [
            f"{self.name} cycle {self.cycle}: {self.peers} peers on {grid}, groups of {sizes or 0}",
            f"weight {self.weight:g}, " + ("exact" if self.complete else "not everybody in"),
            f"{self.seconds:.2f} s",
            f"sent {self.bytes_sent / 1e6:.2f} MB, received {self.bytes_received / 1e6:.2f} MB",
        ]
        return "; ".join([*parts, *(f"{peer[:8]} {why}" for peer, why in self.absent.items()), *self.failed])


def waiting_text(
    reason: str, peers: Sequence[str], left_s: float | None, waited_s: float = 0.0, advice: str = ""
) -> str:
    """Why no round is possible now, whom we wait for (ids or addresses), and for how long yet: None: not without them;
    0: no longer. `waited_s`: how long it has been so; `advice`: what to do."""
    names = ", ".join(peer if ":" in peer else peer[:8] for peer in peers)
    if left_s is None:
        text = f"{reason}: {names}" if names else reason
        text += f" (for more than {waited_s:.0f} s)" if waited_s else ""
        return f"{text}; {advice}" if advice else text
    end = f"in {left_s:.0f} s at most" if left_s else "as soon as all that are left agree"
    return f"{reason}: {names}; going on without {end}"


def _missing_text(missing: Missing | Absent) -> str:
    part = "" if missing.fraction == 1.0 else f", {missing.fraction:.1%} of the elements"
    return f"{missing.peer[:8]} ({missing.reason}{part})"


def _check_fraction(fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
