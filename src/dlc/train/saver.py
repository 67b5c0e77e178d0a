"""The thread that writes the checkpoints of a training peer (`saves.py`), and what makes room for them.

What a killed process was writing goes first, then a new checkpoint is written, then the oldest goes, and of the files
that turned out damaged all but the newest. Where the disk has no room for a new one, or for the model at the end, the
oldest go first, but never the newest that is known to be whole. Writing may fail all the same: that is logged, what is
there stays, and training goes on. What is of a history that was given up meanwhile is set aside, and stays for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dlc.errors import CheckpointError, NoRoom, UsageError
from dlc.runspec import RunSpec
from dlc.train.checkpoint import bytes_tensor, left_over, save_checkpoint
from dlc.train.recurring import Recurring
from dlc.train.saves import (
    DAMAGED,
    OLD,
    SUPERSEDED,
    Local,
    Saved,
    asides,
    folder_of,
    later_ones,
    move_later,
    name_of,
    of_same_run,
)
from dlc.train.shelf import FOLDER, GIVEN_UP, ID, NAME, RUN_FOLDER, files_in, meta_of, newest_first, round_of
from dlc.train.swarm import Frozen

log = logging.getLogger(__name__)

KEPT = 2
"""The newest, and the one before it in case the newest turns out damaged."""
DAMAGED_KEPT = 1
"""The newest, to see what became of it: a disk that damages one file will damage more."""
SUPERSEDED_KEPT = 2
"""Times that another history won while a peer trained, of which what it had written until then stays: each time leaves
a few checkpoints, and a network that is cut now and then would fill the disk."""


class Saver:
    """Writes checkpoints of one run, one at a time, in a thread beside the training.

    resumed: the one that the training goes on from.
    before_write: sees that the state directory still is this peer's; UsageError: nothing may be written.
    """

    def __init__(
        self,
        state_dir: Path,
        spec: RunSpec,
        layout: Mapping[str, str],
        kept: int = KEPT,
        data: str = "",
        resumed: Saved | None = None,
        peer: str = "",
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        if kept < 1:
            raise UsageError(f"at least one checkpoint must be kept, not {kept}")
        self._state_dir, self._spec, self._kept, self._before_write = state_dir, spec, kept, before_write
        self._folder = folder_of(state_dir, spec)
        self._layout, self._data, self._peer = list(layout.items()), data, peer
        self._thread: threading.Thread | None = None
        self.last = resumed.path if resumed is not None else None
        """The newest one that is whole on disk."""
        self._exact = (resumed.t, resumed.digest) if resumed is not None and not resumed.ahead else None
        """Round and digest of that one, if all of it is of that round."""
        self._begun = False
        """One was written; what is of later rounds before that was there when this peer began."""
        self._unwritten, self._uncleared, self._undeleted = Recurring(), Recurring(), Recurring()

    @property
    def busy(self) -> bool:
        """Whether the last `start` is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, frozen: Frozen, local: Local) -> None:
        """Write in the background. `local` is copied here and now, since the next step or round changes it."""
        self.finish()
        self._thread = threading.Thread(target=self.save, args=(frozen, local.copy(), True), name="dlc-saver")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the background write."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def save(self, frozen: Frozen, local: Local, beside: bool = False) -> Path | None:
        """Write now; None, with a warning in the log, if that failed. beside: the training, which goes on to the next
        one: where that fails, too, and so on, only some of the times are told, and the end of it."""
        if local.ahead and self._exact == (frozen.t, frozen.digest) and self._is_here(self.last):
            log.info("the checkpoint %s stays as it is: the inner steps since that round are dropped", self.last)
            return self.last
        path = self._folder / name_of(frozen.t)
        try:
            self._before_write()
        except UsageError as error:
            self._failed(error, f"{path} could not be written: {error}", beside)
            return None
        self._sweep()
        tensors = {"log": bytes_tensor(frozen.log), "image": bytes_tensor(frozen.image), **local.tensors()}
        meta = {
            "spec": self._spec.to_toml(),
            "run": self._spec.run,
            "t": frozen.t,
            "tokens": frozen.tokens,
            "digest": frozen.digest.hex(),
            "layout": self._layout,
            "data": self._data,
            "ahead": local.ahead,
            "peer": self._peer,
            ID: secrets.token_hex(8),
            GIVEN_UP: self._given_up(frozen.t),
        }
        try:
            self.with_room(path, lambda: save_checkpoint(path, tensors, meta))
        except (CheckpointError, OSError) as error:
            self._failed(error, str(error), beside)
            return None
        if self._unwritten.passed():
            log.info("checkpoints are written again: %s", path)
        self.last, self._exact = path, None if local.ahead else (frozen.t, frozen.digest)
        try:
            kind, self._begun = SUPERSEDED if self._begun else OLD, True
            if (aside := move_later(self._state_dir, frozen.t, self._of_this_run, kind)) is not None:
                log.info("checkpoints of later rounds, which are of a history that was given up, are now in %s", aside)
            others = self._others(path)
            damaged = _damaged_in({self._folder, *(other.parent for other in others)})
            for old in [*others[self._kept - 1 :], *self._left_over(), *damaged[DAMAGED_KEPT:]]:
                old.unlink(missing_ok=True)
            self._clear_superseded()
            self._uncleared.passed()
        except (CheckpointError, OSError) as error:
            if (how_often := self._uncleared.came(error)) is not None:
                log.warning("%s is written, but older ones are not cleared away: %s%s", path, error, how_often)
        return path

    def _failed(self, error: Exception, why: str, beside: bool) -> None:
        how_often = self._unwritten.came(error)
        if how_often is not None or not beside:
            log.warning("%s%s%s", why, "; training goes on" if beside else "", how_often or "")

    def _is_here(self, path: Path | None) -> bool:
        """Whether it is there, and in the state directory, or where a link of that leads: one may go on from another
        peer's."""
        if path is None or not os.path.exists(path):  # where pathlib raises if the disk is gone
            return False
        folder, own = path.parent.resolve(), (self._state_dir, self._state_dir / FOLDER, self._folder)
        return any(folder.is_relative_to(place.resolve()) for place in own)

    def _given_up(self, t: int) -> list[str]:
        """Those of later rounds are of a history that was given up: nobody must prefer them, after a kill either."""
        try:
            later = later_ones(self._state_dir, t, self._of_this_run)
        except CheckpointError:  # which is told once this one is written
            return []
        return [told for path in later if (told := meta_of(path).get(ID))]

    def with_room(self, path: Path, write: Callable[[], None]) -> None:
        """Write `path`, by `write`; where the disk is too full for it, the oldest checkpoints of this run go first, and
        never the newest that is whole. What `write` raises; NoRoom: they were not enough."""
        while True:
            try:
                return write()
            except NoRoom as error:
                if not self._make_room(path):
                    raise NoRoom(f"{error}{self._to_delete()}") from error

    def _to_delete(self) -> str:
        """For people, where the disk is full: only they know whether what was set aside is of use."""
        kinds = [kind for kind in (OLD, SUPERSEDED) if asides(self._state_dir, kind)]
        named = " and ".join(f"{self._folder.parent / kind}-*" for kind in kinds)
        return f"; what was set aside in {named} may be deleted" if kinds else ""

    def _make_room(self, path: Path) -> bool:
        """Delete what is needed least of this run, if there is such a thing, and it can be."""
        spare = [*self._left_over(), *reversed(_damaged_in({self._folder}))]
        if self.last is not None and os.path.exists(self.last):
            others = self._others(self.last)
            if not self._is_here(self.last):  # another's, who may delete it: one of ours stays
                others = others[1:]
            spare += reversed(others)
        if not spare:
            return False
        try:
            spare[0].unlink(missing_ok=True)
        except OSError as error:
            if (how_often := self._undeleted.came(error)) is not None:
                log.warning("%s cannot be deleted (%s)%s", spare[0], error.strerror, how_often)
            return False
        self._undeleted.passed()
        log.info("the disk has no room for %s: %s was deleted for it", path, spare[0])
        return True

    def _others(self, one: Path) -> list[Path]:
        """The other checkpoints of this run, newest first; without copies in other folders, which are somebody's."""
        here = os.path.realpath(one)  # which a link that leads in a circle has, too
        found = [path for path in files_in(self._state_dir) if RUN_FOLDER.fullmatch(path.parent.name)]
        return newest_first(path for path in found if os.path.realpath(path) != here and self._of_this_run(path))

    def _clear_superseded(self) -> None:
        """Of the histories of this run that were given up, delete what is left of all but the last."""
        kept = 0
        for folder in asides(self._state_dir, SUPERSEDED):
            named = [path for path in folder.glob("*/*") if NAME.fullmatch(path.name)]
            ours = [path for path in named if path.parent.name == self._folder.name or of_same_run(path, self._spec)]
            kept += bool(ours)
            if kept <= SUPERSEDED_KEPT:
                continue
            for path in ours:
                path.unlink(missing_ok=True)
            for empty in (*{path.parent for path in ours}, folder):
                with contextlib.suppress(OSError):  # where something else is in it
                    empty.rmdir()

    def _sweep(self) -> None:
        """Before anything is written: a process that is killed in each of its saves would fill the disk."""
        with contextlib.suppress(OSError):  # which is told once this one is written
            for rest in self._left_over():
                rest.unlink(missing_ok=True)

    def _left_over(self) -> list[Path]:
        """What a killed process was writing, in the folders of runs: another folder beside them is somebody's."""
        folders = (path for path in self._folder.parent.glob("*") if RUN_FOLDER.fullmatch(path.name))
        return [path for folder in folders for path in left_over(folder)]

    def _of_this_run(self, path: Path) -> bool:
        """Whatever its length was; also where it is past the end of this run, so that of all the latest round is what
        was made last."""
        return path.parent == self._folder or of_same_run(path, self._spec)


def _damaged_in(folders: Iterable[Path]) -> list[Path]:
    """The files there that turned out damaged, newest first: that of the last round."""
    found = [path for folder in folders for path in folder.glob("*" + DAMAGED) if path.is_file()]
    named = [path for path in found if NAME.fullmatch(path.name.removesuffix(DAMAGED))]
    return sorted(named, key=round_of, reverse=True)
