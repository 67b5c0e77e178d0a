"""`Peer`: one member of a swarm, as a library object. Everything else in dlc is built on it.

A peer owns one driver thread, which owns the sockets and the protocol machines; the methods here hand work to that
thread and wait. Joining has two steps: the lobby finds out what the run is (the RunSpec comes from the swarm), then a
node takes part in it. All methods are thread-safe.

A forked child has no driver thread, so it cannot use its parent's peer: every call that needs it raises UsageError, and
`leave`, the end of a `with` block and the child's own end change nothing of the parent's. It does keep a copy of the
sockets open, so the ports are free again only when it has ended, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dlc.addressbook import AddressBook, known_to
from dlc.addresses import addresses_of, advertised, bulk_port_of, default_listen
from dlc.arguments import function, instance, seconds, whole
from dlc.channels import has_seat
from dlc.collectives import Collectives
from dlc.comm.bundle import STREAMS
from dlc.comm.clock import clock
from dlc.comm.driver import Driver
from dlc.comm.entries import EMPTY, SavedLog
from dlc.comm.events import (
    ContributionDropped,
    MemberDown,
    MemberLeft,
    MemberUp,
    RoundDone,
    SeenAt,
    SelfReplaced,
)
from dlc.comm.framing import run_tag
from dlc.comm.ground import Ground
from dlc.comm.ids import Voter
from dlc.comm.lobby import Desk, Lobby
from dlc.comm.log import HISTORY_BYTES_MAX
from dlc.comm.mesh import Mesh
from dlc.comm.node import Node, NodeConfig
from dlc.comm.roles import OBSERVER, ROLES
from dlc.comm.security import LinkSecurity, load_run_key
from dlc.comm.service import Service, ServiceNews
from dlc.comm.timeouts import Timeouts
from dlc.comm.transport import Transport
from dlc.comm.wire import unpack
from dlc.describing import described
from dlc.errors import CheckpointError, ConfigError, ProtocolError, RoundTimeout, SpecMismatch, SwarmClosed, UsageError
from dlc.eventlog import log_event
from dlc.handles import Checkpoint, Pending, Position, Reduction, Resume
from dlc.joining import Introduction, Reception, introduce
from dlc.runspec import RunSpec
from dlc.served import Served, Stopped
from dlc.statedir import Ephemeral, PeerState, StateDir
from dlc.strategyspec import WITHOUT_LOG, WITHOUT_RATES
from dlc.survey import Member, member_of, status
from dlc.watching import Callback, MemberChange, MemberWatch
from dlc.whereabouts import Whereabouts

__all__ = ["Checkpoint", "Member", "MemberChange", "Peer", "Pending", "Position", "Reduction", "Resume", "status"]

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Service)

KNOWN_MAX = 32
"""Former peers that are asked beside the listed addresses: one that lives is enough."""
REPLACED = (
    "another process with this peer's identity is newer, so this one has stopped: "
    "give each peer a state directory of its own"
)


class Peer(Collectives):
    """See `Peer.join`. Use as a context manager, or call `leave`."""

    def __init__(self, driver: Driver, intro: Introduction, on_event: Callable[[object], None] | None) -> None:
        super().__init__(driver)
        self._intro = intro
        self._on_event = on_event
        self._book = AddressBook(intro.state)
        self._mesh: Mesh | None = None
        self._listeners: list[Callable[[ServiceNews], None]] = []
        """Told on the driver thread what services say."""
        self._watch: MemberWatch | None = None
        self._former: dict[str, str] = {}
        """Peer ids of those that are waited for before the run goes on, with the addresses that they had."""
        self._whereabouts = Whereabouts(intro)
        self.spec = RunSpec()
        driver.on_event = self._event
        driver.on_reached = self._reached
        driver.on_stop = self._stopped
        self._at_exit = partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)

    # ---------------------------------------------------------------- joining

    @classmethod
    def join(
        cls,
        peers: Sequence[str] | str = (),
        *,
        run: str | None = None,
        key: str | bytes | Path | None = None,
        spec: RunSpec | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        state_dir: PeerState | Path | str | None = None,
        found: bool = False,
        insecure: bool = False,
        role: str = "trainer",
        hold: bool = False,
        join_timeout_s: float | None = None,
        resume: Resume | None = None,
        on_event: Callable[[object], None] | None = None,
        timeouts: Timeouts | None = None,
        log: bool = True,
        probe_links: bool = True,
        history_bytes: int = HISTORY_BYTES_MAX,
    ) -> Peer:
        """Join the run that `peers` (HOST:PORT) belong to; without `peers`, found one.

        key: the run key (its text, its 32 bytes, or the path of its file). listen: HOST:PORT, and the port after it;
        None is a free one: with a key (or `insecure`) on all interfaces, unless all `peers` are on this machine, else
        on loopback. advertise: HOST[:PORT], what others dial; another PORT than that of `listen`, and the port after
        it, lead there from outside. None: where it listens; if that is all interfaces, the host that others see, also
        where that changes, or else that of the default route, or, where that is none, the first that somebody reaches
        it by from beyond loopback. spec: None takes the swarm's. state_dir: identity and address book; None keeps them
        in memory only. With `spec`, those in the book are asked beside `peers`, which may be gone by now. found: begin
        the run, or go on with that of `resume`, where none of `peers` tells of one within 15 s. role: "trainer";
        "helper", which reduces for the others; or "observer", which looks on: it has no vote, takes part in no round,
        and is not waited for; without `peers` it waits until somebody has joined by its address, and begun the run.
        hold: return as soon as the RunSpec is known and take a seat with `open`; otherwise return as a voter. timeouts:
        None takes those of the RunSpec; others must be the same on every peer. log: False takes part without the
        replicated log, for what needs no rounds of all (`dlc.Group`, `dlc.Gossip`, `dlc.Moshpit`): nothing is founded
        or voted for, and one peer alone may begin; the same on all peers of a run; implied by strategies that need
        none. probe_links: before the first round, or group, send some junk to others, 64 MiB at a time at most, to see
        what the link carries, and receive theirs; False (for links that are paid by the byte): what it carries is
        learned in rounds, the first of which knows nothing. history_bytes: host memory for the results of the last
        rounds, of which at most 8 are kept (in fp16 2 bytes per parameter each), and those of the newest always: peers
        that missed a few are brought up to date by them, and newcomers, who fetch a state while rounds go on. on_event:
        called with each event (`dlc.comm.events`) on the thread that talks to the others, who wait for as long as it
        takes; what it raises is logged. It may use the peer, but for what waits for others; see `on_member_change`.

        Raises JoinError (unreachable, wrong key, other RunSpec) and UsageError (port taken, no key beyond loopback).
        """
        if role not in ROLES:
            raise UsageError(f"role is {role!r}: it must be one of {', '.join(ROLES)}")
        if role == OBSERVER and found and log:
            raise UsageError("an observer has no vote and founds no run: leave found away, and it waits for one")
        for name, given, kind, advice in (
            ("spec", spec, RunSpec, "give a dlc.RunSpec, such as RunSpec.from_toml(path)"),
            ("resume", resume, Resume, "give dlc.Resume.of(what state_dict(outer=True) returned)"),
            ("timeouts", timeouts, Timeouts, "give a dlc.comm.timeouts.Timeouts, or leave it to the RunSpec"),
            ("listen", listen, str, 'give HOST:PORT, such as "0.0.0.0:7700"'),
            ("advertise", advertise, str, "give HOST or HOST:PORT"),
            ("state_dir", state_dir, (PeerState, str, Path), "give the path of a folder"),
            ("key", key, (str, bytes, os.PathLike), "give the run key's text, its bytes, or the path of its file"),
        ):
            if given is not None:
                instance(name, given, kind, advice)
        if on_event is not None:
            function("on_event", on_event)
        if join_timeout_s is not None:
            join_timeout_s = seconds("join_timeout_s", join_timeout_s)
        history_bytes = whole("history_bytes", history_bytes, 0)
        listed = addresses_of(peers)
        if listen is None:
            listen = default_listen(listed, key is not None, insecure)
        if advertise is not None:
            advertised(advertise, 0)  # before there is anything to let go
        security = LinkSecurity.derive(load_run_key(key), "") if key is not None else None
        state = StateDir(state_dir) if isinstance(state_dir, str | Path) else state_dir or Ephemeral()
        try:
            voter = Voter(state.identity.peer, state.next_incarnation(secrets.randbits(32)))
            ident = f"{voter.peer}.{voter.inc}".encode()
            # Who goes on from a checkpoint has its RunSpec: it need not wait in the lobby for those that it knew.
            book = AddressBook(state)
            resumes = resume is not None and not listed and not found
            former, known_at = (book.awaited(), tuple(book.known().values())) if resumes else ({}, ())
            awaited = tuple(former.values()) if former else listed
            bulk_port = bulk_port_of(listen)
            transport = Transport(
                listen, security=security, insecure=insecure, ident=ident, bulk_port=bulk_port, streams=STREAMS
            )
            intro = Introduction(
                state, voter, transport.host, transport.control_port, transport.bulk_port, advertise, role
            )
            driver = Driver(transport, voter, lambda event: None)
        except BaseException:  # another try may use it
            state.close()
            raise
        peer = cls(driver, intro, on_event)
        peer._former = former
        waits = role == OBSERVER and log and not listed and (spec is None or spec.strategy not in WITHOUT_LOG)
        try:
            known = () if found else tuple(peer._book.known().values())[:KNOWN_MAX]
            if waits:
                lobby: Lobby = Desk(intro.record(), run or "", known)
            else:
                run_name = run or (spec.run if spec else "" if listed else RunSpec().run)
                own, digest = (spec.to_bytes(), spec.hash) if spec is not None else (b"", b"")
                lobby = Lobby(
                    intro.record(), run_name, own, digest, listed, known, lambda spec: not log or _without_log(spec)
                )
            reception = introduce(driver, lobby, listed, spec, run, security is not None, found, join_timeout_s)
            with_log = log and reception.spec.strategy not in WITHOUT_LOG
            told = {
                a: w.record for a, w in reception.answers.items() if w.record is not None and w.record.head != EMPTY
            }
            if told and not with_log:
                raise SpecMismatch(f"{next(iter(told))} takes part with the replicated log: leave log=False away, too")
            if waits and lobby.found is not None:
                awaited = (lobby.found.address,)
            # Who is told of the run joins it: a founder, which has no proof yet that others live, might begin another.
            founder, resume = (found and not told) or not awaited, resume if with_log else None
            peer._take_part(
                reception, awaited, known_at, founder, resume, timeouts, with_log, probe_links, history_bytes
            )
            if with_log and not hold:
                peer.take_seat(join_timeout_s)
        except BaseException:
            peer._shut(5.0)  # its port is free again, for another try
            raise
        return peer

    def _take_part(
        self,
        reception: Reception,
        listed: tuple[str, ...],
        known: tuple[str, ...],
        founder: bool,
        resume: Resume | None,
        timeouts: Timeouts | None,
        with_log: bool,
        probe_links: bool,
        history_bytes: int,
    ) -> None:
        """Leave the lobby: from here on a Node is driven."""
        intro, spec = self._intro, reception.spec
        self.spec = spec
        record = intro.record(reception.observed_host)
        try:
            resumed = unpack(resume.log, SavedLog) if resume is not None else None
        except ProtocolError as error:
            raise CheckpointError(f"what is given as resume holds no log of a run: {error}") from None
        if resumed is not None:
            if not resumed.fits:
                raise CheckpointError("what is given as resume holds the log of a run and the entries of another")
            self._resumed = resumed.state
        floors = timeouts or spec.timeouts.floors()
        probes = probe_links and spec.strategy not in WITHOUT_RATES
        config = NodeConfig(
            spec.run,
            spec.hash,
            spec.to_bytes(),
            listed,
            founder,
            floors,
            history_bytes_max=history_bytes,
            log=with_log,
            known=known,
            probe_links=probes,
        )

        def start(now: float) -> None:
            self._node = Node(
                record,
                config,
                sign=intro.sign,
                verify=intro.verify,
                rng=random.Random(secrets.randbits(64)),
                now=now,
                resumed=resumed,
            )
            for address, welcome in reception.answers.items():
                if welcome.record is not None:
                    self._node.slot.answers[address] = welcome.record.voter.peer
            node = self._node
            rng = random.Random(secrets.randbits(64))
            self._mesh = Mesh(Ground(node.me, node.members, node.exchange.rates, rng, node.rates_changed))
            node.services.add(self._mesh)
            self._driver.install(self._node, run_tag(spec.run, spec.hash), self._node)
            for met in reception.records:
                self._perform(self._node.members.learn(met, now))
            self._perform(self._node.tick(now))
            self._correct(self._whereabouts.begun(node.members.own))  # where the lobby was reached

        self._driver.ask(start)

    def take_seat(self, timeout_s: float | None = None) -> None:
        """Wait until this peer is a voter and knows all rounds so far: at once, unless it was joined with `hold`. An
        observer, which has no vote, waits for the rounds only.

        RoundTimeout: it is not after `timeout_s`. UsageError: it takes part without the log, where nobody votes.
        """

        def seated() -> bool:
            return self._ask(lambda node, now: has_seat(node) and node.log.synced)

        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        self._ask(lambda node, now: node.need_log("there are no seats"))
        self._wait(seated, timeout_s, "this peer has no seat in the swarm yet")

    # ---------------------------------------------------------------- machines outside the log

    def serve(self, make: Callable[[Node], S]) -> Served[S]:
        """Let the driver thread carry a machine beside the log; `make(node)` creates it there."""

        def start(node: Node, now: float) -> S:
            service = make(node)
            node.services.add(service)
            return service

        return Served(self, self._ask(start))

    @property
    def mesh(self) -> Served[Mesh]:
        """Notices, groups and what else is averaged beside the log: what dlc.Group, dlc.Gossip and dlc.Moshpit use."""
        if self._mesh is None:
            raise SwarmClosed("the peer is not part of a run")
        return Served(self, self._mesh)

    # ---------------------------------------------------------------- who and where

    @property
    def voter(self) -> Voter:
        """This process as a voter: peer id and incarnation."""
        return self._intro.voter

    @property
    def id(self) -> str:
        """Peer id, made of the public key: the same after a restart in the same `state_dir`."""
        return self._intro.voter.peer

    @property
    def role(self) -> str:
        """As it was joined: "trainer", "helper" or "observer"."""
        return self._intro.role

    @property
    def address(self) -> str:
        """HOST:PORT that others dial."""
        return self._ask(lambda node, now: node.members.own.control[0])

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.spec.run

    @property
    def state_path(self) -> Path | None:
        """The state directory; None where all is kept in memory."""
        return self._intro.state.path

    def members(self, departed: bool = False) -> list[Member]:
        """Everyone known, this peer included, as seen from here; with `departed` those that have left, too, as they
        were then."""

        def read(node: Node, now: float) -> list[Member]:
            members = node.members
            records = [*members.records(), *(members.departed() if departed else ())]
            seen = ((r, members.alive(r.voter), members.away(r.voter)) for r in records)
            return [member_of(record, alive, record.voter == node.me, away) for record, alive, away in seen]

        return self._look(read)

    def describe(
        self, *, speed: float | None = None, eta_s: float | None = None, status: dict[str, Any] | None = None
    ) -> None:
        """Tell others my speed (tokens/s), the seconds until my next contribution, and a small status for people.

        `status`: what JSON can hold, at most 1024 bytes of it. UsageError for a longer one, or a number that is not
        finite: the others would not take anything of this peer's any more.
        """
        changes = described(speed, eta_s, status)
        self._refuse_fork()
        if self._closed or not self._driver.running:
            raise self._driver.closed_error()
        self._tell(lambda node, now: node.describe(now, **changes))  # who trains does not wait for it

    def on_member_change(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(change)` whenever another member comes, stops answering, or leaves, from now on.

        On a thread of its own, one change after the other: it may take its time and use this peer. What it raises is
        logged. Returns a function that ends it.
        """
        function("callback", callback)

        def start(node: Node, now: float) -> MemberWatch:
            if self._watch is None:
                self._watch = MemberWatch(r.voter for r in node.members.records() if node.members.alive(r.voter))
            return self._watch

        return self._ask(start).add(callback)

    # ---------------------------------------------------------------- leaving

    def needed_by(self) -> tuple[str, ...]:
        """Peer ids of those who may still need something of this peer: their part of a mean of `dlc.Group` or
        `dlc.Moshpit` that is here, or what a step of `dlc.Gossip` gave them. `leave` waits for them."""
        owed = self.mesh.ask(lambda mesh, now: mesh.owed())
        return tuple(sorted({peer for peers in owed.values() for peer in peers}))

    def leave(self, timeout_s: float = 5.0) -> None:
        """Announce the leave, deliver what is queued, and end the driver thread. Idempotent; nothing in a forked child.

        Before that it waits until those who need something of what has ended here have it (`needed_by`; and a round may
        end before the last of it has reached everybody), for as long as `timeout_s` at most: on slow links give it
        more. Ctrl-C ends that wait.

        A script that ends without it, by an exception too, leaves on its way out.
        """
        timeout_s = min(seconds("timeout_s", timeout_s), threading.TIMEOUT_MAX)
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._see_off(timeout_s)
        finally:  # who interrupts that wants to leave all the same
            self._go(timeout_s)

    close = leave

    def _see_off(self, timeout_s: float) -> None:
        """Wait for those of `needed_by`, and not for who comes to need something meanwhile; and until all follow the
        last round, as they would go on without it where nobody else is left who has it."""
        if self._node is None or self._driver.is_current:
            return
        until = clock() + timeout_s
        with contextlib.suppress(SwarmClosed):
            try:
                if self._mesh is not None:
                    mesh = self.mesh
                    owed = mesh.ask(lambda mesh, now: mesh.owed().keys())
                    self._wait(lambda: not owed & mesh.ask(lambda mesh, now: mesh.owed().keys()), timeout_s, "")
                self._wait(lambda: not self._look(lambda node, now: node.left_behind()), until - clock(), "")
            except RoundTimeout:
                log.warning(
                    "leaves after %g s: others may still lack their part of what it has averaged with them; "
                    "leave(timeout_s=...) waits for longer",
                    timeout_s,
                )

    def _go(self, timeout_s: float) -> None:
        if self._driver.running and self._node is not None:
            try:
                self._save_address_book()
                self._act(lambda node, now: node.leave(now))
            except SwarmClosed:
                log.debug("the driver had ended before the leave")
        self._shut(timeout_s)

    def _shut(self, timeout_s: float) -> None:
        self._closed = True
        try:
            self._driver.stop(max(timeout_s, 0.1))
            if not self._driver.is_current:  # it tells when it ends: what it is at may be the end of a round
                self._stopped()
            if self._watch is not None:
                self._watch.close(timeout_s)
        finally:
            self._intro.state.close()
            atexit.unregister(self._at_exit)

    def _stopped(self) -> None:
        """The driver has ended: nobody may wait for it any more."""
        for listener in tuple(self._listeners):
            listener(Stopped(self._driver.closed_error()))
        self._all_over(self._driver.closed_error())
        if self._watch is not None:
            self._watch.close(0.0)
        self._tell_waiting()

    def _save_address_book(self) -> None:
        self._book.save(*self._ask(lambda node, now: known_to(node)))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    # ---------------------------------------------------------------- inside

    def _event(self, event: object) -> None:
        """On the driver thread."""
        match event:
            case SeenAt():
                if self._node is not None:
                    self._correct(self._whereabouts.seen(event.host, self._node.members.own))
                return
            case ServiceNews():
                for listener in tuple(self._listeners):
                    listener(event)
                return
            case RoundDone() | ContributionDropped():
                self._over(event)
            case MemberUp() | MemberDown() | MemberLeft():
                if isinstance(event, MemberUp):
                    self._whereabouts.answered()
                    self._came(event.voter.peer)
                if self._watch is not None:
                    self._watch.tell(event)
            case SelfReplaced():
                self._driver.stop(0.0, SwarmClosed(REPLACED))
        log_event(event, self._intro, heard=self._on_event is not None)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except BaseException:  # sys.exit(), which would end the driver's thread, too
                log.exception("the callback `on_event` failed at %s", type(event).__name__)
        self._tell_waiting()

    def _reached(self, host: str, now: float) -> None:
        """On the driver thread: somebody dialled this address of my host."""
        own = self._node.members.own if self._node is not None else None
        self._correct(self._whereabouts.reached(host, own))

    def _correct(self, changes: dict[str, Any]) -> None:
        if changes and self._node is not None:
            self._perform(self._node.describe(clock(), **changes))

    def _came(self, peer: str) -> None:
        """Who was to answer at an address is here, and may have another one now."""
        address = self._former.pop(peer, None)
        if address is not None and self._node is not None:
            self._node.slot.answers.setdefault(address, peer)


def _without_log(spec: bytes) -> bool:
    """Whether that is the RunSpec of a run without a log."""
    try:
        return RunSpec.from_bytes(spec).strategy in WITHOUT_LOG
    except (ProtocolError, ConfigError):  # it is refused later, with the reason
        return False


def _leave(peer: weakref.ref[Peer]) -> None:
    """At the end of the script."""
    if (left := peer()) is not None:
        left.leave()
