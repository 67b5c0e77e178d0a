"""`dlc export`: the model of a checkpoint, as a folder for `from_pretrained`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dlc.errors import CheckpointError, UsageError


def export(args: argparse.Namespace) -> int:
    """The whole command; returns its exit status."""
    out = args.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already; give --out a new folder")
    named = Path(args.checkpoint).expanduser()
    if not named.exists():
        raise CheckpointError(f"the checkpoint {named} cannot be read: there is no such file or folder")

    from transformers.utils.logging import disable_progress_bar

    from dlc.train.model import save_model
    from dlc.train.restored import of_checkpoint
    from dlc.train.saver import chosen
    from dlc.train.tokens import load_tokenizer

    disable_progress_bar()
    restored = of_checkpoint(chosen(named, None))
    tokenizer = load_tokenizer(restored.tokenizer)
    if out.exists():
        out.rmdir()
    save_model(restored.model, out, tokenizer)
    parameters = sum(p.numel() for p in restored.model.parameters())
    said = {"model": str(out), "checkpoint": restored.origin, "t": restored.t, "parameters": parameters}
    if args.json:
        print(json.dumps({**said, "tokenizer": restored.tokenizer}), flush=True)
    else:
        print(f"{out}: {parameters:,} parameters after round {restored.t}, from {restored.origin}")
    return 0
