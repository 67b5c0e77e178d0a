"""Checkpoints of a training peer: what is in one, where it lies, and which one is gone on from.

    <state dir>/checkpoints/<first 12 hex digits of the RunSpec hash>/t-00000042.safetensors

    log      the peer's log, as bytes       (Peer.checkpoint)
    image    outer state: theta, moments    (OuterState.export)
    inner.*  the inner optimizer's state, local to this peer
    residual what encoding lost of this peer's contributions; only with a codec that keeps it (Outgoing.residual)
    own.*    what a strategy keeps of this peer alone (Strategy.local). Of "diloco", where the parameters are ahead of
             theta, these: by the inner steps that an overlap had made ahead of the round, which are told with them, by
             what other fragments had no turn for yet, or by what mixing left undone
    rng.*    the random state of this peer's inner steps (rng.random_state)

The log holds the position in the data (the leases, and how far each is committed); the learning rate is a function of
the round. So one peer that goes on from a round's end trains on as if it had never stopped, bit for bit on the CPU.
Inner steps that are dropped, as on Ctrl-C, have moved the inner optimizer and the random state: what would be saved
after them does not take the place of a checkpoint of that same round that was saved before.

A checkpoint is never needed for safety: it lets a whole swarm be stopped and resumed. Runs that differ in any option
have folders of their own. A run goes on from its own checkpoints, and from those of one that differs in nothing but its
length (`runspec.LENGTH`): that is how a run gets more rounds. Of all these the round counts, whenever it was written;
so what is of a later round than the one that is saved, hence of a history that was given up, is moved away. Until then
it counts for less than all others: the one that is saved names it.

A file that is damaged is renamed, so that it takes no place of those that are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dlc.errors import CheckpointError, ConfigError
from dlc.flat import FlatView
from dlc.runspec import RunSpec
from dlc.train.checkpoint import DamagedError, UnreadableError, load_checkpoint
from dlc.train.shelf import FOLDER, files_in, files_of, meta_of, newest_first, round_of, spec_of, strays_of

log = logging.getLogger(__name__)

DAMAGED = ".damaged"
"""At the end of the name of a file that is damaged."""
NAMED_MAX = 5
"""Parameters named in an error."""
OLD, SUPERSEDED = "old", "given-up"
"""With a number, names of folders for what is set aside: what a user passed over, who alone deletes it; and what was
written by this peer until another history won while it trained."""
INNER, OWN, RESIDUAL, RNG = "inner.", "own.", "residual", "rng."


@dataclass
class Saved:
    """A checkpoint that was read back. Nothing of it changes before `let_go`."""

    path: Path
    spec: RunSpec
    t: int
    log: bytes
    image: memoryview
    inner: dict[str, Tensor]
    residual: Tensor | None
    """None: there was none to save."""
    rng: dict[str, Tensor]
    """Empty: none was saved."""
    layout: Mapping[str, str]
    """Of the parameters in the image (`FlatView.layout`)."""
    own: dict[str, Tensor] = field(default_factory=dict)
    data: str = ""
    """What its positions are of (`SameData.mine`); empty: it does not say."""
    tokens: float = 0.0
    """That were trained until then."""
    digest: bytes = b""
    """Of the image, as all peers of the run have it."""
    ahead: bool = False
    """See `Local.ahead`."""
    peer: str = ""
    """Whose it is; empty: it does not say."""

    def as_of(self, peer: str) -> Saved:
        """What `peer` goes on from. Of another one's it has neither the residual, which is owed once and by that peer,
        nor the random state, as no two draw the same."""
        if self.peer in ("", peer):
            return self
        return replace(self, residual=None, rng={}, ahead=True)

    def let_go(self) -> None:
        """What is large in it was taken: else it stayed in memory for as long as somebody holds this. With AdamW that
        is as much as its state, 8 bytes per parameter."""
        self.image, self.inner, self.residual, self.own = memoryview(b""), {}, None, {}

    def leads_to(self, spec: RunSpec) -> bool:
        """Whether a run of `spec` goes on from here: it is of that run, or of one of another length, and not past the
        end of this one. A run that is over and gets no lower limit is not begun anew: it got a longer schedule alone,
        or fewer exchanges more than its last turns were."""
        lower = _lower(spec.rounds, self.spec.rounds) or _lower(spec.tokens, self.spec.tokens)
        return spec.same_but_length(self.spec) and not (lower and spec.over(self.t, self.tokens))


def _lower(limit: int, before: int) -> bool:
    """0: there is none."""
    return limit > 0 and (before == 0 or limit < before)


@dataclass(frozen=True)
class Local:
    """What a checkpoint keeps of one peer alone."""

    inner: dict[str, Tensor]
    residual: Tensor | None = None
    rng: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    ahead: bool = False
    """It has gone on since the round, by inner steps that are in nothing else of the checkpoint."""

    def copy(self) -> Local:
        """The same on the CPU, in memory that nobody else writes to."""
        residual = self.residual.clone() if self.residual is not None else None
        return Local(_copies(self.inner), residual, _copies(self.rng), _copies(self.own), self.ahead)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the file."""
        named = {INNER + name: tensor for name, tensor in self.inner.items()}
        named.update({RNG + name: tensor for name, tensor in self.rng.items()})
        named.update({OWN + name: tensor for name, tensor in self.own.items()})
        return named if self.residual is None else {**named, RESIDUAL: self.residual}


def folder_of(state_dir: Path, spec: RunSpec) -> Path:
    """Where the checkpoints of this run lie."""
    return state_dir / FOLDER / spec.hash.hex()[:12]


def newest(state_dir: Path, spec: RunSpec | None = None) -> Saved | None:
    """The newest checkpoint that can be read and that leads to `spec`, or else of any run. Those of another version of
    dlc are logged; damaged ones are renamed, too. CheckpointError: a folder of them may not be read, or the file that
    may be the newest: a run that began anew, or went on from an older one, would have lost it."""
    _tell_strays(state_dir)
    files, unclear = files_in(state_dir), set[Path]()
    if spec is not None:
        files, unclear = _of_run(files, spec, folder_of(state_dir, spec))
    unread = 0
    for path in newest_first(files):
        try:
            saved = read(path)
        except UnreadableError as error:
            raise CheckpointError(
                f"{error}, and may be the newest of this run: let this user read it, or mend its disk; or move that "
                "file out of its folder (--resume never moves all of them), and the run goes on without it"
            ) from error
        except (CheckpointError, ConfigError) as error:
            unread += path not in unclear or isinstance(error, DamagedError)
            log.warning("%s; %s", error, _passed_over(path, error))
            continue
        if spec is None or saved.leads_to(spec):
            return saved
        log.warning(
            "%s is at or past the end of this run, which goes on from an older checkpoint, or begins anew at round 0; "
            "to go on from this one, give more rounds",
            path,
        )
    if unread:
        log.warning(
            "of %s in %s, none can be gone on from: this peer takes the state of the others, and where there are none "
            "the run begins anew at round 0",
            "1 checkpoint" if len(files) == 1 else f"{len(files)} checkpoints",
            state_dir / FOLDER,
        )
    return None


def _tell_strays(path: Path) -> None:
    """Once, where checkpoints are looked for: later nobody asks for them."""
    for stray, kind in strays_of(path).items():
        log.warning("%s is %s, and no checkpoint: it is passed over, and left alone", stray, kind)


def _of_run(files: list[Path], spec: RunSpec, own: Path) -> tuple[list[Path], set[Path]]:
    """Those of this run, of whatever length, with those that may be of it; and the latter alone: neither their headers
    tell the run, nor what lies beside them, as all of a folder are of one."""
    runs = {path: spec_of(path) for path in files}
    told = {path: there for path, there in runs.items() if there is not None}
    ours = {path for path in files if path.parent == own or (path in told and spec.same_but_length(told[path]))}
    ours |= {path for path in files if path not in told and path.parent in {of_run.parent for of_run in ours}}
    known = {path.parent for path in (*told, *ours)}
    unclear = {path for path in files if path.parent not in known and meta_of(path).get("run", spec.run) == spec.run}
    return [path for path in files if path in ours or path in unclear], unclear


def _passed_over(path: Path, error: Exception) -> str:
    """What is done with a file that could not be read, where one looks for the newest."""
    if not isinstance(error, DamagedError):
        return "it is passed over"
    try:
        path.rename(path.with_name(path.name + DAMAGED))
    except OSError as reason:
        return f"it is passed over, and cannot be renamed ({reason.strerror})"
    return f"it is passed over, and now called {path.name}{DAMAGED}"


def of_another_run(state_dir: Path, spec: RunSpec) -> tuple[Path, RunSpec] | None:
    """The newest checkpoint there with its run, where none is of this run, of whatever length."""
    runs = [(path, there) for path in newest_first(files_in(state_dir)) if (there := spec_of(path)) is not None]
    return runs[0] if runs and not any(spec.same_but_length(there) for _, there in runs) else None


def of_same_run(path: Path, spec: RunSpec) -> bool:
    """Whether the header says that it is of this run, of whatever length."""
    there = spec_of(path)
    return there is not None and spec.same_but_length(there)


def chosen(path: Path, spec: RunSpec | None) -> Saved:
    """The checkpoint `path`, or the newest in it or in its checkpoint folders if it is a folder; one that leads to
    `spec`, if given.

    CheckpointError: there is none, it cannot be read, or it leads nowhere (tells what differs).
    """
    saved = _read_newest(path)
    if spec is not None:
        demand_way(saved, spec)
    return saved


def _read_newest(path: Path) -> Saved:
    """As `chosen`. Beside a peer that trains, the file that was the newest may be gone before it is read."""
    if os.path.isdir(path):
        _tell_strays(path)
    while True:
        file, *others = files_of(path)
        older = [other for other in others if other.parent == file.parent]
        try:
            return read(file)
        except CheckpointError as error:
            if file != path and not os.path.lexists(file):
                continue
            if not older:
                raise
            raise CheckpointError(f"{error}; name an older one, such as {older[0]}") from error


def demand_way(saved: Saved, spec: RunSpec) -> None:
    """CheckpointError, with the reason, where the checkpoint does not lead to `spec`."""
    if saved.leads_to(spec):
        return
    if spec.same_but_length(saved.spec):
        raise CheckpointError(
            f"{saved.path} is at or past the end of this run: it was saved after round {saved.t} and "
            f"{saved.tokens:.0f} tokens, and the run has rounds = {spec.rounds}, tokens = {spec.tokens} (0: no limit); "
            "raise them"
        )
    fields = "\n  ".join(spec.differences(saved.spec))
    raise CheckpointError(f"{saved.path} is of another run; leave out --config and --rounds, or mend:\n  {fields}")


def set_later_aside(state_dir: Path, saved: Saved, spec: RunSpec) -> Path | None:
    """Before a run of `spec` goes on from an older checkpoint: move those of later rounds away, of whatever length that
    run was when they were written. Returns where to, if any."""
    folders = folder_of(state_dir, spec), folder_of(state_dir, saved.spec)
    return move_later(state_dir, saved.t, lambda path: path.parent in folders or of_same_run(path, spec))


def later_ones(state_dir: Path, t: int, concerned: Callable[[Path], bool]) -> list[Path]:
    """Those of these checkpoints that are of rounds after t. CheckpointError: as `shelf.files_in`."""
    return [path for path in files_in(state_dir) if round_of(path) > t and concerned(path)]


def move_later(state_dir: Path, t: int, concerned: Callable[[Path], bool], kind: str = OLD) -> Path | None:
    """Move those of these checkpoints away that are of rounds after t. Returns where to, if any."""
    later = later_ones(state_dir, t, concerned)
    if not later:
        return None
    aside = _aside(state_dir, kind)
    for path in later:
        _move(path, aside / path.parent.name / path.name)
    return aside


def set_aside(state_dir: Path) -> Path | None:
    """Move all checkpoints away, for a fresh start; returns where to, None if there were none. CheckpointError: one
    cannot be moved."""
    folders = {path.parent for path in files_in(state_dir)}
    if not folders:
        return None
    aside = _aside(state_dir, OLD)
    for folder in folders:
        _move(folder, aside / folder.name)
    return aside


def _aside(state_dir: Path, kind: str) -> Path:
    """Where they lie, on the same disk: that folder may be a link to another one, or a disk of its own."""
    return state_dir / FOLDER / f"{kind}-{max(_asides(state_dir, kind), default=0) + 1}"


def asides(state_dir: Path, kind: str) -> list[Path]:
    """The folders with what was set aside there, that of last first."""
    return [folder for _, folder in sorted(_asides(state_dir, kind).items(), reverse=True)]


def _asides(state_dir: Path, kind: str) -> dict[int, Path]:
    """By number."""
    numbered = re.compile(rf"{kind}-([1-9][0-9]{{0,8}})")
    found = ((numbered.fullmatch(path.name), path) for path in (state_dir / FOLDER).glob(f"{kind}-*"))
    return {int(match[1]): path for match, path in found if match}


def _move(path: Path, to: Path) -> None:
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(to)
    except OSError as error:
        for empty in (to.parent, to.parent.parent):
            with contextlib.suppress(OSError):  # where it is not
                empty.rmdir()
        raise CheckpointError(
            f"{path} cannot be moved out of the way, to {to} ({error.strerror}): move it away yourself"
        ) from None


def name_of(t: int) -> str:
    """File name of the checkpoint after round `t`."""
    return f"t-{t:08d}.safetensors"


def read(path: Path) -> Saved:
    """One checkpoint. CheckpointError: damaged, or none of a trainer; ConfigError: of another version of dlc."""
    tensors, meta = load_checkpoint(path)
    try:
        spec = _spec_in(meta)
        log_bytes, image = tensors["log"].numpy().tobytes(), tensors["image"].numpy().data.cast("B")
        inner, rng, layout = _below(tensors, INNER), _below(tensors, RNG), dict(meta["layout"])
        own, data, t = _below(tensors, OWN), str(meta.get("data", "")), int(meta["t"])
        residual, tokens = tensors.get(RESIDUAL), float(meta["tokens"])
        digest, ahead, peer = bytes.fromhex(meta["digest"]), bool(meta.get("ahead", False)), str(meta.get("peer", ""))
        told = (data, tokens, digest, ahead, peer)
        return Saved(path, spec, t, log_bytes, image, inner, residual, rng, layout, own, *told)
    except ConfigError as error:
        raise ConfigError(f"the checkpoint {path} is of another version of dlc: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is no checkpoint of a training peer: {error}") from error


def _spec_in(meta: Mapping[str, Any]) -> RunSpec:
    return RunSpec.from_dict(tomllib.loads(meta["spec"]))


def check_same_model(saved: Saved, view: FlatView) -> None:
    """CheckpointError, with what differs, where the checkpoint is of another model than the one at hand."""
    here, there = view.layout(), saved.layout
    if list(there.items()) == list(here.items()):
        return
    both = [name for name in here if name in there]
    differ = [f"{name} is {there[name]} there, {here[name]} here" for name in both if there[name] != here[name]]
    differ += [f"{name} is only in the checkpoint" for name in there if name not in here]
    differ += [f"{name} is only in the model" for name in here if name not in there]
    more = f" and {len(differ) - NAMED_MAX} more" if len(differ) > NAMED_MAX else ""
    what = "; ".join(differ[:NAMED_MAX]) + more if differ else "its parameters stand in another order"
    raise CheckpointError(
        f"the checkpoint {saved.path} is of another model than the one that its run names: {what}. Give the model with "
        "which the run was founded, or found another run"
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
