"""`DHT`: what OpenDiLoCo's programs make first and hand to the optimizer. Here it holds a `dlc.Peer`, and no table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlc.comm.roles import TRAINER
from dlc.compat.hivemind.p2p import Multiaddr, first_of, initial_of, listed
from dlc.compat.hivemind.peer_swarm import check_rounds
from dlc.errors import UsageError
from dlc.peer import Peer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


class DHT:
    """Joins the run of `initial_peers` (multiaddresses, or HOST:PORT); without them, founds one.

    host_maddrs: where to listen, the first TCP address of them; beyond loopback a run key is needed. announce_maddrs:
    what others dial, the first TCP address of them. run_key: its text, its bytes, or the path of its file.
    identity_path: the state directory, by which a peer is the same member after a restart. startup_timeout: seconds;
    None waits for ever.
    probe_links: as of `dlc.Peer.join`; False sends no junk to see what links carry. role: "trainer", or "observer", by
    which others join, and which trains nothing: without `initial_peers` it waits until one of them has begun the run.

    Raises what `Peer.join` raises; UsageError also where the run has no rounds of all: one of `dlc.compat.hivemind`, or
    with strategy "gossip", "moshpit" or "parameter-server". For values under keys, and for averages in groups, there is
    `dlc.compat.hivemind`.
    """

    def __init__(
        self,
        initial_peers: Sequence[str] | None = None,
        *,
        start: bool = False,
        host_maddrs: Sequence[str] | None = LOOPBACK,
        announce_maddrs: Sequence[str] | None = None,
        run_key: str | bytes | Path | None = None,
        identity_path: str | Path | None = None,
        startup_timeout: float | None = 60.0,
        probe_links: bool = True,
        role: str = TRAINER,
    ) -> None:
        self._peers = initial_of(listed("initial_peers", initial_peers))
        self._listen = first_of(listed("host_maddrs", host_maddrs) or LOOPBACK, "host_maddrs")
        announced = listed("announce_maddrs", announce_maddrs)
        self._advertise = first_of(announced, "announce_maddrs") if announced else None
        self._key, self._state_dir, self._timeout_s = run_key, identity_path, startup_timeout
        self._probe_links, self._role = probe_links, role
        self._peer: Peer | None = None
        if start:
            self.run_in_background()

    def run_in_background(self, await_ready: bool = True) -> None:
        """Join; returns as a member of the run, whatever `await_ready` says."""
        if self._peer is None:
            peer = Peer.join(
                self._peers,
                listen=self._listen,
                advertise=self._advertise,
                key=self._key,
                state_dir=self._state_dir,
                join_timeout_s=self._timeout_s,
                probe_links=self._probe_links,
                role=self._role,
                hold=True,
            )
            check_rounds(peer)
            try:
                peer.take_seat(self._timeout_s)
            except BaseException:
                peer.leave()
                raise
            self._peer = peer

    @property
    def peer(self) -> Peer:
        """UsageError before the start."""
        if self._peer is None:
            raise UsageError("this DHT was not started: give start=True, or call run_in_background()")
        return self._peer

    @property
    def peer_id(self) -> str:
        """That of the peer."""
        return self.peer.id

    def get_visible_maddrs(self) -> list[Multiaddr]:
        """What others give as `initial_peers`."""
        return [Multiaddr.of(self.peer.address, self.peer.id)]

    def shutdown(self) -> None:
        """Leave the run. Idempotent."""
        if self._peer is not None:
            self._peer.leave()

    def __enter__(self) -> DHT:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
