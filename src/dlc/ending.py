"""How a command ends by Ctrl-C while nobody looks at it: it is being loaded, or Python ends. Imports nothing else."""

import os
from types import FrameType

INTERRUPTED = 130
"""What a shell tells of a process that SIGINT ended; here it is the exit status, for whoever starts one without."""


def end_at_once(number: int, frame: FrameType | None) -> None:
    """For `signal.signal`: no exception, which an import may take for a missing package, and no traceback."""
    os._exit(INTERRUPTED)
