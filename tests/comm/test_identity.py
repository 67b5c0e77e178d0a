"""Identity: ids belong to keys, signatures to data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlc.comm.identity import Identity, peer_id, verify

ONE = Identity.from_private_bytes(bytes(range(32)))


def test_the_id_is_a_function_of_the_public_key_and_never_changes() -> None:
    assert ONE.peer == peer_id(ONE.public_key) == "tc5ikmckyy47b5k5vkybvvwvsk7ejijf"
    assert len(ONE.peer) == 32 and ONE.peer == ONE.peer.lower()
    assert Identity.generate().peer != Identity.generate().peer


def test_a_saved_key_gives_the_same_peer() -> None:
    one = Identity.generate()
    again = Identity.from_private_bytes(one.private_bytes())
    assert again.peer == one.peer and verify(one.public_key, b"x", again.sign(b"x"))


def test_a_signature_holds_for_its_data_and_key_only() -> None:
    signature = ONE.sign(b"record")
    assert verify(ONE.public_key, b"record", signature)
    assert not verify(ONE.public_key, b"Record", signature)
    assert not verify(Identity.generate().public_key, b"record", signature)
    for bit in range(0, 512, 37):
        broken = bytearray(signature)
        broken[bit // 8] ^= 1 << bit % 8
        assert not verify(ONE.public_key, b"record", bytes(broken))


@given(st.binary(max_size=70), st.binary(max_size=8), st.binary(max_size=70))
def test_no_bytes_make_verify_raise(key: bytes, data: bytes, signature: bytes) -> None:
    assert not verify(key, data, signature)


def test_the_private_key_is_not_shown() -> None:
    assert ONE.private_bytes().hex() not in repr(ONE) and str(ONE.private_bytes()) not in repr(ONE)
