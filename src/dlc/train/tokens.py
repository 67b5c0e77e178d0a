"""Tokenizers: "bytes", or a fast one of `transformers` from a folder or the hub.

    bytes       token = byte; a zero byte, which text does not hold, ends a document; nothing has to be valid UTF-8
    any other   no special tokens but EOS, which ends a document; bytes that are no UTF-8 become U+FFFD, and documents
                with such bytes are counted

`transformers` is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from dlc.errors import DataError, first_line
from dlc.runspec import BYTE_VALUES, BYTES
from dlc.train.shelf import HUB_NAME, expanded
from dlc.train.sources import Piece

SEPARATOR = b"\0"

Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Turns text into token ids."""

    name: str
    vocab_size: int
    """Ids lie below it."""
    identity: bytes
    """Equal where equal text gives equal ids."""
    end: int
    """Id that ends a document."""
    words: Mapping[str, int]
    """Tokens, and their ids."""
    replaced: int
    """Documents so far that held bytes which are no UTF-8; pieces of one follow each other."""
    unknown: int
    """Tokens so far that stand for text which the tokenizer does not know."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id."""
        ...

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        """The ids of each piece, with the end of its document where that ends with it."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `transformers` needs to load it; nothing for bytes. OSError: it cannot be written."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """By the name in `data.tokenizer`. DataError: not found, not a fast one, or without an EOS token."""
    return ByteTokenizer() if name == BYTES else HubTokenizer(name)


def is_here(name: str) -> bool:
    """Whether the tokenizer of that name need not be fetched."""
    return name == BYTES or not HUB_NAME.fullmatch(name) or Path(name).is_dir()


class ByteTokenizer:
    """One token per byte."""

    def __init__(self) -> None:
        self.name, self.vocab_size, self.identity, self.replaced = BYTES, BYTE_VALUES, BYTES.encode(), 0
        self.unknown = 0
        self.end = SEPARATOR[0]
        self.words: Mapping[str, int] = {f"<0x{byte:02X}>": byte for byte in range(BYTE_VALUES)}
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        """As `Tokenizer.encode`."""
        return [np.frombuffer(piece.text + SEPARATOR if piece.last else piece.text, np.uint8) for piece in pieces]

    def save(self, folder: Path) -> None:
        """Nothing: `transformers` has no such tokenizer."""


class HubTokenizer:
    """A fast tokenizer of `transformers`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inner = _load(name)
        if not self._inner.is_fast:
            raise DataError(f"the tokenizer {name} is not a fast one; save one with a tokenizer.json")
        if self._inner.eos_token_id is None:
            raise DataError(f"the tokenizer {name} has no EOS token, which ends a document; set eos_token and save it")
        self.end = int(self._inner.eos_token_id)
        self.words: Mapping[str, int] = self._inner.get_vocab()
        self.vocab_size = max(self.words.values()) + 1
        wide = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.dtype: np.dtype[Any] = np.dtype(wide)
        told = f"{self.end}\0{self._inner.backend_tokenizer.to_str()}"
        if getattr(self._inner, "split_special_tokens", False):
            told += "\0split"  # which stands in tokenizer_config.json alone
        self.identity = blake3(told.encode()).digest()
        self.replaced = self.unknown = 0
        unk = self._inner.unk_token_id
        self._unk = None if unk == self.end else unk
        self._counted = False
        """In the document whose pieces are given now."""

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        """As `Tokenizer.encode`."""
        if not pieces:
            return []  # transformers has no answer to that
        texts = [self._text(piece) for piece in pieces]
        found = self._inner(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        if self._unk is not None:
            self.unknown += sum(ids.count(self._unk) for ids in found)
        ends = [[self.end] if piece.last else [] for piece in pieces]
        return [np.array(ids + end, self.dtype) for ids, end in zip(found, ends, strict=True)]

    def _text(self, piece: Piece) -> str:
        try:
            return piece.text.decode("utf-8")
        except UnicodeDecodeError:
            self.replaced += not self._counted
            self._counted = True
            return piece.text.decode("utf-8", errors="replace")
        finally:
            self._counted = self._counted and not piece.last

    def save(self, folder: Path) -> None:
        """As `Tokenizer.save`."""
        try:
            self._inner.save_pretrained(folder)
        except OSError:
            raise
        except Exception as e:  # all that tokenizers raises where a file cannot be written
            raise OSError(str(e)) from e


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    folder = expanded(name)
    local = folder.is_dir()
    if not local and not HUB_NAME.fullmatch(name):
        raise DataError(f"there is no tokenizer folder {folder}; give one that save_pretrained wrote, on every host")
    try:
        return AutoTokenizer.from_pretrained(folder if local else name, local_files_only=local)
    except Exception as e:  # network, hub, JSON and tokenizers have no common base
        raise DataError(
            f"the tokenizer {name!r} cannot be loaded: {first_line(e)}; give a folder with a tokenizer.json (written "
            'by save_pretrained), the name of one on the Hugging Face hub where there is a network, or "bytes"'
        ) from e
