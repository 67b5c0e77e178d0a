import dataclasses
from pathlib import Path

import pytest

from dlc.runspec import RunSpec
from dlc.train import saves
from dlc.train.samedata import FIELD, SameData
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.test_trainer import Run, spec

__all__ = ["spec"]


def test_each_peer_with_other_data_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = SameData(b"a" * 32, "corpus")
    same, other = FakeMember(id="same", status={FIELD: mine.mine}), FakeMember(id="other", status={FIELD: "00"})
    silent, odd = FakeMember(id="silent"), FakeMember(id="odd", status={FIELD: 7})
    gone, me = (
        FakeMember(id="gone", left=True, status={FIELD: "00"}),
        FakeMember(id="me", me=True, status={FIELD: "00"}),
    )
    assert mine.look([same, silent, odd, gone, me]) == [] and not caplog.records
    assert mine.look([same, other]) == ["other"] and mine.look([other]) == []
    assert len(caplog.records) == 1 and "peer other has other data at corpus" in caplog.text


def test_trainers_tell_of_their_data_and_look(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [FakeMember(id="p9", status={FIELD: "shrunk"})]
    run.go()
    assert [event["peer"] for event in run.all("other_data")] == ["p9"]
    assert {said["status"][FIELD] for said in run.peer.said} == {run.trainer._source.fingerprint().hex()[:16]}


def test_who_resumes_with_data_that_changed_meanwhile_is_told(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")  # an earlier test may have left the log more talkative
    first = Run(FakePeer(spec), tmp_path)
    first.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None
    Run(FakePeer(spec), tmp_path, resume=saved)
    assert not caplog.records
    text = Path(spec.data.source)
    text.write_bytes(text.read_bytes()[:-1000])
    Run(FakePeer(spec), tmp_path, resume=saved)
    assert f"the data at {text} is not what it was when {saved.path} was written" in caplog.text
    before = dataclasses.replace(saved, data="")
    caplog.clear()
    Run(FakePeer(spec), tmp_path, resume=before)
    assert not caplog.records, "a checkpoint of an older version does not say"
