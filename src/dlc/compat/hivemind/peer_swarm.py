"""`Swarm` over a `dlc.Peer`: notices on its board, averages by `dlc.Group`, state by loans."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from dlc.comm.detector import HEARTBEATS_MAX
from dlc.comm.ids import Voter
from dlc.comm.loans import borrow, give_back, lend
from dlc.comm.mesh import Mesh
from dlc.comm.service import Members
from dlc.compat.hivemind.averaging.partition import AllreduceException
from dlc.compat.hivemind.swarm import VALUES, Notice, Outcome, Parts, Terms
from dlc.errors import JoinError, RoundTimeout, SwarmClosed, UsageError
from dlc.handles import Flag
from dlc.mesh import Group, GroupCall
from dlc.peer import Peer
from dlc.report import GroupReport
from dlc.strategyspec import WITHOUT_LOG

log = logging.getLogger(__name__)

RUN, RUN_OF_ROUNDS = "hivemind", "hivemind-rounds"
"""Names of runs that are begun here, without the log and with it."""
HELLO, HELLO_S, HELLO_TTL_S = "hello/", 3.0, 7 * 86400.0
"""Key of a notice that everybody has, and how long a newcomer waits for those of all others."""
LASTING = {HELLO: True, VALUES: False}
"""Notices of such keys are seen until they end, whatever becomes of their authors (`Heirs.keep`): also that one who was
killed had told all it knew, or newcomers would wait for it whenever one joins."""
LOOK_S = 0.05
"""How often it is looked whether a peer has told what it knows, or a state has come."""
LISTEN_S = 0.2
"""How often it is looked for changes of notices and members: they are read where they lie."""
FETCH_S = 6 * 3600.0
"""Limit of a fetch without one of its own; a donor that is silent is noticed long before."""
SECOND_S = 10.0
"""How long the members of a group wait for each other before a further part is averaged."""


class PeerSwarm:
    """Owns the peer: `leave` leaves. In a forked child whatever ends something changes nothing, as with the peer."""

    def __init__(self, peer: Peer, log: bool = False) -> None:
        self._peer, self._log = peer, log
        self._pid = os.getpid()
        self._listeners: list[Callable[[], None]] = []
        self._closed = Flag()
        self._said = -float("inf")
        self._watcher: threading.Thread | None = None

    @classmethod
    def join(
        cls,
        peers: Sequence[str],
        *,
        listen: str,
        advertise: str | None,
        key: str | bytes | Path | None,
        state_dir: str | Path | None,
        timeout_s: float,
        log: bool = False,
        probe_links: bool = True,
    ) -> PeerSwarm:
        """As `Peer.join`; None of `peers`: a run is begun. With the log, a seat is waited for by whoever needs it."""
        swarm = cls(
            Peer.join(
                peers,
                run=None if peers else RUN_OF_ROUNDS if log else RUN,
                listen=listen,
                advertise=advertise,
                key=key,
                state_dir=state_dir,
                join_timeout_s=timeout_s,
                log=log,
                hold=log,
                probe_links=probe_links,
            ),
            log,
        )
        if log:
            check_rounds(swarm._peer)
        try:
            swarm._peer.mesh.act(lambda mesh, now: [e for keys in LASTING.items() for e in mesh.outlive(*keys, now)])
            swarm._greet()
        except BaseException:  # nobody has it who could let it leave
            swarm.leave()
            raise
        return swarm

    @property
    def peer(self) -> Peer:
        """For what needs rounds of all peers. UsageError where the log is not kept."""
        if not self._log:
            raise UsageError("this DHT has no part in rounds of all peers: make it with log=True, on every peer")
        return self._peer

    def _greet(self) -> None:
        """Wait until the notices of all who are here have come: what a newcomer decides by must not lack them."""
        self._hello()
        end = time.monotonic() + HELLO_S
        while silent := self._silent():
            if time.monotonic() >= end:
                break
            self._closed.wait(LOOK_S)
        if late := [peer[:8] for peer, lives in silent.items() if lives]:
            log.warning("%s did not tell what they know within %g s; going on without", ", ".join(late), HELLO_S)
        if gone := [peer[:8] for peer, lives in silent.items() if not lives]:
            log.info("%s did not answer, and may be gone", ", ".join(gone))

    def _silent(self) -> dict[str, bool]:
        """Members that have told nothing yet, and whether each is known to live. For the dead others speak."""
        hellos = self.notices(HELLO)
        heard, spoken = {n.author for n in hellos}, {n.key.removeprefix(HELLO) for n in hellos}
        silent = [m for m in self._peer.members() if not m.left and m.id not in heard]
        return {m.id: m.alive for m in silent if m.alive or m.id not in spoken}

    def _hello(self) -> None:
        if time.monotonic() - self._said > HELLO_TTL_S / 8:
            self._said = time.monotonic()
            self.post(f"{HELLO}{self.id}", b"", HELLO_TTL_S)

    @property
    def id(self) -> str:
        return self._peer.id

    @property
    def address(self) -> str:
        return self._peer.address

    def present(self) -> frozenset[str]:
        def read(mesh: Mesh, now: float) -> frozenset[str]:
            members = mesh.ground.members
            return frozenset(r.voter.peer for r in members.records() if _lives(members, r.voter))

        return self._peer.mesh.ask(read) | {self.id}

    # ---------------------------------------------------------------- notices

    def post(self, key: str, value: bytes, ttl_s: float) -> None:
        self._peer.mesh.act(lambda mesh, now: mesh.post(key, value, ttl_s, now))

    def withdraw(self, key: str) -> None:
        if os.getpid() == self._pid:
            self._peer.mesh.act(lambda mesh, now: mesh.withdraw(key, now))

    def notices(self, prefix: str) -> list[Notice]:
        return self._peer.mesh.ask(
            lambda mesh, now: [
                Notice(author, key, posted.value, _lives(mesh.ground.members, posted.author))
                for key in mesh.board.keys(prefix)
                for author, posted in mesh.board.get(key).items()
            ]
        )

    def listen(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(changed)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="dlc-hivemind-watch", daemon=True)
            self._watcher.start()
        return lambda: self._listeners.remove(changed)

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._closed.wait(LISTEN_S)  # and then once more: who listens must learn that it is over
            for listener in tuple(self._listeners):
                listener()

    # ---------------------------------------------------------------- averages

    def average(self, key: str, parts: Parts, terms: Terms) -> Outcome | None:
        self._hello()
        missing: dict[str, str] = {}
        first: GroupReport | None = None
        given_up, beginning = Flag(), threading.Lock()

        def give_up() -> None:
            given_up.set()
            with beginning:  # who gives up goes on when what begins just now is cancelled, too
                pass

        terms.when_given_up(give_up)
        for index, (vector, codec) in enumerate(parts):
            group = Group(
                self._peer,
                key if first is None else f"{key}/{index}",
                peers=None if first is None else sorted(first.gathered),
                target_size=terms.target if first is None else None,
                min_size=terms.minimum if first is None else 1,
                matchmaking_s=terms.patience_s if first is None else SECOND_S,
                codec=codec,
                owns=terms.owns,
                expected=terms.expected if first is None else None,
                formed=(lambda _: terms.formed()) if first is None else None,
            )
            with beginning:
                if given_up.is_set():
                    return None
                call = group.begin(
                    vector,
                    weight=terms.weight,
                    gather=terms.data,
                    contributes=terms.contributes,
                    receives=terms.contributes,
                    keeps_unsaid=terms.keeps_unsaid,
                    timeout_s=group.matchmaking_s + terms.budget_s,
                )
                terms.when_given_up(partial(_cancel, call))
            report = _waited(call)
            if call.mean is not None:
                parts[index] = call.mean, codec
            first = first or report
            if terms.contributes:  # who receives nothing cannot know
                missing.update({absent.peer: absent.reason for absent in report.missing})
        assert first is not None
        return Outcome(tuple(sorted(first.gathered)), first.gathered, missing, first)

    # ---------------------------------------------------------------- state

    def hold(self, key: str, data: bytes, ttl_s: float) -> None:
        self._peer.mesh.act(lambda mesh, now: lend(mesh, key, data, ttl_s, now))

    def release(self, key: str) -> None:
        if os.getpid() == self._pid:
            self._peer.mesh.act(lambda mesh, now: give_back(mesh, key, now))

    def fetch(self, peer: str, key: str, n_bytes: int, timeout_s: float | None) -> bytes | None:
        out, over, why = bytearray(n_bytes), Flag(), [""]
        limit_s = FETCH_S if timeout_s is None else timeout_s

        def ended(reason: str) -> None:
            why[0] = reason
            over.set()

        self._peer.mesh.act(lambda mesh, now: borrow(mesh, key, peer, out, limit_s, ended, now))
        while not over.wait(LOOK_S):
            self._peer.mesh.ask(lambda mesh, now: None)  # SwarmClosed, where nothing will come any more
        if why[0]:
            raise JoinError(f"{peer[:8]} did not give its state: {why[0]}")
        return bytes(out)

    def leave(self) -> None:
        self._closed.set()
        self._peer.leave()
        for listener in tuple(self._listeners):
            listener()  # so that whoever waits for news learns that there will be none


def check_rounds(peer: Peer) -> None:
    """UsageError, and it has left, where it has joined a run without the log: it would wait for a seat for ever."""
    if peer.spec.run == RUN:
        remedy = "start `python -m dlc.compat.hivemind` with --log, and make each dlc.compat.hivemind.DHT with log=True"
    elif (strategy := peer.spec.strategy) in WITHOUT_LOG:
        remedy = (
            f'the run {peer.spec.run!r} has strategy = "{strategy}", which `dlc join` trains; give peers of another'
        )
    else:
        return
    peer.leave()
    raise UsageError(f"the peers of this run take part in no rounds of all: {remedy}")


def _lives(members: Members, voter: Voter) -> bool:
    """As far as is known; in swarms too large to ping all of them it answered once, and nobody has found it dead."""
    return members.alive(voter) or (len(members.records()) > HEARTBEATS_MAX and members.up(voter))


def _waited(call: GroupCall) -> GroupReport:
    try:
        return call.wait()
    except RoundTimeout as error:
        if not call.members:
            raise AllreduceException(str(error)) from error
        raise


def _cancel(call: GroupCall) -> None:
    """Before who has cancelled goes on: a step that follows must not meet those who saw this one."""
    with suppress(SwarmClosed):
        call.cancel()


__all__ = ["PeerSwarm"]
