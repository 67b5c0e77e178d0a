"""`dlc eval`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dlc.cli.interrupt import Interrupts
from dlc.cli.places import home
from dlc.errors import UsageError
from dlc.runspec import BYTES, STDLIB, DataSpec
from dlc.train.shelf import HUB_NAME, expanded
from dlc.train.sources import demand_source

if TYPE_CHECKING:
    from torch import Tensor

    from dlc.train.data import Blocks, BlockSource
    from dlc.train.restored import Restored
    from dlc.train.tokens import Tokenizer

log = logging.getLogger(__name__)

SEQ_LEN = 1024
"""Of a model that no run tells it of; less where the model takes less."""
TELL_EVERY_S = 10.0
"""Between two lines of the log while blocks are measured."""


@dataclass(frozen=True)
class Evaluation:
    """What is printed."""

    model: str
    t: int | None
    """The round after which the model was saved; None where it is no checkpoint."""
    source: str
    part: str
    """"validation": what is held out of the source; "all"."""
    tokenizer: str
    blocks: int
    seq_len: int
    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float
    """Of the text, so that models with other tokenizers can be compared."""


def evaluate_model(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """The whole command; returns its exit status."""
    if not args.blocks or not args.batch_size:
        raise UsageError("--blocks and --batch-size must be at least 1")
    data = _given_data(args)
    try:
        os.stat(expanded(args.model))
    except (FileNotFoundError, NotADirectoryError):
        if not HUB_NAME.fullmatch(args.model):
            raise UsageError(f"there is no checkpoint, state directory or model folder {args.model}") from None
        log.info(
            "there is no file or folder %s here: the Hugging Face hub is asked for a model of that name", args.model
        )
    except OSError as error:
        raise UsageError(f"{args.model} cannot be read: {error.strerror or error}") from None

    from transformers.utils.logging import disable_progress_bar

    from dlc.train.inner import evaluate
    from dlc.train.restored import restore
    from dlc.train.setup import check_vocabulary, pick_device, tell_other_words
    from dlc.train.tokens import is_here, load_tokenizer

    disable_progress_bar()
    device = pick_device(args.device)
    restored = restore(args.model)
    tokenizer = load_tokenizer(args.tokenizer or _own_tokenizer(restored))
    check_vocabulary(restored.model, tokenizer)
    known = restored.spec is not None or restored.tokenizer != BYTES  # else nobody says what it was trained with
    if known and is_here(restored.tokenizer):
        tell_other_words(restored.origin, restored.tokenizer, tokenizer)
    seq_len = _seq_len(args.seq_len, restored)
    interrupts.holds = True  # tokens that are half written
    text = _text(args, data, restored, tokenizer, seq_len)
    n_blocks = sum(len(batch) for batch in text.batches)
    loss = evaluate(restored.model.to(device), text.batches, device, _telling(n_blocks))
    found = Evaluation(
        model=restored.origin,
        t=restored.t,
        source=text.source,
        part=text.part,
        tokenizer=tokenizer.name,
        blocks=n_blocks,
        seq_len=seq_len,
        loss=loss,
        perplexity=math.inf if loss >= 700 else math.exp(loss),
        bits_per_byte=loss / math.log(2) / text.bytes_per_token,
    )
    print(_json(found) if args.json else _table(found), flush=True)
    return 0


def _telling(n_blocks: int) -> Callable[[int], None]:
    """Says how many blocks are measured, where that takes long."""
    said_at = time.monotonic()

    def after(done: int) -> None:
        nonlocal said_at
        if done < n_blocks and time.monotonic() - said_at >= TELL_EVERY_S:
            said_at = time.monotonic()
            log.info("%d of %d blocks are measured", done, n_blocks)

    return after


@dataclass(frozen=True)
class _Text:
    source: str
    part: str
    batches: list[Tensor]
    bytes_per_token: float


def _given_data(args: argparse.Namespace) -> DataSpec | None:
    """The text that the options name, checked as that of a RUN.toml is; None: they name none."""
    named = {name: value for name in ("subset", "split", "text_field") if (value := getattr(args, name)) is not None}
    if args.source is not None:
        data = DataSpec(args.source, **named)
        demand_source(args.source)
        return data
    for name in named:
        raise UsageError(f"--{name.replace('_', '-')} says what is read of a --source, and none is given")
    return None


def _text(
    args: argparse.Namespace, data: DataSpec | None, restored: Restored, tokenizer: Tokenizer, seq_len: int
) -> _Text:
    from dlc.train.data import BlockSource, WholeText, blocks_of, place_of
    from dlc.train.packing import TOKENS
    from dlc.train.samedata import told_of
    from dlc.train.sources import Place

    cache = home() / TOKENS
    if data is not None:
        place = Place(data.source, data.subset, data.split, data.text_field)
        whole = WholeText(place, seq_len, tokenizer, cache)
        return _Text(data.source, "all", whole.batches(args.batch_size, args.blocks), whole.bytes_per_token)
    spec = restored.spec
    if spec is None:
        held = blocks_of(Place(STDLIB), seq_len, tokenizer, cache=cache)
    else:
        trained = spec.data

        def cut(length: int) -> Blocks:
            return blocks_of(
                place_of(spec),
                length,
                tokenizer,
                shards=trained.shards if trained.streaming else 0,
                segment_blocks=spec.blocks_per_lease,
                split_seq_len=trained.seq_len,
                cache=cache,
            )

        held = cut(seq_len)
        if restored.data and tokenizer.name == restored.tokenizer:  # with another tokenizer, there is none to compare
            as_trained = held if not trained.streaming or seq_len == trained.seq_len else cut(trained.seq_len)
            if told_of(as_trained.fingerprint()) != restored.data:
                log.warning(
                    "the data at %s is not what it was when %s was written (files came, went, or changed; or the "
                    "tokenizer did): what is measured as validation may be text that the model was trained on",
                    trained.source,
                    restored.origin,
                )
        elif tokenizer.name != restored.tokenizer and isinstance(held, BlockSource) and _may_differ(held):
            log.warning(
                "with the tokenizer %s, what %s holds out for validation begins at another place than it did in the "
                "run, or is of other texts: what is measured may be text that the model was trained on",
                tokenizer.name,
                trained.source,
            )
    named = spec.data.source if spec is not None else STDLIB
    batches = held.validation_batches(args.batch_size, args.blocks)
    return _Text(named, "validation", batches, held.bytes_per_token)


def _may_differ(held: BlockSource) -> bool:
    """Whether a run with another tokenizer may have held out other text: it cut a single text, or those that are held
    out here, in two, as the others made no block for it; which is hardly so where they are more."""
    return not held.whole_texts or held.n_blocks < held.n_validation_blocks


def _own_tokenizer(restored: Restored) -> str:
    """UsageError: a model folder has none, and was hardly trained on bytes: what is printed would be of no meaning."""
    from dlc.train.model import vocab_of
    from dlc.train.setup import BYTE_ROWS_MAX

    rows = vocab_of(restored.model)
    if restored.spec is None and restored.tokenizer == BYTES and rows is not None and rows > BYTE_ROWS_MAX:
        raise UsageError(
            f"{restored.origin} has no tokenizer, and a vocabulary of {rows}: give --tokenizer with the one that the "
            f"model was trained with, or {BYTES} if it was trained on these"
        )
    return restored.tokenizer


def _seq_len(given: int | None, restored: Restored) -> int:
    from dlc.train.model import positions_of

    positions = positions_of(restored.model)
    if given is not None:
        if positions is not None and given > positions:
            raise UsageError(f"--seq-len {given} exceeds the {positions} positions of the model {restored.origin}")
        return given
    if restored.spec is not None:
        return restored.spec.data.seq_len
    return min(SEQ_LEN, positions or SEQ_LEN)


def _json(found: Evaluation) -> str:
    """Numbers that are not finite, for which JSON has no word, are null."""
    plain = asdict(found)
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}
    return json.dumps(finite, allow_nan=False)


def _table(found: Evaluation) -> str:
    of = f" after round {found.t}" if found.t is not None else ""
    return (
        f"{found.model}{of}\n"
        f"  on {found.source} ({found.part}), {found.blocks} blocks of {found.seq_len} tokens ({found.tokenizer})\n"
        f"  loss {found.loss:.4f} nats/token   perplexity {found.perplexity:.2f}   {found.bits_per_byte:.4f} bits/byte"
    )
