"""The first minute of a peer: who I am, whom I ask, and what I learn before I take part."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
from collections import Counter
from dataclasses import dataclass

from dlc.addresses import advertised, outbound_host
from dlc.comm.addresses import join_address, on_this_host
from dlc.comm.clock import clock
from dlc.comm.driver import Driver
from dlc.comm.entries import EMPTY
from dlc.comm.framing import run_tag
from dlc.comm.grid import LOOPBACK_CHUNK_ELEMS
from dlc.comm.identity import peer_id, verify
from dlc.comm.ids import Voter
from dlc.comm.lanes import FULL_PACKETS_LOST, LinkEvent
from dlc.comm.lobby import Desk, Lobby
from dlc.comm.messages import Record, Welcome
from dlc.comm.wire import pack
from dlc.errors import JoinError, SpecMismatch, UnreachableError, WrongKeyError
from dlc.handles import Flag
from dlc.runspec import RunSpec
from dlc.statedir import PeerState
from dlc.survey import OTHER_VERSION, UNANSWERED, wrong_key

log = logging.getLogger(__name__)

SAY_AFTER_S, SAY_EVERY_S_MAX = 5.0, 300.0
"""A joiner says whom it still waits for at first after this time, then after twice as long each time, up to this."""
DESK_SAYS_EVERY_S = 300.0
"""The same of an observer that waits for a run to begin."""
REFUSALS_MIN = 3
"""Handshakes in a row that an address ends, until it is believed that it has another key: one may end as it dies."""
FOUND_AFTER_S = 15.0
"""How long who may found the run alone asks the listed addresses first: one that lives would have answered by then."""


class OtherSpec(SpecMismatch):
    """The run that was found has another RunSpec than the one that was given."""

    def __init__(self, mine: RunSpec, theirs: RunSpec) -> None:
        super().__init__(mine, theirs)
        self.mine, self.theirs = mine, theirs

    def __str__(self) -> str:
        fields = "\n  ".join(self.mine.differences(self.theirs))
        said = (
            "the swarm runs another RunSpec; leave out --config and --rounds to take the swarm's, or mend these "
            "fields:\n  "
        )
        if not self.mine.same_but_length(self.theirs):
            return said + fields
        how = "to give the run another length, stop all of its peers, and start one with the new RUN.toml first"
        return f"{said}{fields}\n{how}"


@dataclass(frozen=True)
class Introduction:
    """Who this process is, and where it listens."""

    state: PeerState
    voter: Voter
    host: str
    control_port: int
    bulk_port: int
    advertise: str | None
    role: str

    def record(self, observed_host: str = "") -> Record:
        """My record on the empty log. Advertised: what the user said, else the host that others see, else a guess. Who
        says another port than that which is listened on has two ports side by side that lead here from outside."""
        host, port, bulk_port = self.host, self.control_port, self.bulk_port
        if self.advertise:
            host, port = advertised(self.advertise, port)
            bulk_port = bulk_port if port in (self.control_port, 65535) else port + 1
        elif ipaddress.ip_address(host).is_unspecified:
            host = observed_host or outbound_host(host)
        return Record(
            voter=self.voter,
            public_key=self.state.identity.public_key,
            control=(join_address(host, port),),
            bulk=(join_address(host, bulk_port),),
            role=self.role,
            head=EMPTY,
            tokens=0.0,
            depth=0,
            active=False,
            synced=False,
            speed=0.0,
            eta_s=-1.0,
            seq=0,
            left=False,
        )

    def sign(self, record: Record) -> Record:
        return dataclasses.replace(record, signature=self.state.identity.sign(_signed_part(record)))

    @staticmethod
    def verify(record: Record) -> bool:
        return peer_id(record.public_key) == record.voter.peer and verify(
            record.public_key, _signed_part(record), record.signature
        )


def _signed_part(record: Record) -> bytes:
    return pack(dataclasses.replace(record, signature=b""))


@dataclass(frozen=True)
class Reception:
    """What the lobby learned."""

    spec: RunSpec
    answers: dict[str, Welcome]
    records: tuple[Record, ...]
    observed_host: str


def introduce(
    driver: Driver,
    lobby: Lobby,
    listed: tuple[str, ...],
    spec: RunSpec | None,
    run: str | None,
    has_key: bool,
    may_found: bool,
    timeout_s: float | None,
) -> Reception:
    """Drive the lobby until the RunSpec is known. may_found: who does not answer is not waited for beyond
    FOUND_AFTER_S. Raises UnreachableError, WrongKeyError, SpecMismatch; JoinError where all are of another version."""
    failures: dict[str, LinkEvent] = {}
    refusals = Counter[str]()
    ended: set[str] = set()
    """Where a connection was made, and ended."""
    changed = Flag()

    def on_link(event: LinkEvent) -> None:
        refusals[event.address] = refusals[event.address] + 1 if event.kind == "auth_failed" else 0
        if event.kind == "disconnected":
            ended.add(event.address)
        elif event.kind != "connected":
            failures[event.address] = event
        elif not _other_version(failures.get(event.address)):
            failures[event.address] = _unanswered(event, ended)
        changed.set()

    driver.on_link = on_link
    driver.install(lobby, run_tag("", b""), None)
    driver.start()
    deadline = None if timeout_s is None else clock() + timeout_s
    waits = isinstance(lobby, Desk)
    began, said_of = clock(), lobby.silent()
    say_at, pause_s = began + (0.0 if waits else SAY_AFTER_S), SAY_AFTER_S
    while not lobby.done:
        unheard, silent = lobby.unheard(), lobby.silent()
        barred = [a for a in silent if refusals[a] >= REFUSALS_MIN]
        if barred and len(barred) + len(lobby.own()) == len(listed):
            raise WrongKeyError(wrong_key(barred, has_key))
        apart = [a for a in silent if _other_version(failures.get(a))]
        if apart and len(apart) + len(lobby.own()) == len(listed):
            raise JoinError(f"no member of this version of dlc is at {_tried(tuple(apart), failures)}")
        if not driver.running:
            raise UnreachableError(f"the network thread stopped: {driver.error}")
        if deadline is not None and clock() >= deadline:
            raise UnreachableError(_unreachable(lobby, failures, timeout_s or 0.0))
        if may_found and clock() >= began + FOUND_AFTER_S:
            so = "if they train as well, the longer history is the run once they are in reach, the other one is lost"
            log.warning("no answer for %.0f s: going on without %s; %s", FOUND_AFTER_S, _tried(unheard, failures), so)
            break
        if silent != said_of:  # another one to wait for, or one less
            said_of, pause_s = silent, SAY_AFTER_S
            say_at = min(say_at, clock() + pause_s)
        if waits and clock() >= say_at:
            say_at = clock() + DESK_SAYS_EVERY_S
            waited = clock() - began
            since = f"; waiting for {waited:.0f} s" if waited >= 1.0 else ""
            log.warning("there is no run yet: whoever joins by %s first begins it, and is looked on at from then on%s",
                        lobby.record.control[0], since)  # fmt: skip
        elif clock() >= say_at:
            pause_s = min(2.0 * pause_s, SAY_EVERY_S_MAX)
            say_at = clock() + pause_s
            log.warning("%s", _still(lobby, failures, clock() - began))
        changed.wait(0.05)
        changed.clear()
    else:
        if passed := tuple(a for a in lobby.silent() if _other_version(failures.get(a))):
            log.warning("going on without %s", _tried(passed, failures))
    driver.on_link = None
    answers = {a: t.answer for a, t in (*lobby.tries.items(), *lobby.known.items()) if t.answer is not None}
    return Reception(_agreed(lobby, spec, run), answers, _records(answers), _observed(answers))


def _other_version(event: LinkEvent | None) -> bool:
    return event is not None and event.kind == "other_version"


def _unanswered(event: LinkEvent, ended: set[str]) -> LinkEvent:
    """What is to be said of a connection on which nothing comes."""
    why = f"as on one before, which ended: {FULL_PACKETS_LOST}" if event.address in ended else OTHER_VERSION
    return dataclasses.replace(event, detail=f"{UNANSWERED}, {why}")


def _agreed(lobby: Lobby, spec: RunSpec | None, run: str | None) -> RunSpec:
    found = lobby.found
    theirs = RunSpec.from_bytes(found.spec) if found is not None else None
    if theirs is not None and run is not None and theirs.run != run:
        raise SpecMismatch(f"the peers belong to the run {theirs.run!r}, not to {run!r}")
    if theirs is not None and spec is not None and theirs.hash != spec.hash:
        raise OtherSpec(spec, theirs)
    if theirs is not None:
        return theirs
    if spec is not None:
        return spec
    return _usual(lobby, run)


def _usual(lobby: Lobby, run: str | None) -> RunSpec:
    """The RunSpec of a run that is founded without one: the same for all who begin together. On loopback, where all of
    them are or none is, it is for chunks that save processor time."""
    here = on_this_host(lobby.record.control[0])
    usual = RunSpec(chunk_elems=LOOPBACK_CHUNK_ELEMS if here else 0)
    told = {t.answer.run for t in lobby.tries.values() if t.answer is not None and t.answer.run}
    if len(told | ({run} if run is not None else set())) > 1:
        raise SpecMismatch(f"the peers are about to found the run {min(told - {run})!r}, not {run or max(told)!r}")
    run = min(told) if told else run
    return usual if run is None else dataclasses.replace(usual, run=run)


def _records(answers: dict[str, Welcome]) -> tuple[Record, ...]:
    own = [w.record for w in answers.values() if w.record is not None]
    return tuple(own) + tuple(r for w in answers.values() for r in w.records)


def _observed(answers: dict[str, Welcome]) -> str:
    return next((w.observed_host for w in answers.values() if w.observed_host), "")


def _still(lobby: Lobby, failures: dict[str, LinkEvent], waited_s: float) -> str:
    if not (silent := lobby.silent()):
        return f"{_waiting_too(lobby)} (for {waited_s:.0f} s)"
    advice = "if they are gone for good, give the address of another member (--peers)"
    if lobby.spec and lobby.own():
        advice += "; where nobody trains any more, --found begins the run, or goes on from a checkpoint, without them"
    return f"no answer for {waited_s:.0f} s: still trying {_tried(silent, failures)}; {advice}"


def _unreachable(lobby: Lobby, failures: dict[str, LinkEvent], timeout_s: float) -> str:
    if not lobby.unheard():
        return f"nobody has begun a run by this observer's address within {timeout_s:g} s"
    if not (silent := lobby.silent()):
        return f"no run was found within {timeout_s:g} s: {_waiting_too(lobby)}"
    return (
        f"no answer within {timeout_s:g} s from {_tried(silent, failures)}; "
        "check the address, that the peer runs, and that its port is open"
    )


def _waiting_too(lobby: Lobby) -> str:
    return f"{', '.join(lobby.unheard())} answered, but know of no run yet; each says for whom it waits"


def _tried(unheard: tuple[str, ...], failures: dict[str, LinkEvent]) -> str:
    return ", ".join(f"{a} ({failures[a].detail or failures[a].kind})" if a in failures else a for a in unheard)
