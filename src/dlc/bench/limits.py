"""Named limits of measurements: what a site does for whoever holds its key, and what a client asks for."""

from __future__ import annotations

from dlc.comm.framing import run_tag

TAG = run_tag("dlc bench", b"")
"""Measurements are no run: peers of one drop these messages, and a site drops theirs."""

MB = 1_000_000
SECONDS_MAX = 600.0
"""One measurement holds a site for this long at most: others wait meanwhile."""
BYTES_MAX = 100_000 * MB
"""Payload of one measurement: 80 s of a 10 Gbit/s link; more tells nothing new and may cost money."""
SLACK_S = 30.0
"""Beyond the seconds that were asked for: connecting, and what is still on the way."""
BUSY_S = 60.0
"""How long a client waits for a site that measures with somebody else; an order may take so much longer."""
GIVE_WAY_S, YIELD_S = 3.0, 1.5
"""An order waits for a busy site for once to twice the first, by lot, then lets others measure to its own host for the
second, and waits on: that site may wait for this one. Clients ask twice in a second."""
IDLE_S = 15.0
"""A session that is silent for this long is over: its client died. Clients say something every second."""
STREAMS_MAX = 16
"""Bulk connections of one measurement: twice what is ever useful. Above it, the one unused longest is forgotten."""
PULLS_MAX = 1024
"""Chunks asked for and not yet sent on one connection: numbers only, but there must be an end."""
OUTCOME_KEEP_S = 60.0
"""The outcome of an order waits for its asker for this long."""
OUTCOMES_MAX = 256
"""That wait so, of as many clients: a few numbers each. Above it, the one asked for longest ago is forgotten."""
