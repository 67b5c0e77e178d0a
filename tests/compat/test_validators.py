"""Validators of the DHT's records: who may store what, over peers without sockets."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlc.compat.hivemind import DHT, get_dht_time
from dlc.compat.hivemind.dht import CompositeValidator, DHTRecord, RecordValidatorBase, SchemaValidator
from dlc.compat.hivemind.dht.crypto import RSASignatureValidator
from dlc.compat.hivemind.dht.storage import Record, notice_key
from dlc.compat.hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import UsageError
from tests.compat.fake_swarm import Town

ROOT = Path(__file__).resolve().parents[2]
KEYS = [RSAPrivateKey(), RSAPrivateKey()]


def end() -> float:
    return get_dht_time() + 60


class Even(RecordValidatorBase):
    """Takes even numbers, and marks them."""

    def validate(self, record: DHTRecord) -> bool:
        return record.value.endswith(b"!") and MSGPackSerializer.loads(record.value[:-1]) % 2 == 0

    def sign_value(self, record: DHTRecord) -> bytes:
        return record.value + b"!"

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value[:-1]


def test_only_what_a_validator_takes_is_stored_and_found(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    a, b = DHT(start=True, p2p=town.peer(), record_validators=[Even()]), DHT(start=True, p2p=town.peer())
    assert a.store("k", 2, end()) and a.get("k").value == 2
    assert not a.store("k", 3, end() + 1) and a.get("k").value == 2, "not by this peer"
    assert "refused" in caplog.text
    assert b.get("k") is None, "who has no validator does not see what it signed as a value"
    assert b.store("k", 4, end() + 100) and a.get("k").value == 2, "not by others: it is not signed"
    b.add_validators([Even()])
    assert b.store("k", 4, end() + 200) and a.get("k").value == b.get("k").value == 4


def test_what_a_validator_fails_at_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(RecordValidatorBase):
        def validate(self, record: DHTRecord) -> bool:
            raise KeyError("a mistake")

    town = Town()
    a, b = DHT(start=True, p2p=town.peer()), DHT(start=True, p2p=town.peer(), record_validators=[Fails()])
    assert a.store("k", 1, end()) and b.get("k") is None
    assert "a validator failed" in caplog.text and str(a.peer_id)[:8] in caplog.text
    with pytest.raises(TypeError, match="object is no RecordValidatorBase"):
        a.add_validators([object()])  # type: ignore[list-item]


def test_what_belongs_to_a_key_is_stored_by_its_owner_only() -> None:
    town = Town()
    validators = [RSASignatureValidator(key) for key in KEYS]
    a, b = (DHT(start=True, p2p=town.peer(), record_validators=[validator]) for validator in validators)
    mine, others = (validator.local_public_key for validator in validators)
    assert mine.startswith(b"[owner:ssh-rsa ") and mine != others
    assert a.store("k", {"step": 1}, end(), subkey=mine) and b.store("k", 2, end(), subkey=others)
    assert {subkey: item.value for subkey, item in b.get("k").value.items()} == {mine: {"step": 1}, others: 2}
    assert not b.store("k", "forged", end() + 100, subkey=mine), "b has no key to sign it with"
    assert b.store("open", b"[signature:x]", end()) and a.get("open").value == b"[signature:x]", "without an owner"
    assert a.store(b"whole " + mine, 1, end()) and not b.store(b"whole " + mine, 2, end() + 100)
    assert b.get(b"whole " + mine).value == 1


def test_a_signature_is_good_for_the_record_that_it_was_made_for_alone() -> None:
    validator, other = (RSASignatureValidator(key) for key in KEYS)
    plain = DHTRecord(b"key", b"sub" + validator.local_public_key, b"value", 10.0)
    signed = dataclasses.replace(plain, value=validator.sign_value(plain))
    assert validator.validate(signed) and other.validate(signed) and other.strip_value(signed) == b"value"
    changes: list[dict[str, Any]] = [{"key": b"kez"}, {"expiration_time": 11.0}, {"value": b"w" + signed.value[1:]}]
    changes += [{"value": b"value"}, {"value": signed.value + b"x"}, {"value": b"value[signature:AAAA]"}]
    changes += [{"subkey": b"sup" + validator.local_public_key}, {"subkey": b"sub" + other.local_public_key}]
    changes += [{"subkey": signed.subkey + other.local_public_key}, {"subkey": b"[owner:ssh-rsa nonsense]"}]
    for change in changes:
        assert not other.validate(dataclasses.replace(signed, **change)), change
    assert other.sign_value(plain) == b"value", "it is not the owner"
    one = CompositeValidator([validator, other])
    assert one.sign_value(dataclasses.replace(plain, subkey=other.local_public_key)) == b"value", "one key signs"


def test_public_keys_are_read_from_bytes_and_others_refused() -> None:
    public = KEYS[0].get_public_key()
    again = RSAPublicKey.from_bytes(public.to_bytes())
    assert again.verify(b"data", KEYS[0].sign(b"data")) and not again.verify(b"date", KEYS[0].sign(b"data"))
    assert not again.verify(b"data", b"no base64 \xff") and RSAPrivateKey.process_wide() is RSAPrivateKey.process_wide()
    ed25519 = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIi1Cvlm8mfV8pM1ZLt5a1VQ3nVQ0xqlGg5sOZ2qM3tT"
    for raw in (b"", b"ssh-rsa AAAA", ed25519):
        with pytest.raises(ValueError):
            RSAPublicKey.from_bytes(raw)


# ------------------------------------------------------------------ schemas


@pytest.fixture
def schemas() -> tuple[type[Any], type[Any]]:
    pydantic = pytest.importorskip("pydantic", minversion="2", reason="SchemaValidator needs pip install 'pydantic>=2'")
    from dlc.compat.hivemind.dht.schema import BytesWithPublicKey  # type: ignore[attr-defined]

    local = pydantic.create_model("Local", step=(pydantic.StrictInt, ...), loss=(pydantic.StrictFloat, 0.0))
    metrics = pydantic.create_model(
        "Metrics", metrics=(dict[BytesWithPublicKey, local], ...), limit=(pydantic.conint(ge=0, strict=True), ...)
    )
    return metrics, pydantic.create_model("More", more=(list[str], ...), limit=(pydantic.StrictStr, ...))


def test_metrics_of_peers_as_hiveminds_example_stores_them(schemas: tuple[type[Any], type[Any]]) -> None:
    town = Town()
    dhts, owners = [], []
    for key in KEYS:
        signature = RSASignatureValidator(key)
        dhts.append(
            DHT(start=True, p2p=town.peer(), record_validators=[SchemaValidator(schemas[0], prefix="run"), signature])
        )
        owners.append(signature.local_public_key)
    for i, (dht, owner) in enumerate(zip(dhts, owners, strict=True)):
        assert dht.store("run_metrics", {"step": i, "loss": 0.5}, end(), subkey=owner)
    found = dhts[0].get("run_metrics", latest=True).value
    assert {owner: found[owner].value["step"] for owner in owners} == {owners[0]: 0, owners[1]: 1}
    a, later = dhts[0], end() + 100
    for value in ({"step": "1", "loss": 0.5}, {"step": 1.0, "loss": 0.5}, {"loss": 0.5}, 7, {"step": 1, "x": 2}):
        assert not a.store("run_metrics", value, later, subkey=owners[0]), value
    assert not a.store("run_metrics", {"step": 1, "loss": 0.5}, later, subkey=b"nobody's")
    assert a.store("run_limit", 3, later) and not a.store("run_limit", -3, later + 1)
    assert not a.store("run_limit", 3, later + 1, subkey="s") and a.store("of no field", "x", later)
    assert a.get("run_limit").value == 3


def test_what_another_peer_stored_is_measured_by_the_schema_too(schemas: tuple[type[Any], type[Any]]) -> None:
    town = Town()
    a = DHT(start=True, p2p=town.peer(), record_validators=[SchemaValidator(schemas[0], allow_extra_keys=False)])
    b, c = DHT(start=True, p2p=town.peer()), DHT(start=True, p2p=town.peer())
    assert b.store("limit", 1, end()) and c.store("limit", -1, end() + 10) and c.store("extra", 1, end())
    assert a.get("limit").value == 1 and a.get("extra") is None and c.get("limit").value == -1
    raw = MSGPackSerializer.dumps(["limit", [1], MSGPackSerializer.dumps(1), end() + 50])
    b.swarm.post(notice_key("limit", "x"), raw, 60)
    assert a.get("limit").value == 1


def test_schemas_are_merged_and_a_wrong_one_is_refused(schemas: tuple[type[Any], type[Any]]) -> None:
    one = CompositeValidator([SchemaValidator(schemas[1]), SchemaValidator(schemas[0], allow_extra_keys=False)])
    cases = [("limit", 1, True), ("limit", "1", True), ("limit", -1, False), ("more", ["x"], True), ("extra", 1, False)]
    for key, value, good in cases:
        assert (Record(key, None, value, end()).to_bytes(one) is not None) is good, (key, value)
    with pytest.raises(UsageError, match="pydantic.BaseModel"):
        SchemaValidator(dict)


def test_without_pydantic_everything_else_is_there() -> None:
    code = """
import sys
sys.modules["pydantic"] = None
import dlc.compat.hivemind.dht.schema as schema
for use in (lambda: schema.SchemaValidator(object), lambda: schema.BytesWithPublicKey):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install 'pydantic>=2'") == 2
