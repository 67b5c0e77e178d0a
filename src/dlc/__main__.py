"""`python -m dlc` is the command `dlc`."""

import atexit
import signal
import sys

from dlc.ending import end_at_once


def main() -> int:
    """Run it. Until it looks at signals itself Ctrl-C just ends it, with status 130: there is nothing to let go yet,
    and Python would print where in its imports it was. So it does again while Python ends, which takes seconds; once
    all is done there but to free memory, the signal itself ends it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind `nohup`
        signal.signal(signal.SIGINT, end_at_once)
    from dlc.cli import main as command  # seconds

    code = command()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        atexit.register(signal.signal, signal.SIGINT, end_at_once)  # the last one, which Python calls first
    return code


if __name__ == "__main__":
    sys.exit(main())
