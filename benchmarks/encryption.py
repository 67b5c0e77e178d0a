"""What encryption costs: rounds over loopback with CurveZMQ and without, beside the speed of other ciphers.

    python benchmarks/encryption.py --n 4 --mb 100

Swarms with and without a run key take turns; over loopback all is a matter of processors, so the ratio of the seconds
is the most that encryption can cost. Every mean is checked. CurveZMQ is XSalsa20-Poly1305 by libsodium in libzmq's
thread. Then one thread seals and opens chunks of 512 KiB by AES-GCM and ChaCha20-Poly1305 (the `cryptography` package)
into memory that is there; the best of many is told, so it is the least that such a chunk can cost. The last lines say
what share of a round's processor time that least would be, were chunks sealed so and links left plain: every byte of
the wire is sealed once and opened once. A result that is sealed once for all would save up to half of the seals.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import _gloo
from allreduce import Swarm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from dlc.comm.codecs import get_codec
from dlc.comm.security import generate_run_key

CHUNK_BYTES, TAG_BYTES, NONCE_BYTES = 1 << 19, 16, 12
SEAL_S = 0.3
"""How long each cipher is timed, each way."""
WARM = 2
"""Rounds of each swarm that are not timed."""
KINDS = {"plain": "without a run key", "encrypted": "CurveZMQ"}


def rounds(n: int, mb: float, repeats: int, each: int, codec: str) -> dict[str, Any]:
    """Medians over `repeats` swarms of each kind, with `each` timed rounds."""
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(repeats):
        for kind in list(KINDS)[:: -1 if turn % 2 else 1]:
            swarm = Swarm(n, int(mb * 1e6 / 4), codec, generate_run_key() if kind == "encrypted" else "")
            try:
                times[kind] += [swarm.round() for _ in range(WARM + each)][WARM:]
            finally:
                swarm.close()
            told = " ".join(f"{seconds:.3f}" for seconds, _ in times[kind][-each:])
            print(f"turn {turn + 1} of {repeats}, {KINDS[kind]}: {told}", file=sys.stderr)
    found: dict[str, Any] = {}
    for kind, rows in times.items():
        found[f"{kind}_s"], found[f"{kind}_cpu_s"] = (statistics.median(column) for column in zip(*rows, strict=True))
        found[f"{kind}_all_s"] = [seconds for seconds, _ in rows]
    found["ratio"] = found["encrypted_s"] / found["plain_s"]
    found["cpu_ratio"] = found["encrypted_cpu_s"] / found["plain_cpu_s"]
    return found


def ciphers() -> dict[str, dict[str, float]]:
    """GB/s of sealing and of opening, one thread."""
    kinds = {
        "AES-256-GCM": AESGCM(AESGCM.generate_key(256)),
        "AES-128-GCM": AESGCM(AESGCM.generate_key(128)),
        "ChaCha20-Poly1305": ChaCha20Poly1305(ChaCha20Poly1305.generate_key()),
    }
    found = {}
    for name, cipher in kinds.items():
        plain, sealed = bytearray(os.urandom(CHUNK_BYTES)), bytearray(CHUNK_BYTES + TAG_BYTES)
        nonce = os.urandom(NONCE_BYTES)  # the same again and again: nothing here leaves the process
        seal_s = _best_s(lambda c=cipher, n=nonce, p=plain, s=sealed: c.encrypt_into(n, p, None, s))
        open_s = _best_s(lambda c=cipher, n=nonce, p=plain, s=sealed: c.decrypt_into(n, s, None, p))
        found[name] = {"seal_GBps": CHUNK_BYTES / seal_s / 1e9, "open_GBps": CHUNK_BYTES / open_s / 1e9}
    return found


def _best_s(work: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + SEAL_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def wire_gb(n: int, mb: float, codec: str) -> float:
    """What all peers send in a round: each contribution to its owners, each result to the others."""
    return 2 * (n - 1) * get_codec(codec).wire_bytes(int(mb * 1e6 / 4)) / 1e9


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=_gloo.at_least_1, default=4, help="processes (default 4)")
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process (default 100)")
    parser.add_argument("--repeats", type=_gloo.at_least_1, default=3, help="swarms of each kind (default 3)")
    parser.add_argument("--rounds", type=_gloo.at_least_1, default=3, help="timed rounds of each swarm (default 3)")
    parser.add_argument("--codec", choices=("fp32", "fp16", "bf16"), default="fp16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        result = {"n": args.n, "mb": args.mb, "codec": args.codec, "ciphers": ciphers()}
        result |= rounds(args.n, args.mb, args.repeats, args.rounds, args.codec)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    sent = wire_gb(args.n, args.mb, args.codec)
    for rates in result["ciphers"].values():
        rates["cpu_s"] = sent / rates["seal_GBps"] + sent / rates["open_GBps"]
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.n} processes, {args.mb:g} MB of fp32 each, {args.codec} over loopback, medians")
    plain_cpu_s = result["plain_cpu_s"]
    for kind, name in KINDS.items():
        print(f"  {name:<18} {result[f'{kind}_s']:.3f} s, {result[f'{kind}_cpu_s']:.3f} s of processors")
    print(f"  ratio {result['ratio']:.2f}, of processor time {result['cpu_ratio']:.2f}")
    print(f"chunks of {CHUNK_BYTES >> 10} KiB on one thread; {sent:.2f} GB sealed and opened, over a plain round:")
    for name, rates in result["ciphers"].items():
        print(
            f"  {name:<18} {rates['seal_GBps']:.1f} GB/s sealing, {rates['open_GBps']:.1f} opening; "
            f"{rates['cpu_s']:.3f} s of processors, ratio at least {1 + rates['cpu_s'] / plain_cpu_s:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
