"""A run key as text: what it begins with, and what may be one and is therefore never shown."""

from __future__ import annotations

import re

KEY_PREFIX = "dlc-key-1:"
HIDDEN = "(not shown, as it may be a run key)"
RUN_CHARS_MIN = 24
"""Letters and digits in a row, upper and lower case among them. Of a key that is cut shorter more than 100 bits are
still a secret, and names of files are seldom as long."""


def may_be_key(text: str) -> bool:
    """Whether that may be a run key, or a mistyped one: without its prefix, say, or cut short. No path is, which a
    separator shows: keys have none."""
    if KEY_PREFIX in text.lower():
        return True
    runs = re.findall(rf"[A-Za-z0-9_-]{{{RUN_CHARS_MIN},}}", text) if not re.search(r"[/\\]", text) else []
    return any(run != run.lower() and run != run.upper() for run in runs)


def without_keys(text: str) -> str:
    """A message, with HIDDEN in the place of each word that may be a key."""
    return re.sub(r"[^\s'\",;()=]+", lambda word: HIDDEN if may_be_key(word[0]) else word[0], text)
