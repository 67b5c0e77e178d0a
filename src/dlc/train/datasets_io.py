"""Text from `datasets` (https://github.com/huggingface/datasets): map-style ones row by row, and streams in shards.

    "datasets:NAME"    what `load_dataset(NAME, subset, split=...)` gives: the name of one on the hub, or a folder
    a folder           that `save_to_disk` wrote: a dataset, or a dict of which `split` is taken

A *stream* is divided into S shards by `split_dataset_by_node`: each has whole files where the number of files is a
multiple of S, else one in S of the rows. `datasets` is imported on first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from dlc.errors import DataError, first_line
from dlc.train.shelf import expanded
from dlc.train.sources import (
    DATASETS,
    Piece,
    Place,
    as_pattern,
    check_used,
    cut,
    hash_file,
    list_files,
    parquet_options,
    rows_of,
    text_of,
)

log = logging.getLogger(__name__)


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_dataset(place: Place) -> bool:
    """Whether `datasets` has to load it, rather than files being read."""
    return place.source.startswith(DATASETS) or is_saved(expanded(place.source))


class Rows:
    """The rows of a map-style dataset as documents; a row's name is its number."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._rows = _saved(place) if not place.source.startswith(DATASETS) else _load(place, streaming=False)

    def pieces(self) -> Iterator[Piece]:
        """As `Documents.pieces`."""
        field, source = self._place.text_field, self._place.source
        number = -1
        try:
            for number, row in enumerate(_only(self._rows, field)):
                text = text_of(row, field, source, f"row {number}")
                if text is not None:
                    yield from cut(str(number), text)
        except DataError:
            raise
        except Exception as e:  # pyarrow and datasets have no common base
            at = "from its first row on" if number < 0 else f"after row {number}"
            raise DataError(f"{source} cannot be read {at}: {type(e).__name__}: {e}") from e

    def content_hash(self) -> bytes:
        """As `Documents.content_hash`: BLAKE3 of the Arrow files; and of the fingerprint, that tells parts of the same
        files apart, but need not follow the rows."""
        told = f"{self._rows._fingerprint}\0{len(self._rows)}\0{self._place.text_field}\0"
        hasher = blake3(told.encode(), max_threads=blake3.AUTO)
        for path in _arrow_files(self._rows):
            hash_file(hasher, path)
        return hasher.digest()


class Stream:
    """A dataset, or jsonl, parquet or text files, read as they come, in `shards` parts.

    Of jsonl files each row is a line, as "text", to be read by `line_text`: `datasets` gives up where one is torn.
    """

    def __init__(self, place: Place, shards: int) -> None:
        self.place, self.shards = place, shards
        self._whole, self.content, written, self.lines, self.empty = _stream(place, shards)
        """`content`: the same for all copies of the same data, and another if it shrinks or grows, as far as that can
        be told without reading it; `empty`: files without a byte."""
        version = _datasets(place).__version__
        self.identity = blake3(f"{place}\0{self.content}\0{written}\0{version}".encode()).digest()
        """Changes with the files or the dataset here, likewise, and with the release of `datasets`: another one may not
        know what a `state_dict` of this one says, or take it for another place."""
        self._changed = False

    @property
    def by_rows(self) -> bool:
        """Shard s is of the rows s, s + `shards`, ..., for each of which all are read; else it is of whole files."""
        n_files = int(getattr(self._whole, "num_shards", 0) or self._whole.n_shards)  # the name before datasets 3.2
        return n_files % self.shards != 0

    def rows(self) -> Iterator[Any]:
        """Those of all shards, in the order of the source."""
        return iter(self._whole)

    def shard(self, s: int) -> Any:
        """Shard s as an `IterableDataset` of its own: its `state_dict` says where it is read on."""
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self._whole, rank=s, world_size=self.shards)

    def check_files(self) -> None:
        """Tell, once, where files came, went, or have another size than when the stream was opened. Of the hub, and of
        what `save_to_disk` wrote, nothing is known."""
        if self._changed or is_dataset(self.place):
            return
        try:
            sizes, _ = _told(path for _, path in list_files(self.place.source))
        except (DataError, OSError):  # what came is none to be read, or they are just going
            sizes = "other"
        self._changed = self.content.partition(" ")[2] != sizes
        if self._changed:
            log.warning(
                "files of %s came, went or changed while they were read: a position may hold other text here than at "
                "other peers. Where all are to have the same, stop the peers, and start them again with the same files",
                self.place.source,
            )


def _stream(place: Place, shards: int) -> tuple[Any, str, str, bool, list[str]]:
    """The whole of it, what is known of its content, when that was written, whether its rows are lines of jsonl, and
    which of its files are empty."""
    if place.source.startswith(DATASETS):
        return _load(place, streaming=True), *_origin(place), False, []
    if is_saved(expanded(place.source)):
        rows = _saved(place)
        sizes, written = _told(_arrow_files(rows))
        whole = _only(rows, place.text_field).to_iterable_dataset(num_shards=max(1, min(shards, len(rows))))
        return whole, f"{rows._fingerprint} {sizes}", written, False, []
    named = list_files(place.source)
    paths = [path for _, path in named]
    check_used(place, paths)
    kinds = {{".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix.lower(), "text") for path in paths}
    if len(kinds) > 1:
        raise DataError(
            f"{place.source} holds files of several kinds ({', '.join(sorted(kinds))}): a stream needs one kind; "
            "name a folder with one, or set data.streaming = false"
        )
    kind, read = kinds.pop(), paths
    builder, reading = kind, dict[str, Any]()
    if kind == "parquet":
        # Looked at now: what is wrong with the last file would end all trainers when they have trained for long.
        read = [path for path in paths if rows_of(path, place.text_field)]
        if not read:
            raise DataError(f"{place.source} holds no row; give a source with text in it")
        reading = parquet_options(place.text_field)
    else:
        # Bytes that are no UTF-8 become U+FFFD: an error would come when all have trained for long.
        builder, reading = "text", {"encoding": "utf-8", "encoding_errors": "replace"}
        reading["sample_by"] = "line" if kind == "jsonl" else "document"
    files = [as_pattern(path) for path in read]
    sizes, written = _told(paths)
    load = _datasets(place).load_dataset
    rows = _called(place, load, builder, data_files=files, split="train", streaming=True, **reading)
    empty = [name for name, path in named if not path.stat().st_size]
    return rows, f"{builder} {sizes}", written, kind == "jsonl", empty


def _told(paths: Iterable[Path]) -> tuple[str, str]:
    """The sizes of files, and when they were written."""
    found = [path.stat() for path in paths]
    return " ".join(str(s.st_size) for s in found), " ".join(str(s.st_mtime_ns) for s in found)


def _arrow_files(rows: Any) -> list[Path]:
    """Of a map-style dataset, in their order."""
    return [Path(file["filename"]) for file in rows.cache_files]


def _origin(place: Place) -> tuple[str, str]:
    """What is known of the files of "datasets:NAME": their sizes, or their commit on the hub; and their ETags, or when
    they were written."""
    load = _datasets(place).load_dataset_builder
    builder = _called(place, load, place.source.removeprefix(DATASETS), place.subset or None)
    files = (builder.config.data_files or {}).get(place.split)
    if files is None:
        return "", ""  # made by a builder, or read from its cache
    commits = sorted({" ".join(origin) for origin in files.origin_metadata if len(origin) > 1})
    sizes, _ = _told(path for path in map(Path, files) if path.is_file())
    return " ".join([*commits, sizes]), str(files.origin_metadata)


def _load(place: Place, streaming: bool) -> Any:
    name, load = place.source.removeprefix(DATASETS), _datasets(place).load_dataset
    how = {"streaming": True} if streaming else {"streaming": False, "keep_in_memory": False}
    return _called(place, load, name, place.subset or None, split=place.split, **how)


def _called(place: Place, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return load(*args, **options)
    except Exception as e:  # network, hub, pyarrow and datasets have no common base
        raise DataError(
            f"datasets cannot load {place.source}: {first_line(e)}; without a network give a folder written by "
            "save_to_disk, or local files"
        ) from e


def _saved(place: Place) -> Any:
    datasets = _datasets(place)
    try:
        found = datasets.load_from_disk(str(expanded(place.source)), keep_in_memory=False)
    except Exception as e:  # as above
        raise DataError(f"datasets cannot read {place.source}: {first_line(e)}") from e
    if not isinstance(found, datasets.DatasetDict):
        if place.split not in (Place.split, str(found.split)):
            raise DataError(f"{place.source} is one dataset, without a split {place.split!r}: leave out data.split")
        return _plain(found)
    if place.split not in found:
        raise DataError(f"{place.source} has no split {place.split!r} (found: {', '.join(found)}); set data.split")
    return _plain(found[place.split])


def _plain(rows: Any) -> Any:
    """The rows as Python objects with all their columns, whatever format was set when they were saved."""
    told = rows.format
    return rows if told["type"] is None and told["columns"] == rows.column_names else rows.with_format(None)


def _only(rows: Any, field: str) -> Any:
    """Without the other columns, which would be read and decoded for nothing; as they are where there is no such
    column, which the first row tells."""
    return rows.select_columns([field]) if field in rows.column_names else rows


def _datasets(place: Place) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise DataError(f"reading {place.source} needs the package datasets, which cannot be imported: {e}") from e
    return datasets
