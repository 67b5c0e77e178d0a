"""Sites that serve measurements in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from dlc.bench.serve import Site
from dlc.comm.security import LinkSecurity

KEYED = LinkSecurity.derive(bytes(32), "")
OTHER = LinkSecurity.derive(bytes(31) + b"\1", "")


@contextlib.contextmanager
def serving(security: LinkSecurity | None = KEYED, listen: str = "127.0.0.1:0") -> Iterator[Site]:
    site, stop = Site(listen, security), threading.Event()
    thread = threading.Thread(target=site.run, args=(stop,), name="test-site")
    thread.start()
    try:
        yield site
    finally:
        stop.set()
        site.wake()
        thread.join(20)
        site.close()
        assert not thread.is_alive()
