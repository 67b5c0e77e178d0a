"""`StepControl`: a handle on one averaging step that is on its way."""

from __future__ import annotations

import logging
import math
from concurrent.futures import CancelledError
from enum import Enum
from typing import Any

from dlc.compat.hivemind.averaging.partition import AllreduceException
from dlc.compat.hivemind.utils.background import AwaitableFuture
from dlc.compat.hivemind.utils.timed_storage import get_dht_time
from dlc.handles import Flag

log = logging.getLogger(__name__)


class AveragingStage(Enum):
    """Where a step stands."""

    IDLE = 0
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2
    """It has a group, and the caller has not allowed the all-reduce yet."""
    RUNNING_ALLREDUCE = 3
    FINISHED = 4
    """With a result, an error, or cancelled."""


def check_weight(weight: float) -> None:
    """ValueError for one that no mean can have."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"the weight is {weight}: it must be a finite number that is not negative")


class StepControl(AwaitableFuture[Any]):
    """A future of what was gathered, `{peer id: data}`, whose step can be watched, triggered and cancelled.

    scheduled_time: until when a group waits for more members; deadline: when the step gives up. Both count as
    `get_dht_time` does. number: of the round, -1 where rounds have none. Weight and scheduled_time may change until
    the step looks for a group, which tells them to the others: one that requires a trigger, until it has it.
    """

    def __init__(self, scheduled_time: float, deadline: float, allow_retries: bool, weight: float, number: int) -> None:
        super().__init__()
        self.deadline, self.allow_retries, self.number = deadline, allow_retries, number
        self.stage = AveragingStage.IDLE
        self.began_matchmaking = self.began_allreduce = False
        self._changed = Flag()
        self._triggered = False
        self._scheduled_time = scheduled_time
        self.weight = weight

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        check_weight(weight)
        self._warn_if_begun("weight")
        self._weight = float(weight)

    @property
    def scheduled_time(self) -> float:
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        self._warn_if_begun("scheduled_time")
        if scheduled_time >= self.deadline:
            log.warning("the step is scheduled after its deadline: it will fail")
        self._scheduled_time = scheduled_time

    @property
    def triggered(self) -> bool:
        """The all-reduce is allowed."""
        return self._triggered

    def allow_allreduce(self) -> None:
        """Let the all-reduce begin as soon as there is a group; a second call changes nothing."""
        self._triggered = True
        self._changed.set()

    def wait_for_trigger(self) -> bool:
        """Return when the all-reduce is allowed (True), or the step is cancelled or past its deadline (False)."""
        left = self.get_timeout()
        self._changed.wait(None if math.isinf(left) else left)
        return self._triggered and not self.cancelled()

    def get_timeout(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - get_dht_time())

    def cancel(self) -> bool:
        """Give the step up. False: it is over already. What others have received of it may count."""
        cancelled = super().cancel()
        self._changed.set()
        return cancelled

    def _warn_if_begun(self, what: str) -> None:
        if self.began_matchmaking:
            log.warning(
                "the step looks for its group already: a new %s does not count in this one; set it before the trigger "
                "of a step with require_trigger=True",
                what,
            )


def waited(control: StepControl, timeout: float | None = None) -> Any:
    """The result of a step that nobody else holds. Where it is not there within `timeout` seconds (AllreduceException),
    or the wait is interrupted, the step is given up: a mean that came later would overwrite what the caller has then.
    """
    try:
        return control.result(timeout)
    except TimeoutError:
        if control.cancel():
            raise AllreduceException(f"no mean within {timeout:g} s") from None
        return control.result()  # it was there at the last moment
    except BaseException:
        control.cancel()
        raise


__all__ = ["AveragingStage", "CancelledError", "StepControl", "check_weight", "waited"]
