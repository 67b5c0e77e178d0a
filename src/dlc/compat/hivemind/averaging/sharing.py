"""State of one peer for another: a donor gives when asked, a loader asks the donors by priority.

    loader                                   donor
    notice want/PREFIX/DONOR  (nonce) ─────> takes its state, holds the bytes under the nonce
    fetches them              <───────────── notice have/PREFIX/LOADER  (nonce, length; or none: not from me)

The state is taken when it is asked for. Donors of equal priority are asked in an order by chance; but of those with
priority 0, who have nothing in common yet, the eldest first. Who is loading itself comes last, and does not give.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from dlc.compat.hivemind.averaging.directory import Directory, Entry, seniority
from dlc.compat.hivemind.averaging.image import unpack_state
from dlc.compat.hivemind.swarm import Swarm, key_of
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import DlcError, SwarmClosed
from dlc.handles import Flag

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a donor may take to collect its state."""
HOLD_S = 6 * 3600.0
"""How long it holds a state while the process that loads it lives; what was fetched, or has no loader, is given back
at once."""
STATE_BYTES_MAX = 1 << 36
"""Of one state: what a donor says is allocated."""
LOOK_S = 0.5
"""At least this often the notices are looked at, even if nothing was heard."""

State = tuple[object, list[Tensor]]


class Sharing:
    """Both sides for one averager. `take` gives this peer's state as bytes; it runs on a thread of this object."""

    def __init__(self, swarm: Swarm, prefix: str, directory: Directory, take: Callable[[], bytes]) -> None:
        self._swarm, self._prefix, self._directory, self._take = swarm, key_of(prefix), directory, take
        self._waiting: set[Flag] = set()
        """One of each thread that waits here, told of all that changes."""
        self._closed = False
        self._numbers, self._loads = itertools.count(), set[int]()
        """Of the loads that are wanted: the first is on its way. Two at a time would have one entry, and of a donor one
        request, between them."""
        self._served: dict[str, str] = {}
        """By loader, its last request."""
        self._held: dict[str, str] = {}
        """By nonce of what I hold, for whom."""
        self._unlisten = swarm.listen(self._notice)
        threading.Thread(target=self._serve, name="dlc-hivemind-state", daemon=True).start()

    def close(self) -> None:
        self._unlisten()
        self._closed = True
        self._notice()

    def load(self, timeout_s: float | None) -> State | None:
        """The state of the best donor that gives it; None if there is none, or time is over: a second load waits for
        the first."""
        end, number = None if timeout_s is None else time.monotonic() + timeout_s, next(self._numbers)
        try:
            self._loads.add(number)
            if not self._wait_for(lambda: self._closed or min(self._loads) == number, end):
                log.warning("no state is loaded: another load of this averager is still on its way")
                return None
            try:
                self._directory.change(loading=True)
                return self._loaded(end)
            finally:
                self._directory.change(loading=False)
        finally:
            self._loads.discard(number)
            self._notice()

    def _loaded(self, end: float | None) -> State | None:
        donors = self._donors()
        if not donors:
            log.info("no peer offers its state")
        for donor in donors:
            try:
                state = self._load_from(donor, end)
            except SwarmClosed:
                raise
            except DlcError as error:
                log.warning("the state of %s could not be loaded: %s", donor[:8], error)
                continue
            if state is not None:
                log.info("loaded the state of %s", donor[:8])
                return state
        return None

    def _donors(self) -> list[str]:
        """Best first."""

        giving = [(peer, entry) for peer, entry in self._directory.others().items() if entry.priority is not None]

        def rank(item: tuple[str, Entry]) -> tuple[float, ...]:
            by_chance = random.random() if item[1].priority else 0.0
            return -(item[1].priority or 0.0), item[1].loading, by_chance

        return [peer for peer, _ in sorted(sorted(giving, key=lambda item: seniority(*item)), key=rank)]

    def _load_from(self, donor: str, end: float | None) -> State | None:
        nonce, want = secrets.token_hex(8), f"want/{self._prefix}/{donor}"
        try:
            self._swarm.post(want, nonce.encode(), HOLD_S)
            return self._take_over(donor, nonce, end)
        finally:
            self._swarm.withdraw(want)

    def _take_over(self, donor: str, nonce: str, end: float | None) -> State | None:
        def over() -> bool:
            here = not self._closed and donor in self._swarm.present()
            return self._answer(donor, nonce) is not None or not here

        self._wait_for(over, time.monotonic() + min(_left(end), ANSWER_S))
        answer = self._answer(donor, nonce)
        if answer is None:
            log.warning("%s did not answer the request for its state", donor[:8])
            return None
        if not 0 < answer <= STATE_BYTES_MAX:
            return None
        left = _left(end)
        raw = self._swarm.fetch(donor, f"state/{nonce}", answer, None if left == float("inf") else left)
        if raw is None:
            log.warning("%s did not send its state in time", donor[:8])
            return None
        return unpack_state(raw)

    def _answer(self, donor: str, nonce: str) -> int | None:
        """Bytes of the state; -1: it is refused; None: no answer yet."""
        for notice in self._swarm.notices(f"have/{self._prefix}/{self._swarm.id}"):
            fields = _fields(notice.value)
            if notice.author == donor and fields[0] == nonce and isinstance(fields[1], int):
                return fields[1]
        return None

    def _wait_for(self, over: Callable[[], bool], end: float | None) -> bool:
        """Until `over()`, which is looked at after every change; False: the time is `end`, and it is not."""
        changed = Flag()
        try:
            self._waiting.add(changed)
            while not over():
                if (left := _left(end)) <= 0:
                    return False
                changed.wait(min(left, LOOK_S))
                changed.clear()
            return True
        finally:
            self._waiting.discard(changed)

    # ---------------------------------------------------------------- the donor

    def _notice(self) -> None:
        """Something changed; on any thread."""
        for changed in tuple(self._waiting):
            changed.set()

    def _serve(self) -> None:
        changed = Flag()
        self._waiting.add(changed)
        with suppress(SwarmClosed):
            while not self._closed:
                changed.clear()
                asked = self._swarm.notices(f"want/{self._prefix}/{self._swarm.id}")
                if self._closed:  # whoever has asked since is answered by who is in its place
                    break
                wanted = [notice for notice in asked if notice.lives]
                self._give_back({notice.value.decode(errors="replace") for notice in wanted})
                for notice in wanted:
                    nonce = notice.value.decode(errors="replace")
                    if self._served.get(notice.author) != nonce:
                        self._served[notice.author] = nonce
                        self._give(notice.author, nonce)
                changed.wait()
            self._give_back(set())

    def _give(self, loader: str, nonce: str) -> None:
        n_bytes = -1
        if self._may_give():
            try:
                raw = self._take()
                self._swarm.hold(f"state/{nonce}", raw, HOLD_S)
                self._held[nonce] = loader
                n_bytes = len(raw)
            except SwarmClosed:
                raise
            except DlcError as error:
                log.warning("this peer's state is not given to %s: %s", loader[:8], error)
            except Exception:
                log.exception("this peer's state could not be given to %s", loader[:8])
        try:
            self._swarm.post(f"have/{self._prefix}/{loader}", MSGPackSerializer.dumps([nonce, n_bytes]), HOLD_S)
        except SwarmClosed:
            raise
        except DlcError as error:  # this peer has as many notices as it may; the loader asks the next donor
            log.warning("%s cannot be told of this peer's state: %s", loader[:8], error)
            if self._held.pop(nonce, None) is not None:
                self._swarm.release(f"state/{nonce}")

    def _give_back(self, wanted: set[str]) -> None:
        for nonce in [nonce for nonce in self._held if nonce not in wanted]:
            self._swarm.release(f"state/{nonce}")
            self._swarm.withdraw(f"have/{self._prefix}/{self._held.pop(nonce)}")

    def _may_give(self) -> bool:
        mine = self._directory.entry
        if mine.priority is None:
            return False
        return not mine.loading or self._directory.is_reference()


def _left(end: float | None) -> float:
    return float("inf") if end is None else max(0.0, end - time.monotonic())


def _fields(raw: bytes) -> list[object]:
    try:
        fields = MSGPackSerializer.loads(raw)
    except ValueError:
        fields = None
    return fields if isinstance(fields, list) and len(fields) == 2 else [None, None]
