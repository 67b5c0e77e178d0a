"""`python -m dlc.compat.hivemind`: a peer that only is there for others to join by, as `hivemind-dht` is.

python -m dlc.compat.hivemind --host_maddrs /ip4/0.0.0.0/tcp/31337 --run_key run.key
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

from dlc.comm.roles import OBSERVER
from dlc.compat.hivemind.dht import DHT, LOOPBACK
from dlc.compat.opendiloco.dht import DHT as RoundsDHT
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
    parser.add_argument("--log", action="store_true", help="for programs of dlc.compat.opendiloco, or DHT(log=True)")
    parser.add_argument("--use_ipfs", action="store_true", help="not offered")
    parser.add_argument("--no_probe_links", action="store_true", help="send no junk to see what links carry")
    for name in ("--no_relay", "--use_auto_relay"):
        parser.add_argument(name, action="store_true", help=NEEDLESS)
    parser.add_argument("--refresh_period", type=int, help=NEEDLESS)
    args = parser.parse_args()
    if args.log and args.use_ipfs:
        parser.error("--use_ipfs is not offered: give the addresses of peers as --initial_peers")
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in ("no_relay", "use_auto_relay", "refresh_period", "no_probe_links", "log", "use_ipfs")
    }
    given |= {"start": True, "probe_links": not args.no_probe_links}
    try:
        with _of_rounds(given) if args.log else DHT(use_ipfs=args.use_ipfs, **given) as dht:
            print("others join with initial_peers", *dht.get_visible_maddrs(), flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    except DlcError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _of_rounds(given: dict[str, Any]) -> RoundsDHT:
    """One that has no vote in the rounds, and is not waited for; others begin the run, by its address."""
    return RoundsDHT(role=OBSERVER, startup_timeout=None, **given)


if __name__ == "__main__":
    sys.exit(main())
