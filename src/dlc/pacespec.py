"""Which settings of rounds and inner steps go together: when a phase ends, and what overlaps. Shared by RunSpec and
`dlc.DiLoCo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlc.options import check, one_of

if TYPE_CHECKING:
    from dlc.runspec import RunSpec

OVERLAPS = ("none", "delayed", "eager")
SYNC_MODES = ("steps", "deadline")


def check_overlap(overlap: str, overlap_steps: int, mixing: float, fragments: int, sync_every: int) -> None:
    """ConfigError: these do not go together, and what to change."""
    one_of("overlap", overlap, OVERLAPS)
    check(fragments >= 1, f"fragments must be at least 1, got {fragments}; 1: the model is not cut")
    check(
        sync_every % fragments == 0,
        f"sync_every ({sync_every}) must be a multiple of fragments ({fragments}): a round comes every "
        "sync_every / fragments inner steps",
    )
    period = sync_every // fragments
    check(
        overlap_steps == 0 or overlap != "none",
        'overlap_steps is given, but overlap is "none": remove it, or set overlap = "delayed"',
    )
    check(
        0 <= overlap_steps <= period,
        f"overlap_steps must lie in 0 ... {period}, the inner steps between two rounds, got {overlap_steps}: "
        "one round is over before the next",
    )
    check(0 <= mixing < 1, f"mixing must lie in [0, 1), got {mixing}")
    check(mixing == 0 or overlap != "none", 'mixing is given, but overlap is "none": remove it, or set an overlap')


def check_pace(spec: RunSpec) -> None:
    """ConfigError: the options of a run that say when rounds come do not go together."""
    check_overlap(spec.overlap, spec.overlap_steps, spec.mixing, spec.fragments, spec.sync_every)
    one_of("sync_mode", spec.sync_mode, SYNC_MODES)
    check(spec.round_s >= 0, f"round_s must not be negative, got {spec.round_s}")
    check(
        spec.round_s == 0 or spec.sync_mode == "deadline",
        f'round_s is given, but sync_mode is "{spec.sync_mode}": remove it, or set sync_mode = "deadline"',
    )
    for name, given in (("fragments", spec.fragments > 1), ("sync_mode", spec.sync_mode != "steps")):
        check(
            not given or spec.strategy == "diloco",
            f'{name} is given, but strategy is "{spec.strategy}", which has no rounds of that kind: remove it',
        )
