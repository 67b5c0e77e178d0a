from __future__ import annotations

import pytest

from tests.helpers import wait_until


def test_wait_until_returns_when_the_condition_turns_true() -> None:
    looks: list[None] = []

    def third_look() -> bool:
        looks.append(None)
        return len(looks) == 3

    wait_until(third_look, deadline_s=30)
    assert len(looks) == 3


def test_wait_until_names_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: the moon"):
        wait_until(lambda: False, deadline_s=0.01, what="the moon")
