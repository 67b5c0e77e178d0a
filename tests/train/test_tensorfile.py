"""Against the library that reads the format."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dlc.errors import CheckpointError
from dlc.train.checkpoint import save_checkpoint
from dlc.train.tensorfile import NAMES, save_file


def of_all_kinds() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 2, (7 * 3 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    made = {str(dtype): raw.view(dtype).clone() for dtype in NAMES}
    return {
        **made,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "matrix": torch.randn(3, 5),
        "odd": raw[:3],
    }


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    tensors, about = of_all_kinds(), {"text": 'ünï "quoted" \n', "": "x"}
    save_file(tensors, tmp_path / "a", about)
    read = load_file(tmp_path / "a")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape, name
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == about
    save_file({}, tmp_path / "none", {})
    assert load_file(tmp_path / "none") == {}


def test_each_tensor_lies_where_its_elements_may(tmp_path: Path) -> None:
    """So that a file that is mapped needs no copy."""
    save_file(of_all_kinds(), tmp_path / "a", {"x": "y"})
    raw = (tmp_path / "a").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert begin % 8 == 0
    for name, tensor in of_all_kinds().items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_other_threads_run_while_a_file_is_written(tmp_path: Path) -> None:
    """Here the writer waits for one in the middle: a pipe holds 64 KiB."""
    big = {"a": torch.randn(100_000)}
    save_file(big, tmp_path / "file", {})
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    thread.start()
    save_file(big, tmp_path / "pipe", {})
    thread.join(60)
    assert read == [(tmp_path / "file").read_bytes()]


def test_nobody_else_may_read_what_is_written(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a", {})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_kind_of_tensor_that_the_format_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the tensor a is torch.complex128"):
        save_checkpoint(tmp_path / "a", {"a": torch.zeros(1, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
