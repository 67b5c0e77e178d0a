"""`python -m dlc.compat.hivemind`: a peer that only is there for others to join by, as `hivemind-dht` is.

python -m dlc.compat.hivemind --host_maddrs /ip4/0.0.0.0/tcp/31337 --run_key run.key
"""

from __future__ import annotations

import argparse
import sys
import threading

from dlc.compat.hivemind.dht import DHT, LOOPBACK
from dlc.errors import DlcError

NEEDLESS = "taken, and of no effect"
"""What is said of options of hivemind-dht that a peer of dlc has no use for."""


def main() -> int:
    """Until Ctrl-C."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__)
    parser.add_argument("--initial_peers", nargs="*", default=[], help="addresses of the run; none: begin one")
    parser.add_argument("--host_maddrs", nargs="*", default=LOOPBACK, help="where to listen (the first TCP address)")
    parser.add_argument("--announce_maddrs", nargs="*", help="what others dial")
    parser.add_argument("--identity_path", help="folder of this peer's key pair")
    parser.add_argument("--run_key", help="file made by `dlc key`; needed beyond loopback")
    parser.add_argument("--use_ipfs", action="store_true", help="not offered")
    parser.add_argument("--no_probe_links", action="store_true", help="send no junk to see what links carry")
    for name in ("--no_relay", "--use_auto_relay"):
        parser.add_argument(name, action="store_true", help=NEEDLESS)
    parser.add_argument("--refresh_period", type=int, help=NEEDLESS)
    args = parser.parse_args()
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in ("no_relay", "refresh_period", "no_probe_links")
    }
    try:
        with DHT(start=True, probe_links=not args.no_probe_links, **given) as dht:
            print("others join with initial_peers", *dht.get_visible_maddrs(), flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    except DlcError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
