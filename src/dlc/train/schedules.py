"""The learning rates of a run as people are told of them: what is odd about them, and what another length changes, of
which there is more to tell with fragments."""

from __future__ import annotations

from dlc.runspec import RunSpec
from dlc.train.outer_step import outer_lr
from dlc.train.setup import schedule_of

NOTICED = 0.01
"""Relative: a smaller change of a learning rate is not told."""


def doubts(spec: RunSpec) -> list[str]:
    """What of the learning rates can hardly be meant: a sentence for each."""
    said = []
    steps = spec.exchanges * spec.steps_per_round
    if spec.tokens:  # of one peer alone, to the end of the round that reaches them; several need fewer
        alone = -(-spec.tokens // spec.tokens_per_round) * spec.steps_per_round
        steps = min(steps or alone, alone)
    told = (
        ("inner", spec.inner.warmup_steps, steps, "steps"),
        ("outer", spec.outer.warmup_rounds, spec.rounds, "rounds"),
    )
    for which, warm_up, whole, unit in told:
        if whole and warm_up > whole:
            said.append(
                f"the run ends after {whole} {which} {unit} at most, in the middle of a warm-up of {warm_up}: the "
                f"learning rate never comes to {which}.lr; lower {which}.warmup_{unit}, or make the run longer"
            )
    return said


def changed(before: RunSpec, now: RunSpec, t: int) -> list[str]:
    """What another length does to a run that goes on after round `t`: to each of its learning rates, and, with
    fragments, to its inner steps; a sentence for each."""
    said = []
    inner = schedule_of(before)(t * before.steps_per_round), schedule_of(now)(t * now.steps_per_round)
    if _differ(*inner):
        keep = (
            f"inner.total_steps = {before.horizon_steps}" if before.horizon_steps and not now.inner.total_steps else ""
        )
        said.append(_sentence("inner", *inner, keep))
    outer = _outer(before, t), _outer(now, t)
    if _differ(*outer):
        keep = f"outer.total_rounds = {before.rounds}" if not now.outer.total_rounds else ""
        said.append(_sentence("outer", *outer, keep))
    turns = t - before.exchanges
    if before.exchanges and now.exchanges and turns > 0:
        said.append(
            f"last turns of fragments, without inner steps, have had {turns} of the exchanges that are more now: "
            f"{now.exchanges - t} are left, not {now.exchanges - before.exchanges}; "
            f"rounds = {now.rounds + 1} makes up for that"
        )
    return said


def _outer(spec: RunSpec, t: int) -> float:
    """Of the round after round `t`, each fragment's counted."""
    return outer_lr(spec.outer.ending(spec.rounds), t // spec.fragments + 1)


def _differ(before: float, now: float) -> bool:
    return abs(now - before) > NOTICED * max(now, before)


def _sentence(which: str, before: float, now: float, keep: str) -> str:
    remedy = f"; {keep} in RUN.toml, on every peer, leaves it as it was" if keep else ""
    return f"with its new length the {which} learning rate goes on at {now:.3g}, not {before:.3g}{remedy}"
