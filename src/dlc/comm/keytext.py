"""A run key as text: what it begins with, and what may be one and is therefore never shown."""

from __future__ import annotations

import re
from collections.abc import Callable

KEY_PREFIX = "dlc-key-1:"
HIDDEN = "(not shown, as it may be a run key)"
RUN_CHARS_MIN = 24
"""Letters and digits in a row, upper and lower case among them. Of a key that is cut shorter more than 100 bits are
still a secret, and names of files are seldom as long."""
WHOLE = re.compile(r"[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]")
"""A key without its prefix: 32 bytes in base64, of which the last digit has two bits to spare."""


def is_key(text: str) -> bool:
    """Whether that is a run key, with its prefix or without, which hardly anything else is."""
    return _begins(text) or (WHOLE.fullmatch(text) is not None and _mixed(text))


def may_be_key(text: str) -> bool:
    """Whether that may be a run key, or a mistyped one: without its prefix, say, or cut short. No path is, which a
    separator shows: keys have none."""
    if _begins(text):
        return True
    runs = re.findall(rf"[A-Za-z0-9_-]{{{RUN_CHARS_MIN},}}", text) if not re.search(r"[/\\]", text) else []
    return any(map(_mixed, runs))


def _begins(text: str) -> bool:
    """The prefix alone, as messages name it, is no secret."""
    return re.search(rf"{KEY_PREFIX}[\w-]", text, re.IGNORECASE) is not None


def _mixed(run: str) -> bool:
    return run != run.lower() and run != run.upper()


def without_keys(text: str, is_one: Callable[[str], bool] = may_be_key) -> str:
    """A message, with HIDDEN in the place of each word that `is_one`."""
    return re.sub(r"[^\s'\",;()=]+", lambda word: HIDDEN if is_one(word[0]) else word[0], text)


def holds_key(text: str) -> bool:
    """Whether a part of what should be an address may be a key: neither it nor what it is in is to be shown."""
    return any(map(may_be_key, re.split(r"[/\\]", text)))
