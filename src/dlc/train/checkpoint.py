"""Checkpoints: one safetensors file each, whole or not there at all.

Write: a temporary file beside the target, fsync, rename over the target, fsync of the folder. Whatever fails (disk
full, a kill) leaves the old file as it was. Read: the header carries the caller's meta data as JSON and a BLAKE3 of
tensors and meta data, so a file that is cut short or altered raises CheckpointError instead of training on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dlc.errors import CheckpointError, NoRoom, UsageError
from dlc.train.shelf import META, demand_room

FORMAT = 2
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write ends by where others filled the disk meanwhile, or where a quota has it."""
NOT_WRITTEN = (OSError, SafetensorError, ValueError, RuntimeError)
"""What writing a model ends by: the last two where transformers refuses it, as for a config that it takes for invalid,
or for tensors that share memory."""
READ_BYTES = 4 << 20
"""At a time, where a file is read to see whether it can be."""
READ_WRITE = 0o666
"""Of the bits of a mode, those that a file has which is no program."""
_FORMAT_KEY, _HASH_KEY = "dlc_format", "dlc_blake3"


class DamagedError(CheckpointError):
    """The file is not what was written."""


class UnreadableError(CheckpointError):
    """The file system does not let it be read: it may be whole."""


def save_checkpoint(path: str | Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write a checkpoint in place of `path`. `meta` is JSON; tensors of any device, dtype and strides.

    CheckpointError: it could not be written, and the file that was there before still is; NoRoom: for that reason.
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        text = json.dumps(meta, sort_keys=True)
    except (TypeError, ValueError) as e:
        raise UsageError(f"the meta data of {target} is not JSON: {e}") from e
    try:
        _demand_room(target, tensors.values())
        plain = _plain(tensors)
        header = {META: text, _FORMAT_KEY: str(FORMAT), _HASH_KEY: _content_hash(plain, text)}
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, temporary, header)
        _fsync(temporary)
        os.replace(temporary, target)
        _fsync(target.parent)
    except (OSError, SafetensorError) as e:
        kind = NoRoom if _tells_full(e) else CheckpointError
        raise kind(f"the checkpoint {target} could not be written ({e}); what was there is kept") from e
    finally:
        with contextlib.suppress(OSError):  # what went wrong before is what is told
            temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and meta data of a checkpoint. CheckpointError: it is none of this format; DamagedError:
    not what was written; UnreadableError: missing, or kept back by the file system."""
    target = Path(path)
    try:
        if target.is_fifo():  # whose opening waits for somebody who writes
            raise CheckpointError(f"{target} is a named pipe, and no checkpoint: move it away")
        _read_through(target)
        with safe_open(target, framework="pt", device="cpu") as f:
            header = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # safe_open is no dict
    except OSError as e:
        raise UnreadableError(f"the checkpoint {target} cannot be read ({e})") from e
    except SafetensorError as e:
        raise DamagedError(f"the checkpoint {target} cannot be read ({e})") from e
    if _FORMAT_KEY not in header:
        raise CheckpointError(f"{target} is no dlc checkpoint; if it is a part of a model folder, name that folder")
    if header[_FORMAT_KEY] != str(FORMAT):
        raise CheckpointError(f"{target} is no dlc checkpoint of format {FORMAT}")
    text = header.get(META, "")
    if _content_hash(tensors, text) != header.get(_HASH_KEY):
        raise DamagedError(f"the checkpoint {target} is damaged: its content does not match its hash")
    try:
        meta: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{target} is no dlc checkpoint: its meta data is not JSON ({e})") from e
    return tensors, meta


def _read_through(path: Path) -> None:
    """OSError: what stops it. safetensors calls all of that "No such file"; and of a disk with errors it would not come
    back: it maps the file into memory, and what cannot be read there ends the process (SIGBUS)."""
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def left_over(folder: str | Path) -> list[Path]:
    """Temporary files of a folder into which nobody is saving: ours, and those of safetensors, which writes beside the
    file that it is given too."""
    return [path for names in (".*.tmp-*", ".tmp*") for path in Path(folder).glob(names) if path.is_file()]


def save_model_folder(model: nn.Module, path: str | Path, also: Callable[[Path], object] = lambda folder: None) -> None:
    """Write a transformers model as a folder that `from_pretrained` loads, in place of what is at `path`.

    `also` writes what belongs to it, such as a tokenizer, into the folder that it is given.

    The new folder is written and synced under another name first. Between the two renames that exchange a folder there
    is an instant without `path`; a kill in it leaves the old folder whole as `.NAME.old-PID`. Where `path` is a link,
    that is done where it leads.

    CheckpointError: it could not be written, and the folder that was there before still is; NoRoom: for that reason.
    """
    target = Path(os.path.realpath(path))
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise UsageError(f"{type(model).__name__} is no transformers model; save its state_dict with save_checkpoint")
    temporary, old = _beside(target), target.with_name(f".{target.name}.old-{os.getpid()}")
    try:
        _demand_room(target, model.parameters())
        target.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        also(temporary)
        mode = temporary.stat().st_mode & READ_WRITE  # as this user's umask has it for a new folder
        for path in (*temporary.rglob("*"), temporary):  # the names in a folder are its own content
            if path.is_file():
                with contextlib.suppress(OSError):  # of a file system that keeps no modes
                    path.chmod(mode)  # safetensors lets nobody but the owner read what it writes
            _fsync(path)
        _exchange(temporary, target, old)
        _fsync(target.parent)
    except NOT_WRITTEN as e:
        kind = NoRoom if _tells_full(e) else CheckpointError
        raise kind(f"the model folder {target} could not be written ({e}); what was there is kept") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep_model_folder(path: str | Path) -> None:
    """Delete what killed processes left of `save_model_folder` beside `path`; where no model is there, the old one,
    which is whole, stays. Nobody else may be writing there."""
    target = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):  # of a disk that is gone, which is told by who writes there
        for kind in ("tmp", "old") if os.path.isdir(target) else ("tmp",):
            for rest in target.parent.glob(f".{target.name}.{kind}-*"):
                shutil.rmtree(rest, ignore_errors=True)


def _tells_full(error: Exception) -> bool:
    """safetensors and tokenizers name the number in the text only."""
    return getattr(error, "errno", None) in FULL or any(f"(os error {number})" in str(error) for number in FULL)


def _demand_room(target: Path, tensors: Iterable[Tensor]) -> None:
    demand_room(target, sum(tensor.nbytes for tensor in tensors))


def _exchange(new: Path, target: Path, old: Path) -> None:
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a killed process, which had this number too, as in a container
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
    else:
        new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path) -> Path:
    """A temporary name in the same folder: a rename is atomic only within one file system."""
    return target.with_name(f".{target.name}.tmp-{os.getpid()}")


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """CPU, contiguous, no two of one memory: what safetensors takes."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        t = tensor.detach().cpu().contiguous()
        shared = t.untyped_storage().data_ptr()
        plain[name] = t.clone() if shared in seen or t.untyped_storage().nbytes() != t.nbytes else t
        seen.add(shared)
    return plain


def _content_hash(tensors: dict[str, Tensor], meta: str) -> str:
    hasher = blake3(meta.encode(), max_threads=blake3.AUTO)
    for name in sorted(tensors):
        t = tensors[name]
        label = f"{name}\0{t.dtype}\0{tuple(t.shape)}".encode()
        hasher.update(struct.pack("<QQ", len(label), t.nbytes) + label)
        if t.numel():
            hasher.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _fsync(path: Path) -> None:
    """Force a file or folder to the disk; a folder cannot be opened on Windows, and need not be."""
    if path.is_dir() and os.name == "nt":
        return
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def bytes_tensor(data: bytes | memoryview) -> Tensor:
    """uint8 [len], without a copy where the bytes are all of an array, as an image is: nobody else may write to it. A
    copy would be made while no other thread of Python can run, which takes seconds where the model is large."""
    if isinstance(data, memoryview) and isinstance(data.obj, np.ndarray) and data.contiguous:
        if data.obj.flags.writeable and data.obj.nbytes == data.nbytes:
            return torch.from_numpy(data.obj.reshape(-1).view(np.uint8))
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
