"""The wire form: every message survives it, and no bytes from outside do anything but raise ProtocolError."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc.comm import messages as msg
from dlc.comm import wire
from dlc.comm.addresses import ADDRESS_CHARS_MAX
from dlc.comm.catalogue import KINDS
from dlc.comm.effects import Answer
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import HeldChunk, Nack, Promise, Relay
from dlc.comm.records import STATES_MAX, STATUS_BYTES_MAX
from dlc.errors import ProtocolError
from tests.comm.stage import Stage

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=6),
    bytes: st.binary(max_size=6),
    bool: st.booleans(),
    type(None): st.none(),
}
FEWER = settings(max_examples=60)


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation that the wire carries."""
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is wire.Packed:
        return SCALARS[bytes]
    args = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(arg) for arg in args))
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(arg) for arg in args))
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        hints = {f.name: hints[f.name] for f in dataclasses.fields(kind) if not f.metadata.get("frame")}
    return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})


messages = st.sampled_from(list(KINDS.values())).flatmap(values)
nested = st.recursive(
    st.one_of(*SCALARS.values()),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@FEWER
@given(messages)
def test_every_message_comes_back_equal(message: Any) -> None:
    packed = wire.pack(message)
    again = wire.unpack(packed, type(message))
    assert again == message and wire.pack(again) == packed
    assert wire.unpack(memoryview(packed), type(message)) == message


@FEWER
@given(messages, st.data())
def test_a_mutated_message_is_valid_or_a_protocol_error(message: Any, data: st.DataObject) -> None:
    packed = bytearray(wire.pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if action == "flip":
            packed[at] ^= data.draw(st.integers(1, 255))
        elif action == "cut" and at:
            del packed[at:]
        elif action == "insert":
            packed[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif len(packed) > 1:
            del packed[at]
    _decode_or_protocol_error(bytes(packed), type(message))


@FEWER
@given(st.binary(max_size=200), st.sampled_from(list(KINDS.values())))
def test_random_bytes_raise_protocol_error_only(data: bytes, kind: type) -> None:
    _decode_or_protocol_error(data, kind)


@FEWER
@given(nested, st.sampled_from(list(KINDS.values())))
def test_valid_msgpack_of_another_shape_raises_protocol_error_only(value: Any, kind: type) -> None:
    _decode_or_protocol_error(msgpack.packb(value), kind)


def _decode_or_protocol_error(data: bytes, kind: type) -> None:
    try:
        value = wire.unpack(data, kind)
    except ProtocolError as error:
        assert str(error)
        return
    assert type(value) is kind
    wire.pack(value)  # what was accepted can be sent on


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items
        b"\xdb\xff\xff\xff\xff",  # a string of 2**32 - 1 bytes
        b"\xc6\xff\xff\xff\xff",  # bytes likewise
        b"\x91" * 100_000,  # deep
        b"\x91" * 1000 + b"\x90",
        b"\x81\x01\x02",  # a map
        b"\xd4\x01\x00",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xa1\xff",  # not UTF-8
        wire.pack(Nack(b"h", Ballot(1, Voter("p", 1)))) + b"\x00",  # something behind it
    ],
)
def test_hostile_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack(data, Nack)


def test_a_relay_carries_whatever_its_sender_could_send_itself() -> None:
    """A promise of 4,096 chunks is longer than any string may be."""
    voter, digest = Voter("x" * 32, 1 << 33), bytes(32)
    held = tuple(HeldChunk(c, Ballot(1, voter), digest, 0) for c in range(4096))
    packed = wire.Packed(wire.pack(Promise(digest, Ballot(2, voter), None, None, None, held, ((),), ())))
    assert len(packed) > wire.STRING_BYTES_MAX
    relay = wire.unpack(wire.pack(Relay("y", voter, 1, packed)), Relay)
    assert wire.unpack(relay.message, Promise).held == held


def test_limits_hold_exactly() -> None:
    assert wire.unpack(wire.pack(b"x" * wire.STRING_BYTES_MAX), bytes)
    with pytest.raises(ProtocolError):
        wire.unpack(wire.pack(b"x" * (wire.STRING_BYTES_MAX + 1)), bytes)
    with pytest.raises(ProtocolError):
        wire.unpack(wire.pack("x" * (wire.STRING_BYTES_MAX + 1)), str)
    many = tuple[int, ...]
    assert len(wire.unpack(wire.pack((0,) * wire.ITEMS_MAX), many)) == wire.ITEMS_MAX
    with pytest.raises(ProtocolError):
        wire.unpack(wire.pack((0,) * (wire.ITEMS_MAX + 1)), many)
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.unpack(bytes(wire.HEADER_BYTES_MAX + 1), many)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (1, bool), ("a", bytes), (b"a", str), (1.0, int), (None, int), ((), int), (0, tuple[int, ...])],
)
def test_types_are_not_bent(value: Any, kind: Any) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        wire.unpack(wire.pack(value), kind)


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert repr(wire.unpack(wire.pack(3), float)) == "3.0"


def test_an_error_names_the_message_and_what_was_wrong() -> None:
    with pytest.raises(ProtocolError, match=r"Nack: Ballot: Voter: expected str, got int"):
        wire.unpack(msgpack.packb([b"h", [1, [2, 3]]]), Nack)
    with pytest.raises(ProtocolError, match=r"Promise: expected an array of 8"):
        wire.unpack(b"\x90", Promise)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ProtocolError, match="not finite"):
        wire.decoder(float)(bad)


def test_a_newcomer_is_told_of_no_more_peers_than_one_message_has_room_for() -> None:
    """Whoever answered it stopped on an error: its socket takes no longer one. So did whom it asked next."""
    stage = Stage(3)
    member, *others = stage.peers()
    digests = tuple(msg.StateDigest(f"train/{i}", bytes(32)) for i in range(STATES_MAX))
    like = dataclasses.replace(member.node.members.own, states=digests, status=bytes(STATUS_BYTES_MAX))
    known = [dataclasses.replace(like, voter=Voter(f"dead {i}", 1)) for i in range(1500)]
    for record in known:
        member.node.members._merge(record, news=False)
    hello = msg.Hello(msg.PROTOCOL_VERSION, "sim", b"spec", None, "sim:p0")
    effects = member.node.receive(Voter("new", 1), hello, member.node.ctx.now)
    (welcome,) = (e.message for e in effects if isinstance(e, Answer))
    assert isinstance(welcome, msg.Welcome)
    assert wire.unpack(wire.pack(welcome), msg.Welcome) == welcome and len(welcome.records) > 500
    assert {p.voter for p in (member, *others)} <= {record.voter for record in welcome.records[:3]}


def test_a_hello_whose_answer_would_fit_no_message_is_not_answered() -> None:
    """The address that it names comes back in the answer: beside a long RunSpec and many records it was too much."""
    stage = Stage(3)
    member, *_ = stage.peers()
    member.node.inbox.spec = bytes(wire.STRING_BYTES_MAX)
    hello = msg.Hello(msg.PROTOCOL_VERSION, "sim", b"spec", None, "x" * wire.STRING_BYTES_MAX)
    with pytest.raises(ProtocolError, match="an address of 262144 characters"):
        member.node.receive(Voter("new", 1), hello, member.node.ctx.now)
    named = dataclasses.replace(hello, address="x" * ADDRESS_CHARS_MAX)
    assert any(isinstance(e, Answer) for e in member.node.receive(Voter("new", 1), named, member.node.ctx.now))
