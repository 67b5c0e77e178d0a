"""Keep freed chunk buffers in the process.

Chunks come and go by the hundred in every round. glibc's defaults give such blocks back to the kernel at once and take
them anew for the next chunk; the page faults then cost more than the copies. Raising two thresholds keeps them.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES_MAX = 256 << 20
"""At most this much free memory is kept at the top of the heap."""
BLOCK_BYTES_MAX = 32 << 20
"""Larger blocks (whole vectors) still go straight back; this is glibc's own upper limit."""


def keep_freed_chunks() -> bool:
    """Set glibc's thresholds for this process; False, and nothing happens, on systems without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX)) and bool(mallopt(_M_MMAP_THRESHOLD, BLOCK_BYTES_MAX))
