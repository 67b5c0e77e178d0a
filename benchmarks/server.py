"""An asynchronous parameter server with one trainer that is ten times slower: what the others lose by it.

    python benchmarks/server.py

Helpers and trainers are peers over loopback, each with its driver thread, in this one process. A trainer waits for the
time of its inner phase, as if it computed on a host of its own, and then exchanges for real. The pairs, without and
with the slow trainer, are interleaved; the figures are medians of the pushes per second of the others, which all have
the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

import dlc
from dlc.errors import DlcError
from dlc.strategyspec import ServerSpec

OUTER = dlc.OuterSpec(optimizer="nesterov", lr=0.1)
SERVED_S = 60.0
"""Within this all spans have an owner and a standby."""


class Trainers:
    """One swarm: helpers, and trainers of which the last is the slow one."""

    def __init__(self, stack: ExitStack, args: argparse.Namespace) -> None:
        self.args = args
        self.spec = ServerSpec(async_=True, spans=args.spans)
        first = stack.enter_context(dlc.Peer.join(log=False))
        join = {"log": False, "join_timeout_s": 30.0}
        more = [stack.enter_context(dlc.Peer.join([first.address], **join)) for _ in range(args.others)]
        self.clients = [
            dlc.ServerClient(peer, torch.zeros(args.numel), spec=self.spec, chunk_elems=8192) for peer in (first, *more)
        ]
        helpers = [stack.enter_context(dlc.Peer.join([first.address], role="helper", **join)) for _ in range(2)]
        servers = [dlc.ParameterServer(peer, outer=OUTER, spec=self.spec) for peer in helpers]
        for client in self.clients:
            client.begin()
        for client in self.clients:
            client.wait(SERVED_S)
        end = time.monotonic() + SERVED_S
        while any(sum(map(len, server.spans())) < args.spans for server in servers):
            if time.monotonic() > end:
                raise DlcError("the spans have no standbys yet")
            time.sleep(0.1)

    def measure(self, slow: bool) -> float:
        """Pushes per second of each of the others."""
        stop = threading.Event()
        slow_one = threading.Thread(target=self._train_slowly, args=(self.clients[-1], stop))
        if slow:
            slow_one.start()
        with ThreadPoolExecutor(self.args.others) as pool:
            rates = list(pool.map(self._train, self.clients[: self.args.others]))
        stop.set()
        if slow:
            slow_one.join()
        return statistics.fmean(rates)

    def _train(self, client: dlc.ServerClient) -> float:
        push = torch.full((self.args.numel,), 1e-3)
        began = time.monotonic()
        for _ in range(self.args.pushes):
            time.sleep(self.args.phase_s)
            report = client.exchange(push, timeout_s=SERVED_S)
            if report.counted < 1.0:
                raise DlcError(f"a push did not count: {report.outcomes}")
        return float(self.args.pushes / (time.monotonic() - began))

    def _train_slowly(self, client: dlc.ServerClient, stop: threading.Event) -> None:
        push = torch.full((self.args.numel,), 1e-3)
        while not stop.wait(self.args.phase_s * self.args.slower):
            client.exchange(push, timeout_s=SERVED_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=200_000, help="parameters (default 200,000)")
    parser.add_argument("--spans", type=int, default=8, help="into which they are cut (default 8)")
    parser.add_argument("--others", type=int, default=2, help="trainers beside the slow one (default 2)")
    parser.add_argument("--slower", type=float, default=10.0, help="how much slower the slow one is (default 10)")
    parser.add_argument("--phase-s", type=float, default=1.0, help="inner phase of the others, in seconds (default 1)")
    parser.add_argument("--pushes", type=int, default=20, help="of each of the others in a measurement (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs = []
    with ExitStack() as stack:
        trainers = Trainers(stack, args)
        for _ in range(args.repeats):
            pairs.append((trainers.measure(slow=False), trainers.measure(slow=True)))
    without, with_slow = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    found = {"without": without, "with": with_slow, "ratio": ratio}
    if args.json:
        print(json.dumps({**found, "pairs": pairs}))
    else:
        print(f"pushes/s of the others: {without:.3f} without, {with_slow:.3f} with the slow one")
        print(f"with / without: {ratio:.3f} (median of {args.repeats} interleaved pairs)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
