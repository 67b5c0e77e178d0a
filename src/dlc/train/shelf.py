"""Where checkpoint files and models lie, what a file would hold as a model, and whether a disk has room: all without
torch."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlc.errors import CheckpointError, ConfigError, NoRoom, UsageError
from dlc.runspec import RunSpec

FOLDER, NAME = "checkpoints", re.compile(r"t-([0-9]{8}|[1-9][0-9]{8,})\.safetensors")
"""Folder and names of a trainer's checkpoints; what else somebody keeps beside them is not the trainer's."""
RUN_FOLDER = re.compile(r"[0-9a-f]{12}")
"""Name of the folder of one run."""
META = "dlc_meta"
"""The caller's meta data, as JSON, in the header of a file."""
ID, GIVEN_UP = "id", "given_up"
"""In the meta data of a trainer's checkpoint: what names it and no other, and the names of those whose history was
given up when it was written."""
HEADER_BYTES_MAX = 100 << 20
"""As the format has it."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What can be a name on the hub; everything else is a path."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A model folder with one of them is not of bytes, though its tokenizer may turn out to be of no use here."""
NO_FILES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
"""What may have the name of a checkpoint all the same."""
WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def expanded(path: str | Path) -> Path:
    """With the home folder for ~; what is no user's, such as ~nobody-of-this-name, stays, where pathlib would raise."""
    return Path(os.path.expanduser(path))


def list_checkpoints(folder: str | Path, pattern: str = "*.safetensors") -> list[Path]:
    """Checkpoints of a folder by name, oldest first: write the step into the name with leading zeros."""
    return sorted(p for p in Path(folder).glob(pattern) if not p.name.startswith("."))


def round_of(file: Path) -> int:
    """After which a trainer wrote a checkpoint of that name."""
    return int(file.name.partition(".")[0].removeprefix("t-"))


def files_in(state_dir: Path) -> list[Path]:
    """All of a trainer's checkpoints there. CheckpointError: they may not be read, which must not be taken for none."""
    return [path for path in _of_runs(state_dir / FOLDER) if not no_file(path)]


def strays_of(path: Path) -> dict[Path, str]:
    """What has the name of a checkpoint in the folder `path` or its checkpoint folders and is no file, with what it is.
    It counts for nothing, and is left alone. CheckpointError: as `files_in`."""
    return {found: kind for found in _named(path) if (kind := no_file(found)) and os.path.lexists(found)}


def no_file(path: Path) -> str:
    """What it is where it is no file, nor a link to one; empty where it is one, or may be."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere"
    except OSError as error:
        return "a link that leads in a circle" if error.errno == errno.ELOOP else ""
    return "" if stat.S_ISREG(mode) else NO_FILES.get(stat.S_IFMT(mode), "no file")


def _of_runs(checkpoints: Path) -> list[Path]:
    """Those in the folders in it, one for each run. CheckpointError: as `files_in`."""
    files: list[Path] = []
    for folder in _listed(checkpoints):
        if RUN_FOLDER.fullmatch(folder.name):
            files += _of_one_run(folder)
        else:
            there = list_checkpoints(folder)  # lost+found may stay shut
            files += [path for path in there if NAME.fullmatch(path.name)]
    return files


def _of_one_run(folder: Path) -> list[Path]:
    return [file for file in _listed(folder) if NAME.fullmatch(file.name)]


def _listed(folder: Path) -> list[Path]:
    """What lies in it; nothing where it is no folder. A glob passes over what may not be read."""
    try:
        return [folder / name for name in os.listdir(os.path.join(folder, os.curdir))]  # the dot: it may be searched
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_symlink():
            return []
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read: it is a link to {os.readlink(folder)}, where no folder is; "
            "mount the disk that it is on, make that folder, or remove the link"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read ({error.strerror}): let this user read that folder, or name "
            "another state directory"
        ) from None


def file_of(path: Path) -> Path:
    """The file `path`, or the newest in it or in its checkpoint folders if it is a folder. CheckpointError: none, or
    some may not be read: the newest may be among them."""
    return files_of(path)[0]


def files_of(path: Path) -> list[Path]:
    """As `file_of`, with the older ones after it, newest first."""
    try:
        is_folder = path.is_dir()
        path.stat()
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror}") from None
    if not is_folder:
        return [path]
    found = [file for file in _named(path) if not no_file(file)]
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {path}; name a file, the folder of one run, or a peer's state directory: a "
            "peer writes its first one after --checkpoint-every rounds, or as it leaves"
        )
    return newest_first(found)


def _named(path: Path) -> list[Path]:
    """What has the name of a checkpoint in the folder `path`, or in its checkpoint folders."""
    return [*_of_one_run(path), *_of_runs(path), *_of_runs(path / FOLDER)]


def model_folder(name: str | Path) -> Path | None:
    """The folder of the model `name`; None: it is a string that can be a name on the hub, and nothing lies there.

    UsageError: there is no such folder, or no model in it.
    """
    folder = expanded(name)
    if not (isinstance(name, Path) or os.path.exists(folder)) and HUB_NAME.fullmatch(name):
        return None
    if not folder.is_dir():
        raise UsageError(f"no model folder at {folder}; give a folder written by save_pretrained")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; give a folder written by save_pretrained")
    return folder


def has_tokenizer(folder: Path) -> bool:
    """Whether the model in that folder is not of bytes, though its tokenizer may turn out to be of no use here."""
    return any((expanded(folder) / name).is_file() for name in TOKENIZER_FILES)


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """The run that was written to last comes first. Within one run, of whatever length it was from time to time, the
    round in the name counts, not the clock, which may jump; and a copy may have been written in any order. What another
    one names as given up comes after all the others: whoever wrote that was killed before it could move it away."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    runs: list[tuple[RunSpec | None, list[Path]]] = []
    for files in folders.values():
        spec = next((spec for file in files if (spec := spec_of(file)) is not None), None)
        same = [known for run, known in runs if spec is not None and run is not None and spec.same_but_length(run)]
        if same:
            same[0].extend(files)
        else:
            runs.append((spec, files))
    times = {path: _written_ns(path) for _, files in runs for path in files}
    by_time = sorted((files for _, files in runs), key=lambda files: max(times[file] for file in files), reverse=True)
    return [path for files in by_time for path in _latest_first(files, times)]


def _latest_first(files: list[Path], times: dict[Path, int]) -> list[Path]:
    """Those of one run."""
    metas = {file: meta_of(file) for file in files}
    named = (meta.get(GIVEN_UP) for meta in metas.values())  # of headers that nobody has checked
    given_up = {name for names in named if isinstance(names, list) for name in names if isinstance(name, str)}

    def rank(file: Path) -> tuple[bool, int, int]:
        return str(metas[file].get(ID)) not in given_up, round_of(file), times[file]

    return sorted(files, key=rank, reverse=True)


def _written_ns(path: Path) -> int:
    """When; 0 where it is gone, as the older ones of a peer that trains may be at any moment, or is a link that leads
    nowhere."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def spec_of(file: Path) -> RunSpec | None:
    """The run that a checkpoint is of, by its header alone: the whole may be large. None: it does not say."""
    try:
        return RunSpec.from_dict(tomllib.loads(meta_of(file)["spec"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, ConfigError):
        return None


def model_bytes(file: Path) -> int:
    """Of the parameters in a checkpoint, from its header alone; 0 where that does not say, for the reader to tell."""
    try:
        layout = dict(meta_of(file)["layout"])
        return sum(_tensor_bytes(text) for text in layout.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0


def meta_of(file: Path) -> dict[str, Any]:
    """The caller's meta data in the header of a file, not checked against its hash; empty where there is none."""
    try:
        if file.is_fifo():  # whose opening waits for somebody who writes
            return {}
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, HEADER_BYTES_MAX)))
        return dict(json.loads(header["__metadata__"][META]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        return {}


def _tensor_bytes(text: str) -> int:
    """Of a layout such as "float32 256x128"."""
    dtype, _, shape = text.partition(" ")
    return WIDTHS.get(dtype, 0) * (1 if shape == "scalar" else math.prod(map(int, shape.split("x"))))


def demand_room(target: Path, needed: int) -> None:
    """NoRoom: the disk of `target` cannot take so many bytes, so that it need not be filled to find out."""
    free = free_bytes(next(folder for folder in (target, *target.absolute().parents) if os.path.isdir(folder)))
    if free is not None and free < needed:
        raise NoRoom(
            f"{target} could not be written: it takes {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB "
            "free; what was there is kept"
        )


def demand_place(option: str, path: Path, folder: Path) -> None:
    """UsageError: nothing can be made in `folder`, or, where it is missing, in that in which it would be made. So no
    work is done in vain for what an option puts at `path`. Nothing is left behind."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.exists(p))
    try:
        takes_files(there)
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written: nothing can be made in {there} ({error.strerror or error}); name "
            "another place"
        ) from None


def takes_files(folder: Path) -> None:
    """OSError: no file can be made in it. What permissions say is not all: the disk may be read-only, or of no files.
    None is left behind."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def free_bytes(folder: Path) -> int | None:
    """On its disk, with what only root may use; None where the file system does not tell."""
    if sys.platform == "win32":
        return shutil.disk_usage(folder).free
    disk = os.statvfs(folder)
    return disk.f_bfree * disk.f_frsize if disk.f_blocks else None
