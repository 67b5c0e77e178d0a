"""Logging helpers with Hivemind's names. dlc writes to Python's `logging` and sets no handler of its own accord."""

from __future__ import annotations

import logging
from enum import Enum

FORMAT = "%(asctime)s [%(levelname)s] %(message)s"


class HandlerMode(Enum):
    """Which loggers `use_hivemind_log_handler` gives a handler."""

    NOWHERE = 0
    IN_HIVEMIND = 1
    IN_ROOT_LOGGER = 2


PLACES = {HandlerMode.IN_HIVEMIND: "dlc", HandlerMode.IN_ROOT_LOGGER: None}

_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter(FORMAT))


def get_logger(name: str | None = None) -> logging.Logger:
    """`logging.getLogger`."""
    return logging.getLogger(name)


def use_hivemind_log_handler(where: HandlerMode | str) -> None:
    """Write lines of INFO and above to stderr: those of dlc ("in_hivemind"), all ("in_root_logger"), or "nowhere"."""
    mode = HandlerMode[where.upper()] if isinstance(where, str) else where
    for name in PLACES.values():
        logging.getLogger(name).removeHandler(_handler)
    if mode in PLACES:
        logger = logging.getLogger(PLACES[mode])
        logger.addHandler(_handler)
        logger.setLevel(logging.INFO)


__all__ = ["HandlerMode", "get_logger", "use_hivemind_log_handler"]
