"""`dlc bench serve`: the sockets, the clock and the threads around `host.Host`.

One thread serves; an ordered measurement has a thread of its own, with transports of its own.
"""

from __future__ import annotations

import logging
import queue
import random
import secrets
import threading

from dlc.bench.host import Abandon, Begin, Host, HostEffect, Reply
from dlc.bench.limits import GIVE_WAY_S, TAG
from dlc.bench.link import Budget, measure
from dlc.bench.stream import SiteBusy, new_block
from dlc.comm.addresses import join_address, parse_address
from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.framing import OtherVersion, decode, encode, told_version
from dlc.comm.ids import Voter
from dlc.comm.lanes import Incoming, Route
from dlc.comm.measures import MeasureOrder
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport
from dlc.errors import DlcError, ProtocolError, UsageError

log = logging.getLogger(__name__)

PORT_MAX = 65535
POLL_S_MAX = 0.25
FULL_POLL_S = 0.001
"""While a connection is full: the transport does not tell when one that others opened has room again."""
BULK_BURST = 4
"""Chunks handed to one connection before the others, and control messages, are looked at."""
LOG_BAD_FRAMES_EVERY = 100


class Site:
    """A site that serves measurements, on the thread that calls `run`. Raises UsageError if it cannot listen."""

    def __init__(self, listen: str, security: LinkSecurity | None, insecure: bool = False) -> None:
        ident, port = b"site" + secrets.token_bytes(8), parse_address(listen)[1]
        if port == PORT_MAX:
            raise UsageError(f"a site needs this port and the next one, and {PORT_MAX} is the last: listen on another")
        bulk_port = port + 1 if port else 0  # as a peer: a firewall needs two neighbours
        self._security = security
        self._transport = Transport(listen, security=security, insecure=insecure, ident=ident, bulk_port=bulk_port)
        self.host, self.port = self._transport.host, self._transport.control_port
        self.bulk_port = self._transport.bulk_port
        self.bad_frames = 0
        self._me = Voter("", secrets.randbits(32))
        self._host = Host(self.bulk_port, new_block())
        self._work: threading.Thread | None = None
        self._abandon = threading.Event()
        self._results: queue.SimpleQueue[tuple[str, float | None, float | None] | None] = queue.SimpleQueue()

    @property
    def address(self) -> str:
        """Where it listens, as this host can dial it."""
        return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set (call `wake` then)."""
        keep_freed_chunks()
        while not stop.is_set():
            now = clock()
            due = self._host.next_deadline()
            wait_s = POLL_S_MAX if due is None else min(max(due - now, 0.0), POLL_S_MAX)
            for event in self._transport.poll(min(wait_s, FULL_POLL_S) if self._host.waiting() else wait_s):
                if isinstance(event, Incoming) and event.route is not None:
                    self._receive(event, event.route)
            while not self._results.empty():
                result = self._results.get()
                if result is None:
                    self._host.give_way(clock())
                else:
                    self._host.finished(*result, clock())
            for effect in self._host.tick(clock()):
                self._perform(effect, None)
            for route in self._host.waiting():
                self._pump(route)

    def wake(self) -> None:
        """From another thread: let `run` look at its `stop` now."""
        self._transport.wake()

    def close(self) -> None:
        """End what is being measured and free the ports. After `run` has returned."""
        self._abandon.set()
        if self._work is not None:
            self._work.join()
        self._transport.close(0.2)

    def _receive(self, event: Incoming, route: Route) -> None:
        try:
            _, message = decode(event.frames, TAG)
            effects = self._host.receive(route, message, clock())
        except ProtocolError as error:
            self.bad_frames += 1
            if self.bad_frames % LOG_BAD_FRAMES_EVERY == 1:
                log.warning("dropped a frame from %s: %s (%d so far)", event.observed_host, error, self.bad_frames)
            if isinstance(error, OtherVersion) and error.hello and event.lane == "control":
                self._transport.reply(route, encode(self._me, TAG, told_version()))
            return
        for effect in effects:
            self._perform(effect, route)

    def _perform(self, effect: HostEffect, route: Route | None) -> None:
        if isinstance(effect, Begin):
            self._abandon = threading.Event()
            arguments = (effect.order, self._abandon)
            self._work = threading.Thread(target=self._measure, args=arguments, name="dlc-order", daemon=True)
            self._work.start()
        elif isinstance(effect, Abandon):
            self._abandon.set()
        elif isinstance(effect, Reply) and route is not None:
            self._transport.reply(route, encode(self._me, TAG, effect.message))

    def _pump(self, route: object) -> None:
        assert isinstance(route, Route)
        for _ in range(BULK_BURST):
            bulk = self._host.next_bulk(route)
            if bulk is None or not self._transport.reply(route, encode(self._me, TAG, bulk)):
                return
            self._host.sent(route)

    def _measure(self, order: MeasureOrder, abandon: threading.Event) -> None:
        """On a thread of its own."""
        log.info("asked to measure the way to %.80r", order.address)
        try:
            budget = Budget(order.seconds, order.bytes_max, (1,), down=False)
            busy_s = GIVE_WAY_S * random.uniform(1.0, 2.0)
            report = measure(order.address, self._security, budget, stop=abandon, session=order.order, busy_s=busy_s)
            self._results.put((report.streams[0].up_missing, report.up_mbps, report.rtt_ms))
        except SiteBusy:
            self._results.put(None)
        except DlcError as error:
            self._results.put((str(error), None, None))
        except Exception as error:
            log.exception("the measurement of %.80r failed", order.address)
            self._results.put((f"unexpected {type(error).__name__}: {error}", None, None))
        self.wake()
