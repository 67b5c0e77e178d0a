"""`DHT`: this process's handle on the swarm. Under it is one `dlc.Peer`; there is no second process and no fork."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from dlc.comm.board import TTL_S_MAX, VALUE_BYTES_MAX
from dlc.compat.hivemind.dht.crypto import RSASignatureValidator
from dlc.compat.hivemind.dht.schema import SchemaValidator
from dlc.compat.hivemind.dht.storage import Record, hidden_until, is_plain, newest, notice_key, notice_prefix, records
from dlc.compat.hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from dlc.compat.hivemind.p2p import Multiaddr, PeerID, first_of, initial_of, listed
from dlc.compat.hivemind.refused import INSIDE, attribute_hook, refuse
from dlc.compat.hivemind.swarm import Swarm
from dlc.compat.hivemind.utils.background import AwaitableFuture
from dlc.compat.hivemind.utils.timed_storage import DHTExpiration, ValueWithExpiration, get_dht_time
from dlc.errors import UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")

NEEDLESS = frozenset(
    "auto_nat backoff_rate blacklist_time bootstrap_timeout bucket_size cache_locally cache_nearest cache_on_store "
    "cache_refresh_before_expiry cache_size check_if_identity_free chunk_size conn_manager depth_modulo dht_mode "
    "ensure_bootstrap_success force_reachability idle_timeout nat_port_map num_replicas parallel_rpc "
    "persistent_conn_max_msg_size quic refresh_timeout relay_hop_limit reuse_get_requests strict tls trusted_relays "
    "use_relay_discovery use_relay_hop wait_timeout".split()
)
"""Of Hivemind's DHTNode and P2P, taken and not used: every peer holds all values, and dials those that it knows."""
NEEDLESS_GET = frozenset("beam_size num_workers sufficient_expiration_time".split())
NEEDLESS_STORE = frozenset("await_all_replicas exclude_self".split())
"""Of DHTNode's look-ups and stores, taken and not used."""
REFUSED = {
    "authorizer": "give a run_key, without which nobody joins",
    "no_listen": "a peer must be reachable; client_mode=True keeps the work of averages from it",
    "node_id": "a peer is named by its key pair: give identity_path, to keep it",
}
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
_keys: dict[str, str | bytes | Path | None] = {"default": None}


def set_run_key(key: str | bytes | Path | None) -> None:
    """The run key of every `DHT` from now on that is made without one of its own; the text, its bytes, or a file."""
    _keys["default"] = key


class DHT:
    """Joins the swarm of `initial_peers` (HOST:PORT or multiaddresses); without them, begins one.

    host_maddrs: where to listen, the first TCP address of them; beyond loopback a run key is needed: `run_key`, or
    `set_run_key`. announce_maddrs: what others dial. client_mode: averagers of this peer own no part of a mean.
    identity_path: a folder for the key pair of this peer. p2p: a `Swarm` that is there already, instead of a peer. log:
    take part in rounds of all peers, too, as `dlc.compat.opendiloco` needs; the same on all peers of a run.
    probe_links: as of `dlc.Peer.join`; False sends no junk to see what links carry.

    record_validators: asked of every value that this peer stores or reads (`RSASignatureValidator`, `SchemaValidator`,
    or one of your own); peers that exchange values have the same.

    Not needed, and of no effect: daemon, num_workers, shutdown_timeout, await_ready, use_relay, use_auto_relay, and of
    Hivemind's DHTNode and P2P the names in `NEEDLESS`. NotOffered: `use_ipfs`, `authorizer`, `no_listen`, `node_id`.
    TypeError: any other name.
    ValueError (a UsageError): there are initial_peers, and none is of TCP; where some are, those of QUIC and UDP are
    logged and ignored. JoinError, UsageError: as of `dlc.Peer.join`.
    """

    def __init__(
        self,
        initial_peers: Sequence[str] | None = None,
        *,
        start: bool,
        p2p: Swarm | None = None,
        daemon: bool = True,
        num_workers: int = 4,
        record_validators: Iterable[RecordValidatorBase] = (),
        shutdown_timeout: float = 3.0,
        await_ready: bool = True,
        host_maddrs: Sequence[str] | None = LOOPBACK,
        announce_maddrs: Sequence[str] | None = None,
        client_mode: bool = False,
        identity_path: str | Path | None = None,
        use_ipfs: bool = False,
        use_relay: bool = True,
        use_auto_relay: bool = False,
        startup_timeout: float = 60.0,
        run_key: str | bytes | Path | None = None,
        log: bool = False,
        probe_links: bool = True,
        **of_hivemind: Any,
    ) -> None:
        peers = listed("initial_peers", initial_peers)
        self._host_maddrs = listed("host_maddrs", host_maddrs) or list(LOOPBACK)
        self._announce_maddrs = listed("announce_maddrs", announce_maddrs)
        for name in of_hivemind:
            if name in REFUSED and of_hivemind[name]:
                raise refuse(f"DHT({name}=...)", REFUSED[name])
            if name not in REFUSED and name not in NEEDLESS:
                raise TypeError(f"DHT has no argument {name!r}")
        if use_ipfs:
            raise refuse("use_ipfs", "give the address of a peer as initial_peers")
        self._validator = CompositeValidator(record_validators)
        self.initial_peers = initial_peers
        self._contacts = initial_of(peers)
        self._client_mode = client_mode
        self._identity_path, self._startup_timeout, self._run_key = identity_path, startup_timeout, run_key
        self._swarm, self._log, self._probe_links = p2p, log, probe_links
        self._closed = False
        self._warned: set[str] = set()
        """Of whom it was told that what they stored is of no use here."""
        self.averagers: dict[str, Any] = {}
        """By prefix, those that are not shut down: a peer has one."""
        if start:
            self.run_in_background()

    # ---------------------------------------------------------------- beginning and end

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Join; returns as a member. The arguments change nothing."""
        if self._swarm is None:
            from dlc.compat.hivemind.peer_swarm import PeerSwarm

            self._swarm = PeerSwarm.join(
                self._contacts,
                listen=first_of(self._host_maddrs, "host_maddrs"),
                advertise=first_of(self._announce_maddrs, "announce_maddrs") if self._announce_maddrs else None,
                key=self._run_key if self._run_key is not None else _keys["default"],
                state_dir=self._identity_path,
                timeout_s=self._startup_timeout,
                log=self._log,
                probe_links=self._probe_links,
            )

    start = run_in_background

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """It is ready since it was started. UsageError before that."""
        self.swarm  # noqa: B018

    @property
    def swarm(self) -> Swarm:
        """What averagers and trackers stand on. UsageError before the start."""
        if self._swarm is None:
            raise UsageError("this DHT was not started: give start=True, or call run_in_background()")
        return self._swarm

    def is_alive(self) -> bool:
        """Started, and not shut down."""
        return self._swarm is not None and not self._closed

    def shutdown(self) -> None:
        """Leave the swarm; averagers of this DHT end with it. Idempotent."""
        if self.is_alive():
            self._closed = True
            self.swarm.leave()

    terminate = kill = shutdown

    def join(self, timeout: float | None = None) -> None:
        """There is no process to wait for."""

    def __enter__(self) -> DHT:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---------------------------------------------------------------- who and where

    @property
    def peer_id(self) -> PeerID:
        return PeerID(self.swarm.id)

    @property
    def client_mode(self) -> bool:
        return self._client_mode

    def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """What others give as `initial_peers`; str() of one, or the object."""
        return [Multiaddr.of(self.swarm.address, self.swarm.id)]

    # ---------------------------------------------------------------- values

    @overload
    def store(
        self,
        key: Any,
        value: Any,
        expiration_time: DHTExpiration,
        subkey: Any = None,
        return_future: Literal[False] = False,
        **of_hivemind: Any,
    ) -> bool: ...

    @overload
    def store(
        self,
        key: Any,
        value: Any,
        expiration_time: DHTExpiration,
        subkey: Any = None,
        *,
        return_future: Literal[True],
        **of_hivemind: Any,
    ) -> AwaitableFuture[bool]: ...

    def store(
        self,
        key: Any,
        value: Any,
        expiration_time: DHTExpiration,
        subkey: Any = None,
        return_future: bool = False,
        **of_hivemind: Any,
    ) -> bool | AwaitableFuture[bool]:
        """Tell all peers a small value (msgpack) under `key`, or under a subkey of it, until `expiration_time`.

        True: it is on its way, and the `get` of another peer finds it once it has come there. False: it has expired
        already, a validator does not take it, or `get` would not give it: another value is known that ends no sooner
        (with a subkey: of that, or one without; without: any of the key).
        With return_future, a future. UsageError: it is more than 64 KB, or this peer has 4096 values, or 4 MB, already.
        TypeError: the subkey cannot be one of a dict. No effect: `NEEDLESS_STORE`.
        """
        _check_names("DHT.store", of_hivemind, NEEDLESS_STORE)
        hash(subkey)  # TypeError
        now, found = get_dht_time(), self._records(key)
        if expiration_time <= max(now, hidden_until(found, subkey)):
            return _maybe_future(False, return_future)
        raw = Record(key, subkey, value, float(expiration_time)).to_bytes(self._validator)
        if raw is None:
            log.warning("the value for %r is refused by a validator of this peer; it is not stored", key)
            return _maybe_future(False, return_future)
        if len(raw) > VALUE_BYTES_MAX:
            raise UsageError(
                f"the value for {key!r} takes {len(raw)} bytes with its key, at most {VALUE_BYTES_MAX} are told to all "
                "peers: store less, or hand out state by load_state_from_peers of an averager"
            )
        ttl_s = expiration_time - now
        if ttl_s > TTL_S_MAX:
            log.warning("a value is kept for %g days; store it again before that", TTL_S_MAX / 86400)
        if subkey is not None and is_plain(found):
            self._end_subkeys(key)  # a new dict begins, and they would be in it
        self.swarm.post(notice_key(key, subkey), raw, min(ttl_s, TTL_S_MAX))
        if subkey is None:
            self._end_subkeys(key)  # now that others have something in their place
        return _maybe_future(True, return_future)

    @overload
    def get(
        self, key: Any, latest: bool = False, return_future: Literal[False] = False, **of_hivemind: Any
    ) -> ValueWithExpiration[Any] | None: ...

    @overload
    def get(
        self, key: Any, latest: bool = False, *, return_future: Literal[True], **of_hivemind: Any
    ) -> AwaitableFuture[ValueWithExpiration[Any] | None]: ...

    def get(
        self, key: Any, latest: bool = False, return_future: bool = False, **of_hivemind: Any
    ) -> ValueWithExpiration[Any] | AwaitableFuture[ValueWithExpiration[Any] | None] | None:
        """(value, expiration time) as a `ValueWithExpiration`, None where there is none: the latest that has come here.

        Where subkeys were stored, the value is a dict of subkey to `ValueWithExpiration`. No effect: `NEEDLESS_GET`.
        """
        _check_names("DHT.get", of_hivemind, NEEDLESS_GET)
        return _maybe_future(newest(self._records(key)), return_future)

    def _records(self, key: Any) -> list[Record]:
        return records(self.swarm.notices(notice_prefix(key)), key, self._validator, self._warned)

    def _end_subkeys(self, key: Any) -> None:
        """Withdraw what this peer has stored under subkeys of `key`."""
        for notice in self.swarm.notices(notice_prefix(key)):
            if notice.author == self.swarm.id and notice.key != notice_key(key, None):
                self.swarm.withdraw(notice.key)

    def add_validators(self, record_validators: Iterable[RecordValidatorBase]) -> None:
        """Ask these, too, from now on, also of what is stored already. TypeError: one is no validator."""
        self._validator.extend(record_validators)

    # ---------------------------------------------------------------- not offered

    def run_coroutine(self, coro: Callable[..., Any], return_future: bool = False) -> Any:
        """Refused: there is no event loop, and no DHTNode to hand to a coroutine."""
        raise refuse("DHT.run_coroutine", "there is no DHT node; use store, get, peer_id, get_visible_maddrs")

    async def replicate_p2p(self) -> Any:
        """Refused: there is no daemon to share."""
        raise refuse("DHT.replicate_p2p", "there is no libp2p daemon; averagers share the DHT's own peer")


def _check_names(what: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no argument {name!r}")


def _maybe_future(value: T, wanted: bool) -> T | AwaitableFuture[T]:
    if not wanted:
        return value
    future: AwaitableFuture[T] = AwaitableFuture()
    future.set_result(value)
    return future


__getattr__ = attribute_hook(__name__, dict.fromkeys(("DHTID", "DHTNode", "DHTValue"), INSIDE))

__all__ = [
    "DHT",
    "CompositeValidator",
    "DHTExpiration",
    "DHTRecord",
    "RSASignatureValidator",
    "RecordValidatorBase",
    "SchemaValidator",
    "ValueWithExpiration",
    "set_run_key",
]
