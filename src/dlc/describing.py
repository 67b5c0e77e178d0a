"""What a peer tells the others of itself, checked before it travels with every record of it: they would not take a bad
one, nor anything of this peer's any more."""

from __future__ import annotations

import json
import math
from numbers import Real
from typing import Any

from dlc.comm.records import STATUS_BYTES_MAX
from dlc.errors import UsageError


def described(speed: float | None, eta_s: float | None, status: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of the record that these change. UsageError: see `Peer.describe`."""
    changes: dict[str, Any] = {}
    for name, value in ("speed", speed), ("eta_s", eta_s):
        if value is not None:
            if not (isinstance(value, Real) and math.isfinite(value)):
                raise UsageError(f"speed and eta_s must be finite numbers, not {speed!r:.60} and {eta_s!r:.60}")
            changes[name] = float(value)
    if status is not None:
        try:
            changes["status"] = json.dumps(status).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the status must be what JSON can hold: {error}") from None
        if (size := len(changes["status"])) > STATUS_BYTES_MAX:
            raise UsageError(
                f"the status is {size} bytes of JSON, at most {STATUS_BYTES_MAX} travel with every record: "
                "leave something out"
            )
    return changes
