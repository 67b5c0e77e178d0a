"""`dlc bench`: what links, hosts and codecs can do, before a run is started."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dlc.addresses import addresses_of, advertised, check_listen, outbound_host
from dlc.cli.files import raise_open_files_limit
from dlc.cli.interrupt import Interrupts, asked_to_stop
from dlc.cli.places import key_file, run_key
from dlc.comm.addresses import join_address, parse_address
from dlc.errors import UsageError

if TYPE_CHECKING:
    from dlc.bench.serve import Site
    from dlc.comm.security import LinkSecurity

log = logging.getLogger(__name__)

OK, NOT_MEASURED, PARTLY = 0, 3, 4
LOOPBACK = "127.0.0.1:0"
THREADS_PER_CORE_MAX = 4
"""More only wait for each other; with very many torch ends the process."""

SERVE_EXAMPLE = """\
example:
  dlc bench serve --listen 0.0.0.0:4700 --key-file run.key    until Ctrl-C; uses TCP 4700 and 4701

Whoever has the key can measure to and from this host, one at a time; nobody else can. No GPU, no model, no run.
Exit codes: 0 ended by Ctrl-C or SIGTERM; 2 usage, or the port is taken.
"""
LINK_EXAMPLE = """\
example:
  dlc bench link --to 192.0.2.7:4700 --key-file run.key       where `dlc bench serve` runs

Exit codes: 0 measured; 2 usage; 3 not reached, another key, or no rate; 4 broken off, or some rates could not be told;
130 interrupted.
"""
MATRIX_EXAMPLE = """\
examples:
  dlc bench matrix --peers A:4700,B:4700,C:4700 --key-file run.key --png links.png
  dlc bench matrix --peers A:4700,B:4700 --listen 0.0.0.0:4700 --advertise C --key-file run.key --json > links.json

Exit codes: 0 all measured; 2 usage; 3 nothing could be measured; 4 some pairs could not; 130 interrupted.
"""
ALLREDUCE_EXAMPLE = """\
examples:
  dlc bench allreduce --local 4 --mb 100
  dlc bench allreduce --peers A:4600,B:4600 --listen 0.0.0.0:4600 --advertise A --key-file run.key   on A; on B likewise

With --peers, start the same command on every host of the list, with an --advertise of its own.
Exit codes: 0 measured; 2 usage; 3 the others did not come, or have another key; 4 broken off, as somebody was gone:
what was measured until then is printed; 130 interrupted.
"""
CODEC_EXAMPLE = """\
example:
  dlc bench codec --mb 64 --device auto

Exit codes: 0 measured; 2 usage; 130 interrupted.
"""


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """The tools of `dlc bench`, with their options."""
    from dlc.cli.options import count, given, number, path, pause, seconds

    tools = bench.add_subparsers(dest="tool", metavar="TOOL", required=True)
    serve = _tool(tools, "serve", "let others measure the links of this host, until Ctrl-C", SERVE_EXAMPLE)
    serve.add_argument(
        "--listen", type=given, metavar="HOST:PORT", required=True, help="this port and the next one are used"
    )
    _add_key(serve, listens=True)

    link = _tool(tools, "link", "measure the link to a host that runs `dlc bench serve`", LINK_EXAMPLE)
    link.add_argument("--to", type=given, metavar="HOST:PORT", required=True, help="where it listens")
    _add_key(link, listens=False)
    link.add_argument(
        "--seconds", type=seconds, default=30.0, metavar="S", help="in all, from when the site was reached (default 30)"
    )
    link.add_argument("--max-mb", type=number, default=2000.0, metavar="MB", help="payload in all (default 2000)")
    link.add_argument(
        "--streams",
        default="1,2,4,8",
        metavar="N,...",
        help="connections to try, the last ones if there is time (default 1,2,4,8)",
    )

    matrix = _tool(tools, "matrix", "measure every direction between hosts that run `dlc bench serve`", MATRIX_EXAMPLE)
    matrix.add_argument(
        "--peers", type=given, metavar="HOST:PORT,...", required=True, help="as each of them dials the others"
    )
    matrix.add_argument(
        "--listen", type=given, metavar="HOST:PORT", help="this host takes part too, and listens here meanwhile"
    )
    matrix.add_argument(
        "--advertise", type=given, metavar="HOST[:PORT]", help="with --listen: what others dial; default: a guess"
    )
    _add_key(matrix, listens=True)
    matrix.add_argument("--seconds", type=seconds, default=10.0, metavar="S", help="for each direction (default 10)")
    matrix.add_argument("--max-mb", type=number, default=500.0, metavar="MB", help="for each direction (default 500)")
    matrix.add_argument("--png", type=path, metavar="FILE", help="draw a heat map; needs the extra `plots`")

    reduce = _tool(tools, "allreduce", "time the all-reduce, here or together with other hosts", ALLREDUCE_EXAMPLE)
    where = reduce.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", type=count, metavar="N", help="N processes on this host, up to 64")
    where.add_argument(
        "--peers", type=given, metavar="HOST:PORT,...", help="all hosts, this one included; the same list on each"
    )
    reduce.add_argument(
        "--n-peers", type=count, metavar="N", help="with --peers: how many take part (default: all listed)"
    )
    reduce.add_argument(
        "--listen", type=given, default=LOOPBACK, metavar="HOST:PORT", help="with --peers: where this host listens"
    )
    reduce.add_argument("--advertise", type=given, metavar="HOST[:PORT]", help="with --peers: what others dial")
    _add_key(reduce, listens=True)
    reduce.add_argument(
        "--mb", type=number, default=100.0, metavar="MB", help="MB (10^6 bytes) of fp32 per peer (default 100)"
    )
    reduce.add_argument(
        "--codec", default="fp16", metavar="NAME", help="fp32, fp16 (default), bf16, int8 or int4, as in a RUN.toml"
    )
    reduce.add_argument("--rounds", type=count, default=5, metavar="R", help="timed rounds (default 5)")
    reduce.add_argument("--pause", type=pause, default=0.0, metavar="S", help="between rounds (default 0)")
    reduce.add_argument("--links", type=path, metavar="FILE", help="what `matrix --json` printed: gives the limit")
    reduce.add_argument(
        "--threads",
        type=count,
        default=0,
        metavar="T",
        help="torch threads of a peer (default: with --local an equal share of the cores, else torch's own)",
    )
    reduce.add_argument(
        "--join-timeout",
        type=seconds,
        metavar="S",
        help="for the next peer to come (default 60, with --local at least 10 for each process)",
    )

    codec = _tool(tools, "codec", "time encoding and decoding on this host, and what each codec loses", CODEC_EXAMPLE)
    codec.add_argument(
        "--mb",
        type=number,
        default=64.0,
        metavar="MB",
        help="MB (10^6 bytes) of fp32, three times in memory (default 64)",
    )
    codec.add_argument(
        "--device", default="auto", help="auto (default: the CPU, and CUDA where there is one), cpu, cuda"
    )
    for tool in (serve, link, matrix, reduce, codec):
        tool.add_argument("--json", action="store_true", help="one JSON document on stdout")


def bench(args: argparse.Namespace) -> int:
    """Run one tool; returns its exit status."""
    tools = {"serve": _serve, "link": _link, "matrix": _matrix, "allreduce": _allreduce, "codec": _codec}
    with Interrupts() as interrupts:
        args.interrupts = interrupts
        return tools[args.tool](args)


def _tool(tools: Any, name: str, what: str, example: str) -> argparse.ArgumentParser:
    from dlc.cli.options import LEVELS

    tool: argparse.ArgumentParser = tools.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tool.add_argument(
        "--log-level", choices=LEVELS, default=argparse.SUPPRESS, help="what goes to stderr (default info)"
    )
    return tool


def _add_key(tool: argparse.ArgumentParser, listens: bool) -> None:
    from dlc.cli.options import given

    tool.add_argument("--key-file", type=given, metavar="FILE", help="the run key; needed beyond this machine")
    if listens:
        tool.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")


def _security(args: argparse.Namespace) -> LinkSecurity | None:
    from dlc.comm.security import LinkSecurity

    key = run_key(args.key_file)
    return None if key is None else LinkSecurity.derive(key, "")


def _check_place(args: argparse.Namespace, has_key: bool) -> None:
    """Where this host listens, and what others dial."""
    check_listen(args.listen, has_key or args.insecure)
    if args.advertise:
        advertised(args.advertise, parse_address(args.listen)[1])


def _budget(args: argparse.Namespace, streams: str, down: bool) -> Any:
    try:
        numbers = tuple(int(n) for n in streams.split(","))
    except ValueError:
        raise UsageError(f"--streams wants numbers like 1,2,4,8, not {streams!r}") from None
    from dlc.bench.limits import BYTES_MAX, MB
    from dlc.bench.link import Budget

    if not 1 <= args.max_mb <= BYTES_MAX // MB:  # also what is no number of bytes, and would be no Budget
        raise UsageError(f"--max-mb is {args.max_mb:g}; choose 1 to {BYTES_MAX // MB} MB")
    return Budget(args.seconds, int(args.max_mb * MB), numbers, down)


def _print_json(document: object) -> None:
    print(json.dumps(document, allow_nan=False), flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr: one line that changes for people, log lines for others."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield lambda text: log.info("%s", text)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C and SIGTERM set, looked at often; what ends by it is KeyboardInterrupt outside."""
    from dlc.bench.stream import Stopped

    with asked_to_stop() as stop:
        try:
            yield stop
        except Stopped:
            raise KeyboardInterrupt from None


# ---------------------------------------------------------------- the tools


def _serve(args: argparse.Namespace) -> int:
    security = _security(args)
    check_listen(args.listen, security is not None or args.insecure)
    raise_open_files_limit()
    from dlc.bench.serve import Site

    site = Site(args.listen, security, args.insecure)
    try:
        if args.json:
            _print_json({"event": "serving", "host": site.host, "port": site.port, "bulk_port": site.bulk_port})
        log.info("serving measurements on %s, TCP %d and %d; Ctrl-C ends it", site.host, site.port, site.bulk_port)
        with _interruptible() as stop:
            site.run(stop)
        log.info("no longer serving")
    finally:
        site.close()
    return OK


def _link(args: argparse.Namespace) -> int:
    if len(to := addresses_of(args.to)) != 1:
        raise UsageError("--to wants one address; for several use `dlc bench matrix`")
    security, budget = _security(args), _budget(args, args.streams, down=True)
    from dlc.bench import show
    from dlc.bench.link import measure
    from dlc.cli.console import Stdout

    with _progress() as say, _interruptible() as stop:
        report = measure(to[0], security, budget, say=say, stop=stop)
    if args.json:
        _print_json(report.to_dict())
    else:
        show.link(report, Stdout())
    for remark in report.remarks():
        print(f"dlc bench: {remark}", file=sys.stderr)
    return _status(report.missing, 2 * sum(rates.planned for rates in report.streams))


def _matrix(args: argparse.Namespace) -> int:
    if args.advertise and not args.listen:
        raise UsageError("--advertise goes with --listen: without it this host only asks the others")
    sites, security = addresses_of(args.peers), _security(args)
    if args.listen:
        _check_place(args, security is not None)
    budget = _budget(args, "1", down=False)
    from dlc.bench import heatmap, show
    from dlc.bench.matrix import measure_matrix
    from dlc.cli.console import Stdout

    if args.png is not None:
        heatmap.check(args.png)
    with _own_site(args, security) as own:
        reach = {}
        if own is not None:
            mine = _advertised(own, args.advertise)
            reach[mine] = own.address
            sites = (mine, *(site for site in sites if site != mine))
        if len(sites) < 2:
            raise UsageError("a matrix needs two hosts: list more in --peers, or take part with --listen")
        with _progress() as say, _interruptible() as stop:
            report = measure_matrix(sites, security, budget, reach=reach, say=say, stop=stop)
    if args.json:
        _print_json(report.to_dict())
    else:
        show.matrix(report, Stdout())
    if args.png is not None:
        try:
            heatmap.draw(report, args.png)
            log.info("drawn to %s", args.png)
        except OSError as error:  # what was measured is printed, and counts
            print(f"dlc bench: {args.png} could not be written: {error.strerror or error}", file=sys.stderr)
    if report.failed:
        print(f"dlc bench: {report.failed} of {len(report.pairs)} directions were not measured", file=sys.stderr)
    return _status(report.failed, len(report.pairs))


def _status(missing: int, n: int) -> int:
    return OK if not missing else NOT_MEASURED if missing == n else PARTLY


@contextmanager
def _own_site(args: argparse.Namespace, security: LinkSecurity | None) -> Iterator[Site | None]:
    """This host, serving beside the matrix, where --listen says so."""
    from dlc.bench.serve import Site

    if not args.listen:
        yield None
        return
    site, stop = Site(args.listen, security, args.insecure), threading.Event()
    thread = threading.Thread(target=site.run, args=(stop,), name="dlc-site", daemon=True)
    thread.start()
    try:
        yield site
    finally:
        stop.set()
        site.wake()
        thread.join()
        site.close()


def _advertised(site: Site, given: str | None) -> str:
    import ipaddress

    if given:
        return join_address(*advertised(given, site.port))
    host = outbound_host(site.host) if ipaddress.ip_address(site.host).is_unspecified else site.host
    return join_address(host, site.port)


def _allreduce(args: argparse.Namespace) -> int:
    if args.local is not None and (args.links or args.n_peers or args.advertise or args.listen != LOOPBACK):
        raise UsageError("--links, --n-peers, --listen and --advertise go with --peers, not with --local")
    if args.threads > (most := THREADS_PER_CORE_MAX * (os.cpu_count() or 1)):
        raise UsageError(f"--threads is {args.threads}; on this host choose up to {most}")
    peers, key = addresses_of(args.peers or ()), run_key(args.key_file)
    if args.links and args.n_peers not in (None, len(peers)):
        raise UsageError(
            f"--links tells the limit between all {len(peers)} hosts of --peers, and --n-peers is {args.n_peers}: list "
            "those that take part, or leave out --links"
        )
    if args.local is None and (args.n_peers or len(peers)) < 2:
        raise UsageError(
            "one host is no all-reduce: list all in --peers, this one included, or say how many come by --n-peers"
        )
    _check_place(args, key is not None)
    from dlc.bench.limit import read_links

    links = read_links(args.links, peers) if args.links else None
    import torch  # takes seconds, so only now that the options are known to be right

    from dlc.bench import allreduce, show
    from dlc.bench.children import Children, check_local, check_vector
    from dlc.cli.console import Stdout
    from dlc.peer import Peer

    n_peers = args.local if args.local is not None else args.n_peers or len(peers)
    work = allreduce.Work(n_peers, args.mb, args.codec, args.rounds, args.pause)
    if args.local is not None:
        check_local(n_peers, work.mb)
    else:
        check_vector(work.mb)
    args.join_timeout = args.join_timeout or allreduce.join_timeout_s(args.local)
    if args.local is not None and not args.threads:
        args.threads = max(1, (os.cpu_count() or 1) // n_peers)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.interrupts.holds = True
    with _progress() as say:
        say("joining")
        with Peer.join(
            peers,
            run="dlc-bench",
            key=key,
            listen=args.listen,
            advertise=args.advertise,
            insecure=args.insecure,
            join_timeout_s=args.join_timeout,
        ) as peer:
            n_children = n_peers - 1 if args.local is not None else 0
            with Children(n_children, _child_options(args, peer.address, n_peers)) as children:
                mine = allreduce.take_part(peer, work, say, args.join_timeout, children.look)
                others, lost = children.reports()
    report = allreduce.combine([mine, *others], work, key is not None, links, lost)
    if args.json:
        _print_json(report.to_dict())
    else:
        show.allreduce(report, Stdout())
    if report.stopped:
        print(f"dlc bench: {report.stopped}", file=sys.stderr)
    return PARTLY if report.stopped else OK


def _child_options(args: argparse.Namespace, address: str, n_peers: int) -> dict[str, str]:
    """What makes another process on this host a peer of the same benchmark."""
    same = {f"--{name}": str(getattr(args, name)) for name in ("mb", "codec", "rounds", "pause", "threads")}
    options = same | {"--peers": address, "--n-peers": str(n_peers), "--join-timeout": str(args.join_timeout)}
    key = key_file(args.key_file)
    return options | ({"--key-file": str(key)} if key is not None else {})


def _codec(args: argparse.Namespace) -> int:
    from dlc.bench import codec, show
    from dlc.cli.console import Stdout

    on, note = codec.devices(args.device)
    with _progress() as say:
        reports = codec.measure_codecs(args.mb, on, say)
    if args.json:
        _print_json({"mb": args.mb, "note": note, "codecs": [report.to_dict() for report in reports]})
    else:
        show.codecs(reports, note, Stdout())
    return OK
