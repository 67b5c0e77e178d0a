from __future__ import annotations

import dataclasses
import json

import pytest

from dlc.cli.sinks import sentence
from dlc.report import Missing, RoundReport, Share
from dlc.server import ServerReport

ANNA, BERT, CARL, DORA = ("anna" * 8, "bert" * 8, "carl" * 8, "dora" * 8)
REPORT = RoundReport(
    channel="train",
    t=12,
    head="ab" * 32,
    contributors=(Share(ANNA, 20480.0, 1.0), Share(BERT, 10240.0, 0.75)),
    missing=(Missing(BERT, "late", 0.25), Missing(CARL, "dead", 1.0)),
    weight=30720.0,
    bytes_sent=1_500_000,
    bytes_received=2_000_000,
    seconds=1.25,
    waiting_s=0.5,
    reduce_s=0.625,
    ballots=2,
    paths={ANNA: "direct", BERT: f"relayed via {ANNA}"},
    owned={ANNA: 0.75, BERT: 0.25},
)


def test_to_dict_is_json_and_lists_every_field() -> None:
    plain = json.loads(json.dumps(REPORT.to_dict()))
    assert plain == REPORT.to_dict()
    assert list(plain) == [field.name for field in dataclasses.fields(RoundReport)]
    assert plain["contributors"][1] == {"peer": BERT, "weight": 10240.0, "fraction": 0.75}
    assert plain["missing"][0] == {"peer": BERT, "reason": "late", "fraction": 0.25}
    assert plain["paths"][BERT] == f"relayed via {ANNA}"
    assert plain["owned"] == {ANNA: 0.75, BERT: 0.25}


def test_summary_names_all_that_went_wrong() -> None:
    assert REPORT.summary() == (
        "train round 12: 2 of 3 peers, weight 30720; 1.25 s (waiting 0.50, reduce 0.62); "
        "sent 1.50 MB, received 2.00 MB; 2 ballots; "
        f"missing bertbert (late, 25.0% of the elements), carlcarl (dead); bertbert relayed via {ANNA}"
    )


def test_summary_of_one_that_only_looked_on_tells_no_time_and_no_bytes() -> None:
    """It said that each round took 0.00 s."""
    looked_on = dataclasses.replace(REPORT, missing=(), ballots=1, paths={})
    assert sentence({"event": "looked_on", **looked_on.to_dict()}) == "train round 12: 2 of 2 peers, weight 30720"


def test_summary_of_a_round_of_a_parameter_server_tells_no_waiting_that_it_does_not_know() -> None:
    """It said "waiting 0.00" however long others were waited for."""
    served = ServerReport(3, {}, (Share(ANNA, 8.0, 1.0),), (), {}, 0, 0, 0, 0, seconds=4.5)
    said = served.to_round("train", "anna-1").summary()
    assert said.startswith("train round 3: 1 of 1 peers, weight 8; 4.50 s; sent")


def test_summary_of_a_smooth_round_is_short() -> None:
    smooth = dataclasses.replace(REPORT, contributors=REPORT.contributors[:1], missing=(), ballots=1, paths={})
    assert smooth.summary().endswith("received 2.00 MB")
    assert "1 of 1 peers" in smooth.summary()


def test_complete_means_everybody_is_in_every_element() -> None:
    full = Share(DORA, 1.0, 1.0)
    assert dataclasses.replace(REPORT, contributors=(full,), missing=()).complete
    assert not dataclasses.replace(REPORT, contributors=(full,)).complete
    assert not dataclasses.replace(REPORT, missing=()).complete
    assert not dataclasses.replace(REPORT, contributors=(), missing=()).complete, "there is no mean"


def test_who_was_refused_is_told_apart_from_who_is_missing_otherwise() -> None:
    missing = Missing(CARL, "refused: not finite", 1.0), Missing(DORA, "late", 1.0)
    report = dataclasses.replace(REPORT, missing=missing)
    assert [peer for peer in (ANNA, CARL, DORA) if report.refused(peer)] == [CARL]


def test_values_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(ValueError, match="no reason"):
        Missing(ANNA, "asleep", 1.0)  # type: ignore[arg-type]
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction"):
            Share(ANNA, 1.0, fraction)
        with pytest.raises(ValueError, match="fraction"):
            Missing(ANNA, "late", fraction)
