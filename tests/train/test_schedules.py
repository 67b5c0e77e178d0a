import dataclasses

import pytest

from dlc.runspec import InnerSpec, OuterSpec, RunSpec
from dlc.train.schedules import changed, doubts

RUN = RunSpec(rounds=100, sync_every=10, inner=InnerSpec(lr=1e-3, warmup_steps=100, min_lr_ratio=0.1))


def longer(spec: RunSpec, **changes: object) -> list[str]:
    return changed(spec, dataclasses.replace(spec, **{"rounds": 200, **changes}), spec.rounds)  # type: ignore[arg-type]


def test_what_more_rounds_do_to_the_learning_rates_is_told() -> None:
    (said,) = longer(RUN)
    assert "the inner learning rate goes on at 0.000587, not 0.0001" in said and "inner.total_steps = 1000" in said
    kept = dataclasses.replace(RUN.inner, total_steps=RUN.horizon_steps)
    assert longer(RUN, inner=kept) == [] == longer(dataclasses.replace(RUN, inner=kept))
    endless = dataclasses.replace(RUN, rounds=0)
    (said,) = changed(endless, RUN, 50)
    assert "goes on at 0.000628, not 0.001" in said and "total_steps" not in said, "it had no end to leave it at"
    assert changed(endless, RUN, 5) == [], "still in its warm-up"


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_outer_rate_too(fragments: int) -> None:
    outer = OuterSpec(lr=0.8, schedule="linear", min_lr_ratio=0.25)
    spec = dataclasses.replace(RUN, outer=outer, fragments=fragments, inner=InnerSpec(total_steps=1000))
    (said,) = changed(spec, dataclasses.replace(spec, rounds=200), 100 * fragments)
    assert "the outer learning rate goes on at 0.5, not 0.2" in said and "outer.total_rounds = 100" in said
    assert longer(spec, outer=dataclasses.replace(outer, total_rounds=100)) == []


def test_that_last_turns_of_fragments_are_rounds_of_the_new_length_is_told() -> None:
    """A run of 5 rounds that was given 9, and then 12, trained fewer tokens than one of 12, and nothing said so."""
    spec = dataclasses.replace(RUN, fragments=5, rounds=5, inner=InnerSpec(total_steps=1000))
    more = dataclasses.replace(spec, rounds=9)
    (said,) = changed(spec, more, 5 * 5 + 4)
    assert "have had 4 of the exchanges" in said and "16 are left, not 20; rounds = 10 makes up for that" in said
    assert not changed(spec, more, 5 * 5 - 1), "it was stopped before its end"
    assert not changed(spec, dataclasses.replace(spec, rounds=0), 5 * 5 + 4), "there is no end"


def test_a_warm_up_that_the_run_does_not_outlast_is_told() -> None:
    assert doubts(RunSpec()) == doubts(RUN) == doubts(dataclasses.replace(RUN, rounds=10)) == []
    (said,) = doubts(dataclasses.replace(RUN, rounds=9))
    assert "ends after 90 inner steps at most, in the middle of a warm-up of 100" in said
    steps = dataclasses.replace(RUN, strategy="data-parallel", rounds=99)
    assert len(doubts(steps)) == 1 and not doubts(dataclasses.replace(steps, rounds=100))
    for rounds in (0, 100):
        (said,) = doubts(dataclasses.replace(RUN, rounds=rounds, tokens=9 * RUN.tokens_per_round))
        assert "ends after 90 inner steps at most" in said
        one_more = dataclasses.replace(RUN, rounds=rounds, tokens=9 * RUN.tokens_per_round + 1)
        assert not doubts(one_more), "the round that reaches them is made to its end"
    assert len(doubts(dataclasses.replace(RUN, rounds=9, tokens=10**9))) == 1, "the rounds end it first"
    (said,) = doubts(dataclasses.replace(RUN, outer=OuterSpec(warmup_rounds=101)))
    assert "ends after 100 outer rounds at most, in the middle of a warm-up of 101" in said
