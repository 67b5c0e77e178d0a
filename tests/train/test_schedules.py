import dataclasses

import pytest

from dlc.runspec import InnerSpec, OuterSpec, RunSpec
from dlc.train.schedules import changed

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
