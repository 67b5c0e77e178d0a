"""How others reach this peer, for the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


def log_visible_maddrs(visible_maddrs: Sequence[str], only_p2p: bool = False) -> None:
    """Tell what others give as `initial_peers`."""
    if visible_maddrs:
        log.info("others join with initial_peers=%s", [str(maddr) for maddr in visible_maddrs])
    else:
        log.warning("this peer has no address: it is not part of a run")


__all__ = ["log_visible_maddrs"]
