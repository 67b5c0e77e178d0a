"""`dlc join` whose inner steps take a given time, as if an accelerator made them: many peers fit on few cores.

python benchmarks/_paced.py SECONDS[@FILE] [what dlc join takes]

With FILE, the first step begins once that exists: so that peers that took long to start begin together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GATE_LOOK_S = 0.02


def paced_join(step_s: float, gate: Path | None = None) -> list[str]:
    """The words of a command, before the options of `dlc join`."""
    return [sys.executable, str(Path(__file__).resolve()), f"{step_s}@{gate}" if gate else str(step_s)]


def main() -> int:
    from dlc.cli import main as dlc
    from dlc.train.inner import InnerLoop

    seconds, _, gate = sys.argv[1].partition("@")
    step_s = float(seconds)

    def paced(made: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: InnerLoop, *rest: Any) -> Any:
            while gate and not Path(gate).exists():
                time.sleep(GATE_LOOK_S)
            end_s = time.monotonic() + step_s
            result = made(self, *rest)
            time.sleep(max(0.0, end_s - time.monotonic()))
            return result

        return step

    InnerLoop.train_step = paced(InnerLoop.train_step)  # type: ignore[method-assign]
    InnerLoop.gradient = paced(InnerLoop.gradient)  # type: ignore[method-assign]
    return dlc(["join", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
