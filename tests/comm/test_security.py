"""Run key files, derived credentials, and the ZAP handler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from dlc.addresses import addresses_of, advertised
from dlc.comm.addresses import parse_address
from dlc.comm.keytext import HIDDEN, without_keys
from dlc.comm.security import ZAP_DOMAIN, ZAP_ENDPOINT, LinkSecurity, ZapHandler, generate_run_key, load_run_key
from dlc.compat.hivemind.p2p import parse_multiaddr
from dlc.errors import KeyFileError, UsageError

KEY = bytes(range(32))
KEY_TEXT = "dlc-key-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"


def test_a_key_is_read_from_text_file_or_bytes(tmp_path: Path) -> None:
    text = generate_run_key()
    assert text.startswith("dlc-key-1:") and text.endswith("\n") and text.count("\n") == 1
    path = tmp_path / "run.key"
    path.write_text(text)
    marked = tmp_path / "marked.key"
    marked.write_text(text, "utf-8-sig")
    assert load_run_key(marked) == load_run_key(text)
    keys = {load_run_key(s) for s in (text, text.strip(), path, str(path), text.encode(), load_run_key(text))}
    assert len(keys) == 1 and len(keys.pop()) == 32
    assert load_run_key(generate_run_key()) != load_run_key(text)


@pytest.mark.parametrize(
    "text", ["", "hello", "dlc-key-1:", "dlc-key-1:AAAA", "dlc-key-2:" + "A" * 43, "dlc-key-1:" + "!" * 43, "A" * 43]
)
def test_a_file_without_a_key_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.key"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=r"run\.key does not hold a run key"):
        load_run_key(path)


def test_a_file_cut_short_or_with_an_added_line_is_refused(tmp_path: Path) -> None:
    text = generate_run_key()
    for bad in (text[:-2], text + "x\n", text.strip() + "A"):
        with pytest.raises(KeyFileError):
            load_run_key(bad)


def test_a_missing_or_unreadable_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="dlc key >"):
        load_run_key(tmp_path / "none")
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_run_key(tmp_path)


@pytest.mark.parametrize("spoilt", [lambda k: k, lambda k: k.removeprefix("dlc-key-1:"), lambda k: k[4:-9], str.upper])
def test_a_key_that_is_given_for_a_file_is_not_shown(spoilt: Callable[[str], str], tmp_path: Path) -> None:
    """A key without its prefix was taken for a name, and printed with advice on how to make that file."""
    given = spoilt(KEY_TEXT)
    with pytest.raises(KeyFileError, match="neither the path of a run key file nor a run key") as error:
        load_run_key(Path(given))
    assert given not in str(error.value) and "`dlc key`" in str(error.value)
    assert without_keys(f"unrecognized arguments: --key {given}") == f"unrecognized arguments: --key {HIDDEN}"


def test_what_is_given_for_an_address_is_not_shown_where_it_may_be_a_key() -> None:
    """It was printed, with the advice to write HOST:PORT; a key without its prefix was even dialled, as a name."""
    bare = KEY_TEXT.removeprefix("dlc-key-1:")
    given: list[Callable[[str], object]] = [
        parse_address,
        parse_multiaddr,
        addresses_of,
        lambda text: addresses_of(["10.0.0.1:4600", text]),
        lambda text: parse_multiaddr(f"/ip4/{text}/tcp"),
    ]
    of_bytes = [lambda text: addresses_of(text.encode()), lambda text: addresses_of([text.encode()])]
    dialled = [*given, *of_bytes, lambda text: advertised(text, 4600)]
    for text in (KEY_TEXT, bare, f"{bare}:4600", f"{KEY_TEXT}:4600"):
        for call in dialled:
            with pytest.raises(UsageError) as error:
                call(text)
            assert bare not in str(error.value) and HIDDEN in str(error.value), text
    for text in (bare[:30], f"10.0.0.1:4600/{bare}"):
        for call in given:
            with pytest.raises(UsageError) as error:
                call(text)
            assert bare[:30] not in str(error.value) and HIDDEN in str(error.value), text
    assert parse_address("AHostOfALongNameWithoutANumber.example:4600")[1] == 4600
    with pytest.raises(UsageError, match=r"'host-of-a-name\.example' is no address"):
        parse_address("host-of-a-name.example")


@pytest.mark.parametrize(
    "name", ["run.key", "keys/ofMyRunWithALongNameOfItsOwn", "a-run-with-a-long-name-of-its-own.key"]
)
def test_the_name_of_a_file_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(KeyFileError, match=f"there is no run key file {name}"):
        load_run_key(name)
    assert without_keys(name) == name


def test_a_name_that_no_file_can_have_is_no_riddle() -> None:
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_run_key("a\0b")


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_key_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.key"
    path.write_text(generate_run_key())
    path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        load_run_key(path)
        assert not caplog.records
        path.chmod(0o644)
        load_run_key(path)
    assert "chmod 600" in caplog.text
    caplog.clear()
    other = tmp_path / "passwd"  # given by mistake, and perhaps by root
    other.write_text("root:x:0:0:root:/root:/bin/bash\n")
    other.chmod(0o644)
    for wrong in (other, Path("/dev/null")):
        with pytest.raises(KeyFileError, match="does not hold a run key"):
            load_run_key(wrong)
    assert not caplog.text


def test_credentials_depend_on_key_and_run_name_and_are_the_same_everywhere() -> None:
    one = LinkSecurity.derive(KEY, "run")
    assert one == LinkSecurity.derive(KEY, "run")
    assert (one.server_public, one.client_public) == (
        b"a)*OH5!Ry)*ymaI4)A6()TMYGxmD%QqNbf?=E/pE",
        b"g!+Z0ubc$Pn/&W?p6%j08A2#?ZJ57LiL82{]>gym",
    )
    others = [LinkSecurity.derive(KEY, "run2"), LinkSecurity.derive(KEY[::-1], "run")]
    secrets = {s for c in (one, *others) for s in (c.server_secret, c.client_secret)}
    assert len(secrets) == 6
    assert one.server_secret.decode() not in repr(one) and one.client_secret.decode() not in repr(one)
    with pytest.raises(KeyFileError):
        LinkSecurity.derive(b"short", "run")


@pytest.mark.parametrize(
    ("domain", "mechanism", "own_key", "accepted"),
    [
        (ZAP_DOMAIN, b"CURVE", True, True),
        (ZAP_DOMAIN, b"CURVE", False, False),
        (b"other", b"CURVE", True, False),
        (ZAP_DOMAIN, b"PLAIN", True, False),
        (ZAP_DOMAIN, b"NULL", None, False),
    ],
)
def test_zap_lets_in_the_derived_client_key_only(
    domain: bytes, mechanism: bytes, own_key: bool | None, accepted: bool
) -> None:
    security = LinkSecurity.derive(KEY, "run")
    with zmq.Context() as context:
        handler = ZapHandler(context, security)
        with context.socket(zmq.REQ) as asker:
            asker.connect(ZAP_ENDPOINT)
            key = [] if own_key is None else [z85.decode(security.client_public if own_key else security.server_public)]
            asker.send_multipart([b"1.0", b"7", domain, b"127.0.0.1", b"", mechanism, *key])
            assert handler.socket.poll(120_000)
            handler.serve()
            assert asker.poll(120_000)
            answer = asker.recv_multipart()
        handler.close()
    assert answer[:3] == [b"1.0", b"7", b"200" if accepted else b"400"]
    assert handler.refused == (0 if accepted else 1)
