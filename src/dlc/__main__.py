"""`python -m dlc` is the command `dlc`."""

import sys

from dlc.cli import main

if __name__ == "__main__":
    sys.exit(main())
