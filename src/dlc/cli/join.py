"""`dlc join`: find the swarm, or found one, and train until the run ends.

    options ──> RunSpec, key, state directory ──> Peer.join(hold) ──> Trainer.run ──> events ──> sinks

A peer that starts again in its state directory goes on from its newest checkpoint (`--resume auto`), even where the run
has another length now; those of other runs are left alone. `--resume never` sets all of them aside once it has joined,
`--resume PATH` goes on from that one and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import logging
import os
import queue
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlc.addresses import addresses_of, advertised, check_listen, default_listen
from dlc.cli import site, trackers
from dlc.cli.document import documented
from dlc.cli.files import raise_open_files_limit
from dlc.cli.helping import check_helped, help_out
from dlc.cli.interrupt import Interrupts
from dlc.cli.observing import check_observed, look_on
from dlc.cli.options import OF_TRAINERS
from dlc.cli.places import KeptOpen, home, key_file, run_key
from dlc.comm.addresses import parse_address
from dlc.comm.roles import HELPER, OBSERVER, TRAINER
from dlc.errors import DlcError, SpecMismatch, UsageError
from dlc.runspec import RunSpec
from dlc.statedir import StateDir, free_state_dir
from dlc.strategyspec import WITHOUT_LOG
from dlc.train.shelf import FOLDER, expanded, file_of, files_in, takes_files
from dlc.train.sources import demand_source

if TYPE_CHECKING:
    from dlc.cli.sinks import Event, Sink
    from dlc.peer import Peer
    from dlc.train.group import Group
    from dlc.train.saves import Saved
    from dlc.train.trainer import Summary

log = logging.getLogger(__name__)

DIFFERENCES_TOLD = 3
AUTO, NEVER = "auto", "never"
"""Values of --resume; any other is a path."""
WORK = {TRAINER: "dlc.train.trainer", HELPER: "dlc.server", OBSERVER: "dlc.train.telling"}
"""By role, the module that does it."""


def join(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """The whole command; returns its exit status."""
    rank = site.launched()
    if rank is not None and rank.rank > 0:
        if not args.print_config:  # where rank 0 begins nothing
            site.follow_on(args, rank)
        return 0
    spec = _given_spec(args)
    if args.print_config:
        if spec is not None and spec.model != RunSpec().model and spec.model.kind == "config":
            from dlc.train.model import config_of  # seconds

            config_of(spec.model.config)
        if isinstance(sys.stdout, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # as in dlc.cli
                sys.stdout.reconfigure(encoding="utf-8")  # as TOML is, whatever the terminal's encoding
        print(documented(spec or RunSpec()), end="")
        return 0
    _check(args, rank, spec)
    raise_open_files_limit()
    named = None
    if args.resume not in (AUTO, NEVER):
        named, spec = _named_checkpoint(args, spec)
    if spec is None and not args.peers and args.role != OBSERVER:
        spec = RunSpec() if named is None else named.spec
    state = StateDir(args.state_dir) if args.state_dir else free_state_dir(home(), (spec or RunSpec()).run, args.role)
    try:
        with site.leading(args, rank, interrupts) as group:
            _take_part(args, spec, named, state, interrupts, group)
    finally:
        state.close()
    return 0


def _check(args: argparse.Namespace, rank: site.Rank | None, spec: RunSpec | None) -> None:
    """What is wrong with the options, before torch is loaded, which takes seconds. Sets peers, key and listen."""
    _check_role(args, rank)
    for option, extra in (("--tensorboard", args.tensorboard), ("--wandb", args.wandb)):
        if extra is not None:
            trackers.demand(option.removeprefix("--"), option)
    for option, folder in (("--tensorboard", args.tensorboard), ("--profile", args.profile and args.profile[0])):
        if folder is not None:
            _make(folder, option)
    if rank is None and args.parallel is not None:
        raise UsageError(
            f"--parallel {args.parallel} is for several processes, and this is the only one: start two or more with "
            "torchrun (--nproc-per-node times --nnodes)"
        )
    if args.role == TRAINER and spec is not None:
        demand_source(spec.data.source)
    if args.role == HELPER and spec is not None:
        check_helped(spec)
    if args.role == OBSERVER:
        check_observed(args.found)
    if args.resume not in (AUTO, NEVER):
        file_of(expanded(args.resume))
    args.peers, args.key = addresses_of(args.peers or ()), run_key(args.key_file)
    args.key_file = key_file(args.key_file)
    args.listen = args.listen or default_listen(args.peers, args.key is not None, args.insecure)
    check_listen(args.listen, args.key is not None or args.insecure)
    if args.advertise is not None:
        advertised(args.advertise, parse_address(args.listen)[1])


def _check_role(args: argparse.Namespace, rank: site.Rank | None) -> None:
    if args.role == TRAINER:
        return
    idle = [f"--{name.replace('_', '-')}" for name, plain in OF_TRAINERS.items() if getattr(args, name) != plain]
    if idle:
        raise UsageError(f"--role {args.role} has no use for {', '.join(idle)}: leave out what is for trainers")
    if rank is not None:
        raise UsageError(f"--role {args.role} is one process: start it without torchrun")


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        takes_files(folder)
    except FileExistsError:
        raise UsageError(f"{option} {folder} is a file: name a folder") from None
    except OSError as error:
        raise UsageError(f"{option} {folder} cannot be written: {error.strerror or error}") from None


def _named_checkpoint(args: argparse.Namespace, spec: RunSpec | None) -> tuple[Saved, RunSpec | None]:
    """The one of --resume, and what the options say of the run that goes on from it: --rounds alone, its length."""
    from dlc.train import saves

    saved = saves.chosen(expanded(args.resume), None)
    if args.config is None and spec is not None:
        spec = _with_rounds(saved.spec, args.rounds)
    if spec is not None:
        saves.demand_way(saved, spec)
    return saved, spec


def _take_part(
    args: argparse.Namespace,
    spec: RunSpec | None,
    named: Saved | None,
    state: StateDir,
    interrupts: Interrupts,
    group: Group | None,
) -> None:
    from dlc.train import saves

    if args.role == TRAINER:
        state.hold(state.path / FOLDER)
    if args.resume == NEVER:
        files_in(state.path)  # what cannot be read now cannot be set aside later
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    importlib.import_module(WORK[args.role])  # seconds: not as a member
    interrupts.holds = True
    try:
        looks = args.role == TRAINER and args.resume != NEVER
        found = named or saves.newest(state.path, spec) if looks else None
        if args.role == TRAINER and spec is not None:
            _check_parts(spec, group)
            if looks and found is None:
                _tell_other_run(state.path, spec)
        peer, found = join_swarm(args, spec, state, found, events)  # what it was before is held no longer
    except SpecMismatch as error:
        if named is None:
            raise
        raise SpecMismatch(f"the checkpoint {named.path} is of another run than the peers': {error}") from None
    with peer:
        if args.history_bytes is not None and peer.spec.strategy in WITHOUT_LOG:
            log.warning(
                '--history-bytes changes nothing here: a run with strategy = "%s" keeps no results of past rounds',
                peer.spec.strategy,
            )
        interrupts.can_save = args.role != TRAINER  # who trains has nothing to save before it is in step
        if args.role != TRAINER:
            take_part = help_out if args.role == HELPER else look_on
            take_part(peer, events, interrupts.stop, args.json, partial(_tell_start, args, peer, state.path, None))
            return
        if spec is None:
            _check_theirs(peer.spec, group)
        if args.resume == NEVER and (aside := saves.set_aside(state.path)) is not None:  # the swarm is there now
            log.info("the checkpoints that were here are set aside in %s", aside)
        state.hold(saves.folder_of(state.path, peer.spec))
        if named is not None and (aside := saves.set_later_aside(state.path, named, peer.spec)) is not None:
            log.info("the checkpoints of later rounds that were here are set aside in %s", aside)
        if found is not None and peer.spec.strategy not in WITHOUT_LOG and not (args.peers or args.found):
            _tell_awaited(state)
        _train(args, peer, state, found, events, interrupts, group)


def _check_parts(spec: RunSpec, group: Group | None) -> None:
    """What is wrong with the run's model, tokenizer or data on this host, as far as it shows without building or
    reading all of them, or with a site for this run: before others are told to join. Of a hub's model the config is
    fetched, and so is its tokenizer. ConfigError, DataError, UsageError."""
    from dlc.train.data import demand_data
    from dlc.train.model import config_at, config_of
    from dlc.train.parallel import check_fits
    from dlc.train.setup import check_config
    from dlc.train.tokens import load_tokenizer

    if group is not None:
        check_fits(spec, group.size, group.parallel)
    if spec.model.kind == "config":
        model = config_of(spec.model.config)
    else:
        where = spec.model.name if spec.model.kind == "hub" else Path(spec.model.path)
        model = config_at(where, spec.model.revision)
    tokenizer = load_tokenizer(spec.data.tokenizer)
    check_config(spec, model, tokenizer)
    demand_data(spec, tokenizer)


def _check_theirs(spec: RunSpec, group: Group | None) -> None:
    """As `_check_parts`, of a run whose RunSpec came from its peers: whoever joins may never have seen it."""
    try:
        _check_parts(spec, group)
    except UsageError as error:
        raise UsageError(
            f"the run {spec.run!r} cannot be trained here: {error} (all hosts of a run have its model and data at the "
            f"same path; here one that is relative begins in {os.getcwd()})"
        ) from error


def _tell_other_run(folder: Path, spec: RunSpec) -> None:
    from dlc.train import saves

    if (other := saves.of_another_run(folder, spec)) is not None:
        path, there = other
        differ = spec.differences(there, "now", "then")
        some = "; ".join(differ[:DIFFERENCES_TOLD]) + (" ..." if len(differ) > DIFFERENCES_TOLD else "")
        _tell_left_alone(folder, path, f" ({some})")


def _tell_left_alone(folder: Path, checkpoint: Path, why: str = "") -> None:
    log.info("the checkpoint %s belongs to another run, and is left alone%s", checkpoint, why)
    if (model := folder / "model").exists():
        again = f"dlc export {shlex.quote(str(checkpoint))} --out DIR"
        log.info("at the end the model of this run takes the place of %s; `%s` writes that run's again", model, again)


def _tell_awaited(state: StateDir) -> None:
    from dlc.addressbook import AddressBook

    if awaited := AddressBook(state).awaited():
        log.info(
            "no --peers are given: looking for those that were with this peer to the last, at %s, or for them to come "
            "here; --found goes on without them, once it has waited for those of the last round (timeouts.evict_s)",
            ", ".join(awaited.values()),
        )


def join_swarm(
    args: argparse.Namespace,
    spec: RunSpec | None,
    state: StateDir,
    saved: Saved | None,
    events: queue.SimpleQueue[object],
) -> tuple[Peer, Saved | None]:
    """The peer, and the checkpoint it goes on from: `saved`, or else the newest that leads to the swarm's run."""
    from dlc.joining import OtherSpec
    from dlc.peer import Peer, Resume
    from dlc.train import saves

    def attempt(spec: RunSpec | None, saved: Saved | None) -> Peer:
        return Peer.join(
            args.peers,
            key=args.key,
            spec=spec,
            listen=args.listen,
            advertise=args.advertise,
            state_dir=KeptOpen(state),
            found=args.found,
            role=args.role,
            insecure=args.insecure,
            hold=True,
            join_timeout_s=args.join_timeout,
            resume=None if saved is None else Resume(saved.log),
            on_event=events.put,
            probe_links=not args.no_probe,
            **({} if args.history_bytes is None else {"history_bytes": args.history_bytes}),
        )

    if spec is not None or saved is None:
        try:
            return attempt(spec, saved), saved
        except OtherSpec as error:
            if args.config is None and args.rounds is not None and args.resume in (AUTO, NEVER):
                raise SpecMismatch(_rounds_alone(args.rounds, error.theirs)) from None
            raise
    try:
        return attempt(saved.spec, saved), saved
    except OtherSpec as error:
        theirs = error.theirs
        if saved.leads_to(theirs):
            return attempt(theirs, saved), saved
        if args.resume != AUTO:
            raise
    if not theirs.same_but_length(saved.spec):
        _tell_left_alone(state.path, saved.path)
    own = saves.newest(state.path, theirs)
    return attempt(None if own is None else theirs, own), own


def _rounds_alone(rounds: int, theirs: RunSpec) -> str:
    """All other options that differ are not what the user has said, and would only hide this one."""
    length = f"has rounds = {theirs.rounds}" if theirs.rounds else "has no such end"
    return (
        f"--rounds {rounds} without --config means the embedded run, and the peers have the run {theirs.run!r}, which "
        f"{length}: leave out --rounds to take part in it. To make it longer, stop all of its peers, and start one "
        "with its RUN.toml (if it has one) and --rounds first"
    )


def _train(
    args: argparse.Namespace,
    peer: Peer,
    state: StateDir,
    saved: Saved | None,
    events: queue.SimpleQueue[object],
    interrupts: Interrupts,
    group: Group | None,
) -> None:
    from transformers.utils.logging import disable_progress_bar

    from dlc.cli.sinks import JsonLines, LiveTable, LogLines, Metrics, draws
    from dlc.train.packing import TOKENS
    from dlc.train.strategy import CHANNEL
    from dlc.train.trainer import Trainer

    disable_progress_bar()  # of saving a model; it would tear the live table
    folder = state.path
    json_lines = JsonLines(muted=not args.json)
    live = not args.json and draws()
    sinks: list[Sink] = [
        json_lines,
        LogLines(steps=not live),
        Metrics(folder / "metrics", state.keep),
        *_asked_for(args, peer, folder),
    ]

    def take(event: Event) -> None:
        interrupts.can_save = interrupts.can_save or event["event"] == "synced"
        for sink in sinks:
            sink.take(event)

    try:
        _tell_start(args, peer, folder, saved, take)
        if args.fault is not None:
            from dlc.cli.fault import kill_in_round

            kill_in_round(peer, CHANNEL, args.fault, lambda: json_lines.take({"event": "phase", "phase": "reducing"}))
        trainer = Trainer(
            peer,
            folder,
            device=args.device,
            micro_batch=args.micro_batch,
            site=group,
            on_event=take,
            peer_events=events,
            resume=saved,
            cache=home() / TOKENS,
            eval_every=args.eval_every,
            checkpoint_every=args.checkpoint_every,
            keep=args.keep,
            before_write=state.keep,
        )
        if live:
            sinks.append(LiveTable(peer.members, peer.spec.exchanges, peer.spec.steps_per_round))
        summary = trainer.run(interrupts.stop)
        if summary.model is None or not summary.saved:
            raise DlcError(_not_whole(summary))
    finally:
        for sink in reversed(sinks):
            sink.close()


def _not_whole(summary: Summary) -> str:
    """What is where, after an end that could not be saved, and how to get the rest."""
    parts = ["the end was not saved whole, as the warnings above say"]
    if summary.saved:
        parts.append(f"the checkpoint {summary.checkpoint} is of the end, and the model is in it")
    elif summary.checkpoint is not None:
        parts.append(f"the newest checkpoint is {summary.checkpoint}, of before the end")
    if summary.model is not None:
        parts.append(f"the model of the end is in {summary.model}")
    elif summary.checkpoint is not None:
        parts.append(f"`dlc export {shlex.quote(str(summary.checkpoint))} --out DIR` writes its model to another disk")
    again = "goes on from it" if summary.checkpoint is not None else "begins without a checkpoint: none is here"
    return "; ".join([*parts, f"once that is mended, the same command {again}"])


def _asked_for(args: argparse.Namespace, peer: Peer, folder: Path) -> list[Sink]:
    """The sinks that options name."""
    from dlc.cli.profile import StepProfile

    sinks: list[Sink] = []
    if args.tensorboard is not None:
        sinks.append(trackers.tensorboard(args.tensorboard))
    if args.wandb is not None:
        sinks.append(trackers.wandb(args.wandb, peer.run, peer.id, peer.spec.to_dict(), folder))
    if args.profile is not None:
        folder, steps = args.profile
        sinks.append(StepProfile(folder, steps, peer.id))
    return sinks


def _tell_start(
    args: argparse.Namespace, peer: Peer, folder: Path, saved: Saved | None, take: Callable[[Event], None]
) -> None:
    line = join_line(peer.address, args.key_file, args.insecure)
    take(
        {
            "event": "started",
            "peer": peer.id,
            "address": peer.address,
            "state_dir": str(folder),
            "pid": os.getpid(),
            "run": peer.run,
            "device": args.device,
            "join": line,
        }
    )
    log.info("peer %s at %s, run %r, on %s; state in %s", peer.id[:8], peer.address, peer.run, args.device, folder)
    log.info("others join with:  %s", line)
    if saved is not None:
        _tell_resumed(peer.spec, saved)
    if args.role == TRAINER:
        _tell_doubts(peer.spec)


def _tell_doubts(spec: RunSpec) -> None:
    from dlc.train.schedules import doubts

    for sentence in doubts(spec):
        log.warning("%s", sentence)


def _tell_resumed(spec: RunSpec, saved: Saved) -> None:
    from dlc.train.schedules import changed

    log.info("going on from round %d, checkpoint %s", saved.t, saved.path)
    if differ := spec.differences(saved.spec, "now", "then"):
        log.info("the run has another length than then: %s", "; ".join(differ))
    if limit := spec.over(saved.t, saved.tokens):
        tell = log.warning if differ else log.info
        tell("the run has had its %s: to train on, raise %s in RUN.toml, on every peer", limit, limit)
        return
    for sentence in changed(saved.spec, spec, saved.t):
        log.warning("%s", sentence)


def _given_spec(args: argparse.Namespace) -> RunSpec | None:
    """The RunSpec that the options name; None if they name none."""
    if args.config is None and args.rounds is None:
        return None
    return _with_rounds(RunSpec() if args.config is None else RunSpec.from_toml(args.config), args.rounds)


def _with_rounds(spec: RunSpec, rounds: int | None) -> RunSpec:
    return spec if rounds is None else dataclasses.replace(spec, rounds=rounds)


def join_line(address: str, key: Path | None, insecure: bool) -> str:
    """What others type to join through this peer."""
    words = ["dlc", "join", "--peers", address]
    if key is not None:
        words += ["--key-file", str(key)]
    elif insecure:
        words.append("--insecure")
    return shlex.join(words)
