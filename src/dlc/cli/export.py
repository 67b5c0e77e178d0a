"""`dlc export`: the model of a checkpoint, as a folder for `from_pretrained`."""

from __future__ import annotations

import argparse
import json

from dlc.cli.interrupt import Interrupts
from dlc.errors import UsageError
from dlc.train.shelf import demand_place, demand_room, expanded, file_of, model_bytes


def export(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """The whole command; returns its exit status."""
    out = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already; give --out a new folder")
    demand_place("--out", out, out)
    named = expanded(args.checkpoint)
    demand_room(out, model_bytes(file_of(named)))  # here, and all above: before torch is loaded, which takes seconds

    from transformers.utils.logging import disable_progress_bar

    from dlc.train.model import save_model
    from dlc.train.restored import of_checkpoint
    from dlc.train.saves import chosen
    from dlc.train.tokens import load_tokenizer

    disable_progress_bar()
    restored = of_checkpoint(chosen(named, None))  # a peer that trains may have replaced what was the newest
    tokenizer = load_tokenizer(restored.tokenizer)
    folder = out / "model.new" if out.exists() else out  # which may be no folder that one can rename: a disk of its own
    interrupts.holds = True  # what is half written
    save_model(restored.model, folder, tokenizer)
    if folder != out:
        for written in folder.iterdir():
            written.rename(out / written.name)
        folder.rmdir()
    parameters = sum(p.numel() for p in restored.model.parameters())
    said = {"model": str(out), "checkpoint": restored.origin, "t": restored.t, "parameters": parameters}
    if args.json:
        print(json.dumps({**said, "tokenizer": restored.tokenizer}), flush=True)
    else:
        print(f"{out}: {parameters:,} parameters after round {restored.t}, from {restored.origin}")
    return 0
