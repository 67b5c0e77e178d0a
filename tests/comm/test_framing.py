"""Which frames are a message of this run, and what is held of those that are none."""

from __future__ import annotations

import pytest

from dlc.comm import framing
from dlc.comm.catalogue import CODES
from dlc.comm.framing import ENVELOPE_BYTES, Envelope, Frame, OtherVersion, decode, encode, run_tag
from dlc.comm.ids import Voter
from dlc.comm.messages import PROTOCOL_VERSION, Contrib, Hello, Message, Nack, Welcome
from dlc.comm.wire import pack
from dlc.errors import ProtocolError

OTHER, TAG = Voter("other", 1), run_tag("dlc", b"1")
HELLO = Hello(PROTOCOL_VERSION, "dlc", b"", None, "")
WELCOME = Welcome(PROTOCOL_VERSION, "dlc", b"", None, (), "", "")
NACK = Nack(b"", (1, OTHER))
CONTRIB = Contrib("train", b"b", 3, 1.0, 0, b"payload")


def test_runs_of_one_runspec_are_told_apart_by_their_names_and_those_of_one_name_by_their_runspecs() -> None:
    assert len({TAG, run_tag("other", b"1"), run_tag("dlc", b"2"), run_tag("dlc1", b"")}) == 4


@pytest.mark.parametrize("message", [HELLO, WELCOME], ids=["hello", "welcome"])
def test_who_does_not_know_the_run_yet_asks_and_is_answered(message: Message) -> None:
    assert decode(encode(OTHER, bytes(8), message), TAG) == (OTHER, message)


def test_what_else_comes_of_another_run_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another run"):
        decode(encode(OTHER, run_tag("dlc", b"2"), NACK), TAG)


def test_a_payload_travels_as_a_frame_of_its_own() -> None:
    frames = encode(OTHER, TAG, CONTRIB)
    assert len(frames) == 3 and frames[2] == b"payload"
    assert decode(frames, TAG) == (OTHER, CONTRIB)


@pytest.mark.parametrize(("message", "n"), [(NACK, 1), (NACK, 3), (NACK, 4), (CONTRIB, 2), (CONTRIB, 4)])
def test_a_message_has_two_frames_and_one_with_a_payload_three(message: Message, n: int) -> None:
    """Another number ended the peer."""
    frames: list[Frame] = [*encode(OTHER, TAG, message), b"x", b"x"][:n]
    with pytest.raises(ProtocolError, match="frames"):
        decode(frames, TAG)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("asks", [True, False])
def test_of_another_version_nothing_is_read_but_whether_it_asks(version: int, asks: bool) -> None:
    envelope = Envelope(version, TAG, OTHER, CODES[Hello if asks else Nack])
    with pytest.raises(OtherVersion) as caught:
        decode([pack(envelope), b"whatever"], TAG)
    assert (caught.value.protocol, caught.value.hello) == (version, asks)


def test_long_envelopes_are_not_remembered() -> None:
    """A thousand of half a megabyte each."""
    sender = Voter("x" * ENVELOPE_BYTES, 1)
    envelope, header = encode(sender, TAG, NACK)
    before = framing._opened.cache_info().currsize
    assert decode([envelope, header], TAG)[0] == sender
    assert framing._opened.cache_info().currsize == before
