"""A member that sends nonsense beside what it should: dropped and counted; the round goes on, and no mean is wrong.

Nonsense is what no correct peer sends: frames that cannot be decoded, numbers out of range, payloads of another length,
chunks that nobody asked for, second answers. A member that lies consistently is another matter (docs/protocol.md).
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.catalogue import KINDS
from dlc.comm.framing import Envelope, Frame, decode, encode
from dlc.comm.ids import Ballot, Voter
from dlc.comm.timeouts import Timeouts
from dlc.comm.wire import pack
from dlc.errors import ProtocolError
from dlc.peer import Peer
from tests.swarm import ROUND_S, swarm, together

NUMEL = 2_000_000
"""Several chunks for each owner."""
STRANGER = Voter("nobody", 7)
FAR = (-1, 10**6, 2**62)


def spoiled(frames: list[Frame], rng: random.Random) -> list[Frame]:
    """The same frames with some bytes changed, cut off, added, or a frame too many or too few."""
    copy = [bytearray(frame) for frame in frames]
    victim = copy[rng.randrange(len(copy))]
    for _ in range(rng.choice((1, 1, 3, 20))):
        if victim:
            victim[rng.randrange(len(victim))] = rng.randrange(256)
    match rng.randrange(6):
        case 0:
            del victim[rng.randrange(len(victim) + 1) :]
        case 1:
            victim += rng.randbytes(rng.randrange(1, 64))
        case 2:
            copy.append(bytearray(rng.randbytes(rng.randrange(64))))
        case 3 if len(copy) > 1:
            copy.pop()
        case 4:
            copy[-1] = bytearray(rng.randbytes(rng.randrange(1, 200)))
    return [bytes(frame) for frame in copy]


def nonsense(m: Any, rng: random.Random) -> Any:
    """A message of the same kind that no correct peer sends; None where there is none."""
    far = rng.choice(FAR)
    if isinstance(m, msg.Contrib):
        other: dict[str, Any] = rng.choice(
            ({"chunk": far}, {"channel": "no such"}, {"base": rng.randbytes(32)}, {"upto": far}, {"weight": -1.0})
        )
        return dataclasses.replace(m, **other)
    if isinstance(m, msg.Result):
        payload = bytes(m.payload)
        wrong = rng.choice((payload[:-1], payload + b"\0\0", b"", payload[: len(payload) // 2]))
        if rng.random() < 0.3:
            return dataclasses.replace(m, payload=wrong)
        field: dict[str, Any] = rng.choice(({"chunk": far}, {"owner": STRANGER}, {"ballot": Ballot(-5, STRANGER)}))
        return dataclasses.replace(m, header=dataclasses.replace(m.header, **field))
    if isinstance(m, msg.Ready):
        if rng.random() < 0.3:
            return dataclasses.replace(m, norm=rng.choice((-1.0, math.nan, math.inf)))
        grid: dict[str, Any] = rng.choice(
            ({"codec": "no such"}, {"numel": far}, {"chunk_elems": 0}, {"chunk_elems": far})
        )
        return dataclasses.replace(m, channel="other", grid=dataclasses.replace(m.grid, **grid))
    if isinstance(m, msg.Fetch):
        return dataclasses.replace(m, chunks=FAR * rng.randrange(1, 50), hashes=(rng.randbytes(32), b"", b"x"))
    if isinstance(m, msg.Progress):
        return dataclasses.replace(m, lacks=FAR, held=-1, waits_s=1e300)
    if isinstance(m, msg.SyncReq):
        return dataclasses.replace(m, depth=far, head=rng.randbytes(rng.choice((0, 1, 32))))
    if isinstance(m, msg.Ping):
        return msg.PieceReq("no such", rng.randbytes(32), FAR)
    return None


class Hostile:
    """Sends nonsense before or after each message of this peer."""

    def __init__(self, peer: Peer, rng: random.Random) -> None:
        self.driver, self.rng = peer._driver, rng
        self.sent: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        transport = self.driver.transport
        self._control, self._bulk = transport.send_control, transport.send_bulk
        transport.send_control = self._around(self._control)  # type: ignore[method-assign]
        transport.send_bulk = self._around(self._bulk)  # type: ignore[method-assign]

    def _around(self, send: Callable[[str, Any], bool]) -> Callable[[str, Any], bool]:
        def act(address: str, frames: Any) -> bool:
            before = self.rng.random() < 0.5
            if before:
                self._bother(send, address, frames)
            done = send(address, frames)
            if done and not before:
                self._bother(send, address, frames)
            return done

        return act

    def _bother(self, send: Callable[[str, Any], bool], address: str, frames: list[Frame]) -> None:
        broken = spoiled(frames, self.rng)
        try:
            decode(broken, self.driver.dispatch.tag)
        except ProtocolError:
            self.sent["undecodable"] += send(address, broken)
        _, message = decode(frames, self.driver.dispatch.tag)
        twisted = nonsense(message, self.rng)
        if twisted is not None:
            self.sent["nonsense"] += send(address, encode(self.driver.dispatch.me, self.driver.dispatch.tag, twisted))
            self.kinds[type(message).__name__] += 1
        if isinstance(message, msg.Contrib | msg.Result):
            self.sent["second answer"] += send(address, frames)


CALM = Timeouts(probe_s=1.5, beat_s=1.5)
"""A death that is made up is answered in time on a busy machine, too: there are two probe periods for it. Only what is
spoiled in a round is not waited for much longer than usual."""


@pytest.mark.parametrize("seed", range(3))
def test_rounds_go_on_beside_a_member_that_sends_nonsense(seed: int, pytestconfig: pytest.Config) -> None:
    end = time.monotonic() + float(pytestconfig.getoption("--fuzz-seconds")) / 3
    with swarm(3, timeouts=CALM) as peers:
        hostile = Hostile(peers[2], random.Random(seed))
        healthy = {peers[0].id, peers[1].id}
        rounds = 0

        def seen() -> bool:
            """Everything that it sends was sent, and something of it has come."""
            sent = dict(hostile.sent)  # its driver counts on
            kinds = {"Contrib", "Result", "Ready", "Progress", "Ping"} <= hostile.kinds.keys()
            nodes = [peer._node for peer in peers[:2] if peer._node is not None and peer._driver.bad_frames > 0]
            all_sent = len(sent) == 3 and all(count > 0 for count in sent.values())
            return all_sent and kinds and len(nodes) == 2 and all(node.exchange.dropped.total() > 0 for node in nodes)

        while rounds < 3 or time.monotonic() < end or not seen():
            assert time.monotonic() < end + ROUND_S, (hostile.sent, hostile.kinds)
            vectors = [torch.full((NUMEL,), float(i + 1)) for i in range(3)]
            reports = together(peers, lambda p, i, v=vectors: p.all_reduce(v[i], codec="fp32", timeout_s=ROUND_S))
            rounds += 1
            for vector, report in zip(vectors[:2], reports[:2], strict=True):
                whole = {share.peer for share in report.contributors if share.fraction == 1.0}
                assert healthy <= whole, report
                # The mean of all; or, where an owner refused the third's part for its nonsense, of the other two.
                assert ((vector == 2.0) | (vector == 1.5)).all()
                assert (vector == 2.0).all() or len(whole) == 2
        assert all(peer._driver.running for peer in peers[:2])


def test_random_bytes_are_messages_or_protocol_errors(pytestconfig: pytest.Config) -> None:
    """Beside the examples of tests/comm/test_wire.py: whole frames, for as long as this run is given."""
    end = time.monotonic() + float(pytestconfig.getoption("--fuzz-seconds")) / 6
    seed, tag = time.monotonic_ns(), bytes(8)
    rng = random.Random(seed)
    refused = 0
    while not refused or time.monotonic() < end:
        envelope: Frame = pack(Envelope(msg.PROTOCOL_VERSION, tag, STRANGER, rng.choice(sorted(KINDS))))
        frames = [envelope, *(rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(4)))]
        try:
            decode(frames, tag)
        except ProtocolError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {frames}") from error
