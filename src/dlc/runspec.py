"""RunSpec: everything on which all peers of a run have to agree.

It is written once, in a RUN.toml or as the defaults below, by whoever founds the run, and is held by the swarm: a
joiner needs an address and the key, and receives the rest. Its `hash` stands in every handshake, so it is computed
from canonical bytes: msgpack with sorted keys, every number in the type of its field.

What may differ between peers (addresses, device, folders, the micro-batch that a GPU can hold) is no part of it; it
belongs to the command line. Types and relations are checked when a table is made, so a RunSpec that exists is valid.
The defaults are the embedded run: a Llama of 0.84 million parameters on the source files of Python's standard library.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import blake3
import msgpack

from dlc import options
from dlc.comm.timeouts import Timeouts
from dlc.errors import ConfigError, ProtocolError
from dlc.options import check as _check
from dlc.options import one_of as _one_of
from dlc.pacespec import check_pace
from dlc.strategyspec import GossipSpec, MoshpitSpec, ServerSpec, check_strategy

SPEC_BYTES_MAX = 256 << 10
"""Longest canonical form: it travels as one string of a handshake message."""
CHUNK_ELEMS_MAX = 1 << 21
"""Largest chunk, 8 MiB of fp32: an owner holds one per contributor at once."""
SHARDS_MAX = 4096
"""Each is a reader of its own, which is there from the beginning."""
LEASE_BLOCKS_MAX = (1 << 32) - 1
"""Longest lease: no peer takes an entry with a longer one."""
BYTE_VALUES = 256
"""Vocabulary of the byte-level tokenizer."""

CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "topk")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEADLINE_LEASES = 4
"""Times the usual length of a lease."""
OPTIMIZERS = ("adamw", "muon", "sgd")
OUTER_OPTIMIZERS = ("nesterov", "sgd", "adam")
OUTER_CLIPS = ("none", "median")
OUTER_SCHEDULES = ("constant", "cosine", "linear")
ROUNDS_MAX = (1 << 32) - 1
"""Rounds of a schedule: four bytes in a state image."""
LENGTH = ("rounds", "tokens", "inner.total_steps", "outer.total_rounds")
"""Options that say how long a run is: runs that differ in nothing else can go on from each other's checkpoints."""
MODEL_KINDS = ("config", "path", "hub")
BYTES = "bytes"
"""Name of the byte-level tokenizer."""
STDLIB = "stdlib"
"""Name of the data source that is on every machine."""

EMBEDDED_LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "vocab_size": BYTE_VALUES,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Which network is trained."""

    kind: str = "config"
    """"config": random weights from `config`. "path": weights and config from the folder `path`. "hub": from the
    Hugging Face hub, by `name`."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Fields of a `transformers` config, `model_type` among them; replaces the default as a whole. Only for
    kind "config", where an empty table means the embedded Llama. Read-only; `dict(config)` is a copy."""
    path: str = ""
    """Folder of a `transformers` model, on each peer the same path. Only for kind "path"."""
    name: str = ""
    """Name of a `transformers` model on the Hugging Face hub, such as "HuggingFaceTB/SmolLM2-135M". Only for kind
    "hub"."""
    revision: str = ""
    """Branch, tag or commit of `name`; a commit makes sure that all peers have the same. Only for kind "hub"."""
    pretrained: bool = True
    """Start from the weights of that model; false: only its config is taken, and the weights are random. Only for
    kinds "path" and "hub"."""

    def __post_init__(self) -> None:
        options.check_types(self, "model.")
        _one_of("model.kind", self.kind, MODEL_KINDS)
        for name, kind in (("path", "path"), ("name", "hub"), ("revision", "hub")):
            given = getattr(self, name) != ""
            remedy = f'add kind = "{kind}"' if self.kind == "config" else "remove one of them"
            _check(not given or self.kind == kind, f'model.{name} is given, but model.kind is "{self.kind}": {remedy}')
        _check(self.kind != "path" or self.path != "", 'model.kind is "path", but model.path is empty: name the folder')
        _check(self.kind != "hub" or self.name != "", 'model.kind is "hub", but model.name is empty: name the model')
        if self.kind != "config":
            _check(not self.config, f'model.config is given, but model.kind is "{self.kind}": remove one of them')
            return
        _check(
            self.pretrained, 'model.pretrained is for the kinds "path" and "hub": a config has no weights; remove it'
        )
        if not self.config:
            object.__setattr__(self, "config", EMBEDDED_LLAMA)
        _check("model_type" in self.config, 'model.config lacks model_type, for example "llama"')


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """What it is trained on. A *block* is one sequence; blocks are numbered, and peers lease ranges of them."""

    source: str = STDLIB
    """"stdlib": the source files of Python's standard library on that machine. A path, on each peer the same: a text,
    jsonl or parquet file, a folder of them, or one that `datasets` wrote with save_to_disk. "datasets:NAME": what
    `datasets.load_dataset` calls NAME."""
    subset: str = ""
    """Which configuration of a dataset, where it has several. Only for "datasets:NAME"."""
    split: str = "train"
    """Which split of a dataset, not of files. A part of it is held out for validation, as of every source."""
    text_field: str = "text"
    """Field of a jsonl record, or column of a parquet file or dataset, that holds the text."""
    tokenizer: str = BYTES
    """"bytes": one token per byte, 256 of them, and a zero byte after each document. Otherwise a folder with a
    tokenizer (`tokenizer.json`), on each peer the same path, or the name of one on the Hugging Face hub; its EOS ends
    each document."""
    streaming: bool = False
    """Read a dataset, or jsonl, parquet or text files, as they come, instead of all of them before the first step."""
    shards: int = 8
    """Into how many sequences a stream is divided (S), each read on from where it was: block range k is segment
    k div S of shard k mod S. At least the trainers there will be, so that none reads past what others train. A shard
    is a set of whole files where their number is a multiple of S, else one in S of all documents, for which all of them
    are read. Only with `streaming`."""
    seq_len: int = 128
    """Length of a block in tokens; at most the model's `max_position_embeddings`."""
    lease_blocks: int = 0
    """Length of one lease in blocks; at least what a peer uses in one round. 0: two rounds of blocks, or three with
    overlap, four times as many with deadlines (`RunSpec.blocks_per_lease`). Not for the strategies "gossip", "moshpit"
    and "parameter-server"."""

    def __post_init__(self) -> None:
        options.check_types(self, "data.")
        _check(self.source != "", 'data.source is empty: give "stdlib", a file, a folder or "datasets:NAME"')
        _check(self.source != "datasets:", 'data.source names no dataset: give "datasets:NAME"')
        _check(
            self.subset == "" or self.source.startswith("datasets:"),
            'data.subset is given, but data.source is no "datasets:NAME": remove it',
        )
        for name in ("split", "text_field", "tokenizer"):
            _check(getattr(self, name) != "", f"data.{name} is empty: remove it to have its default")
        for name in ("split", "text_field"):
            _check(
                self.source != STDLIB or getattr(self, name) == getattr(DataSpec, name),
                f"data.{name} is given, but {STDLIB!r} has none: remove it, or name another data.source",
            )
        _check(
            not (self.streaming and self.source == STDLIB),
            'data.streaming needs a dataset or files; "stdlib" is small: set streaming = false',
        )
        _check(1 <= self.shards <= SHARDS_MAX, f"data.shards must be 1 to {SHARDS_MAX}")
        _check(
            self.streaming or self.shards == DataSpec.shards,
            "data.shards is given, but data.streaming is false: remove it, or set streaming = true",
        )
        _check(self.seq_len >= 2, "data.seq_len must be at least 2 tokens: each predicts the next")


@dataclasses.dataclass(frozen=True)
class InnerSpec:
    """The optimizer that each peer runs on its own for `sync_every` steps."""

    optimizer: str = "adamw"
    """"adamw". "muon": Muon for the hidden matrices, those of experts one by one; AdamW for embeddings, head and
    vectors (MuLoCo), from torch 2.9 on. "sgd": plain."""
    lr: float = 2e-3
    """Greatest learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and the second moment per step, each in [0, 1). Not for "sgd"."""
    momentum: float = 0.95
    """Muon's Nesterov momentum, in [0, 1). Its steps are scaled to the size of AdamW's, and share `lr`. Only for
    "muon"."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, multiplied by the learning rate."""
    warmup_steps: int = 20
    """Inner steps of linear warm-up, counted over the whole run (the swarm's global step, not the peer's own).
    At most `total_steps` where that is set."""
    total_steps: int = 0
    """Global inner step at which the cosine reaches `min_lr_ratio`. 0: derived as rounds * sync_every, and
    without `rounds` the rate stays constant after the warm-up (`RunSpec.horizon_steps`)."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the cosine, as a fraction of `lr`, in [0, 1]."""
    clip_norm: float = 1.0
    """Greatest global norm of a gradient. 0: no clipping."""
    batch_size: int = 8
    """Sequences per micro-batch. Where a device has no room for so many, `dlc join --micro-batch` on that host."""
    accumulate: int = 1
    """Micro-batches per inner step; a step uses batch_size * accumulate sequences."""
    compile: bool = False
    """Run the training steps through torch.compile. Every host then needs a C++ compiler, or triton for CUDA; the first
    step takes a minute or so."""
    checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again: far less memory for a third
    more arithmetic."""

    def __post_init__(self) -> None:
        options.check_types(self, "inner.")
        _one_of("inner.optimizer", self.optimizer, OPTIMIZERS)
        _check(self.lr > 0, f"inner.lr must be above 0, got {self.lr}")
        _check(all(0 <= beta < 1 for beta in self.betas), f"inner.betas must lie in [0, 1), got {list(self.betas)}")
        _check(0 <= self.momentum < 1, f"inner.momentum must lie in [0, 1), got {self.momentum}")
        which = f'inner.optimizer is "{self.optimizer}", which has no such thing'
        options.check_used(self, "inner.", ("momentum",), self.optimizer == "muon", which)
        options.check_used(self, "inner.", ("betas",), self.optimizer != "sgd", which)
        _check(self.weight_decay >= 0, f"inner.weight_decay must not be negative, got {self.weight_decay}")
        _check(0 <= self.min_lr_ratio <= 1, f"inner.min_lr_ratio must lie in [0, 1], got {self.min_lr_ratio}")
        _check(self.clip_norm >= 0, f"inner.clip_norm must not be negative, got {self.clip_norm}; 0 means no clipping")
        _check(self.batch_size >= 1, "inner.batch_size must be at least 1 sequence")
        _check(self.accumulate >= 1, "inner.accumulate must be at least 1 micro-batch")
        _check(
            self.total_steps == 0 or self.warmup_steps <= self.total_steps,
            f"inner.warmup_steps ({self.warmup_steps}) must not exceed inner.total_steps ({self.total_steps})",
        )


@dataclasses.dataclass(frozen=True)
class OuterSpec:
    """The step that all peers take together after each round, on the mean pseudo-gradient."""

    optimizer: str = "nesterov"
    """"nesterov": SGD with Nesterov momentum (DiLoCo). "sgd": without momentum. "adam": FedAdam. They keep 8, 4 and 12
    bytes of host memory per parameter."""
    lr: float = 0.7
    """Outer learning rate, after the warm-up. 1 with "sgd", or with momentum 0, is plain averaging of parameters."""
    momentum: float = 0.9
    """Nesterov momentum, in [0, 1). Only for "nesterov"."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment per round, each in [0, 1). Only for "adam"."""
    eps: float = 0.1
    """Added to the root of the second moment, above 0. Only for "adam"; pseudo-gradients are small, and with an eps as
    small as an inner Adam's every element would move by about `lr` in the first round."""
    schedule: str = "constant"
    """What becomes of the learning rate after the warm-up: "constant", "cosine" or "linear"."""
    warmup_rounds: int = 0
    """Rounds of linear warm-up."""
    total_rounds: int = 0
    """Round after which "cosine" and "linear" are at `min_lr_ratio`; 0: the `rounds` of the run. Only for them."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of "cosine" and "linear", as a fraction of `lr`, in [0, 1]. Only for them."""
    clip: str = "none"
    """"median": in each round, no contribution's norm may exceed the median of all; what exceeds it is scaled down, and
    not made up for. Who makes more inner steps than others is clipped for it. "none": no clipping."""

    def __post_init__(self) -> None:
        options.check_types(self, "outer.")
        _one_of("outer.optimizer", self.optimizer, OUTER_OPTIMIZERS)
        _one_of("outer.clip", self.clip, OUTER_CLIPS)
        _one_of("outer.schedule", self.schedule, OUTER_SCHEDULES)
        _check(self.lr > 0, f"outer.lr must be above 0, got {self.lr}")
        _check(0 <= self.momentum < 1, f"outer.momentum must lie in [0, 1), got {self.momentum}")
        _check(all(0 <= beta < 1 for beta in self.betas), f"outer.betas must lie in [0, 1), got {list(self.betas)}")
        _check(self.eps > 0, f"outer.eps must be above 0, got {self.eps}")
        which = f'outer.optimizer is "{self.optimizer}", which has no such thing'
        options.check_used(self, "outer.", ("momentum",), self.optimizer == "nesterov", which)
        options.check_used(self, "outer.", ("betas", "eps"), self.optimizer == "adam", which)
        _check(0 <= self.min_lr_ratio <= 1, f"outer.min_lr_ratio must lie in [0, 1], got {self.min_lr_ratio}")
        rounds = max(self.warmup_rounds, self.total_rounds)
        _check(rounds <= ROUNDS_MAX, f"outer.warmup_rounds and outer.total_rounds must be at most {ROUNDS_MAX}")
        _check(
            self.total_rounds == 0 or self.warmup_rounds <= self.total_rounds,
            f"outer.warmup_rounds ({self.warmup_rounds}) must not exceed outer.total_rounds ({self.total_rounds})",
        )

    def ending(self, rounds: int) -> OuterSpec:
        """The same with `total_rounds` set, in a run of so many rounds (0: without end).

        ConfigError: a schedule needs an end, and there is none.
        """
        if self.schedule == "constant" or self.total_rounds:
            return self
        _check(
            rounds > 0,
            f"outer.schedule is {self.schedule!r}, but nothing says where it ends: set outer.total_rounds, or rounds",
        )
        _check(
            self.warmup_rounds <= rounds,
            f"outer.warmup_rounds ({self.warmup_rounds}) must not exceed the {rounds} rounds of the run, with which "
            f"outer.schedule {self.schedule!r} ends",
        )
        return dataclasses.replace(self, total_rounds=rounds)


@dataclasses.dataclass(frozen=True)
class TimeoutsSpec:
    """Bounds of the deadlines, which are measured: they grow with round trips, group size and slowness, never below
    these. The same on every peer, since a peer must know how long the others wait before they go on without it."""

    probe_s: float = 0.25
    """Seconds between two pings of the failure detector, 0.14 to 1. A killed peer is known to be dead after about 4 to
    10 of them."""
    chunk_s: float = 2.0
    """Least silence, in seconds, after which a round goes on without the rest of a peer's contribution."""
    evict_s: float = 60.0
    """Least time, in seconds, after which those who lost more than half of the voters at once go on without them. A
    partition of the network that lasts longer splits the run in two, until it heals and one side is given up. At least
    32 times `probe_s`."""

    def __post_init__(self) -> None:
        options.check_types(self, "timeouts.")
        _check(0.14 <= self.probe_s <= 1, f"timeouts.probe_s must be 0.14 to 1 s, got {self.probe_s}")
        _check(
            self.evict_s >= 32 * self.probe_s,
            f"timeouts.evict_s must be at least 32 times timeouts.probe_s, {32 * self.probe_s:g} s, got {self.evict_s}",
        )
        self.floors()

    def floors(self) -> Timeouts:
        """The same for the protocol; ConfigError if they do not keep their relations."""
        return Timeouts(**options.to_plain(self))


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The whole contract of a run. `RunSpec()` is the embedded small run."""

    run: str = "dlc"
    """Name of the run: 1 to 64 letters, digits, dots, dashes or underscores. Runs of other names never mix."""
    strategy: str = "diloco"
    """What is exchanged, with whom, and when. "diloco": what H inner steps changed, with all, in rounds.
    "data-parallel": the gradients of each step, with all. "gossip": parameters, with a neighbour. "moshpit":
    parameters, within rotating groups. "parameter-server": what H inner steps changed, with helpers that own the
    parameters."""
    sync_every: int = 20
    """Inner steps between two exchanges (H), on every peer. With "data-parallel" each step is a round, whatever this
    is, and leases alone are measured in so many steps."""
    sync_mode: str = "steps"
    """When a peer offers its work. "steps": after `sync_every` inner steps. "deadline": all at the same time, when the
    median peer has made so many; faster ones have made more by then, slower ones fewer, and the mean is weighted by
    tokens, so that nobody is waited for. A peer makes one step at least."""
    round_s: float = 0.0
    """Seconds of inner steps between two rounds. 0: what the median peer needs for its steps, as they tell each other.
    Only for sync_mode "deadline"."""
    codec: str = "fp16"
    """Wire form of contributions and means: "fp32", "fp16", "bf16", or a quarter and an eighth of fp32: "int8", "int4",
    in blocks with a scale of their own; each peer then adds what encoding lost to its next contribution. "topk": the 64
    greatest of 4096 elements only, in two bits each, a 141st (SparseLoCo); made for outer.optimizer = "sgd", lr = 1."""
    overlap: str = "none"
    """What inner steps do during a round. "none": wait for it, if it takes no longer than usual. "delayed": go on, as
    the first ones of the next phase; the mean is applied when it is there, and what they changed is kept on top of it
    and part of the next round. "eager": the same, but they go on from where the peer's own part of the mean will
    take the parameters, and what the others' parts change is put right then (4 bytes of host memory more per
    parameter). A checkpoint has the steps that are ahead of its round, too."""
    overlap_steps: int = 0
    """How many inner steps go on during a round before it is waited for. 0: as many as there are between two rounds.
    Only with overlap."""
    mixing: float = 0.0
    """How much of a round's effect a peer whose steps went on leaves undone in its own parameters, in [0, 1): they
    become (1 - mixing) times the new ones plus mixing times those that its steps had made. Only with overlap."""
    fragments: int = 1
    """Into how many parts the model is cut, by layers. Each is exchanged every `sync_every` inner steps, one after the
    other: a round is of one part, and comes every sync_every / fragments steps (Streaming DiLoCo). At the end each is
    exchanged once more. What a peer that dies had in the other parts is lost with it."""
    chunk_elems: int = 0
    """Elements per chunk of the all-reduce, at most 2,097,152, and such that a model has no more than 8,192 chunks: the
    grid is the same for all owners. 0: some hundreds of chunks, of 16,384 to 262,144 elements (more for models of over
    2e9 parameters), and fewer with int8, int4 and topk. The library's own all-reduces take smaller ones for short
    vectors. Not for the strategies "gossip" and "moshpit"."""
    rounds: int = 0
    """The run ends with this many training rounds, with fragments of each of them. With "data-parallel" a round is a
    step; with "gossip" and "moshpit" each peer's own exchange with a few others. 0: no such limit. With `tokens` too,
    the first reached ends it. Once all peers have stopped, both may be changed, and the run goes on."""
    tokens: int = 0
    """The run ends with the round that reaches this many tokens, all peers together. 0: no such limit. With neither
    limit the run is endless."""
    seed: int = 0
    """Seeds the initial weights of the founder, the order of the data and, with its id, the dropout of each peer."""
    precision: str = "auto"
    """Arithmetic of the inner steps. "auto": bf16 autocast on CUDA, fp32 on the CPU. "fp16": autocast with a
    scaled loss, for GPUs without bf16. The outer state and the weights themselves are always fp32."""
    model: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    """Which network is trained."""
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    """What it is trained on."""
    inner: InnerSpec = dataclasses.field(default_factory=InnerSpec)
    """The optimizer of each peer."""
    outer: OuterSpec = dataclasses.field(default_factory=OuterSpec)
    """The step all peers take together."""
    timeouts: TimeoutsSpec = dataclasses.field(default_factory=TimeoutsSpec)
    """How long peers wait for each other."""
    gossip: GossipSpec = dataclasses.field(default_factory=GossipSpec)
    """Averaging with neighbours."""
    moshpit: MoshpitSpec = dataclasses.field(default_factory=MoshpitSpec)
    """Averaging in rotating groups."""
    server: ServerSpec = dataclasses.field(default_factory=ServerSpec)
    """Helpers that own the parameters."""

    def __post_init__(self) -> None:
        options.check_types(self, "")
        name_fits = re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.run)
        _check(name_fits is not None, f"run must be 1 to 64 letters, digits, '.', '-' or '_', got {self.run!r}")
        _one_of("codec", self.codec, CODECS)
        _one_of("precision", self.precision, PRECISIONS)
        _check(self.sync_every >= 1, "sync_every must be at least 1 inner step")
        check_pace(self)
        _check(
            self.chunk_elems <= CHUNK_ELEMS_MAX,
            f"chunk_elems must lie in [0, {CHUNK_ELEMS_MAX}], got {self.chunk_elems}",
        )
        vocab_size = self.model.config.get("vocab_size", BYTE_VALUES)
        _check(
            type(vocab_size) is int and vocab_size >= 1,
            f"model.config.vocab_size must be at least 1, got {vocab_size!r}",
        )
        _check(
            self.data.tokenizer != BYTES or vocab_size >= BYTE_VALUES,
            f"model.config.vocab_size is {vocab_size}, but the byte-level tokenizer needs at least {BYTE_VALUES}",
        )
        positions = self.model.config.get("max_position_embeddings", self.data.seq_len)
        _check(
            type(positions) is int and self.data.seq_len <= positions,
            f"data.seq_len ({self.data.seq_len}) exceeds model.config.max_position_embeddings ({positions!r})",
        )
        _check(
            self.data.lease_blocks == 0 or self.data.lease_blocks >= self.blocks_per_round,
            f"data.lease_blocks ({self.data.lease_blocks}) is less than one round uses: sync_every * "
            f"inner.batch_size * inner.accumulate = {self.blocks_per_round} blocks; 0 derives it",
        )
        _check(
            self.blocks_per_lease <= LEASE_BLOCKS_MAX,
            f"a lease would have {self.blocks_per_lease} blocks, and {LEASE_BLOCKS_MAX} at most are possible: lower "
            "data.lease_blocks, or the product of sync_every, inner.batch_size and inner.accumulate",
        )
        self.outer.ending(self.rounds)
        falls, why = self.outer.schedule != "constant", 'outer.schedule is "constant", which does not fall'
        options.check_used(self.outer, "outer.", ("total_rounds", "min_lr_ratio"), falls, why)
        check_strategy(self, OuterSpec())
        size = len(self.to_bytes())
        _check(size <= SPEC_BYTES_MAX, f"the RunSpec takes {size} bytes, over the limit of {SPEC_BYTES_MAX}")

    @property
    def steps_per_round(self) -> int:
        """Inner steps of one peer between two exchanges."""
        return 1 if self.strategy == "data-parallel" else self.sync_every // self.fragments

    @property
    def exchanges(self) -> int:
        """Rounds after which the run ends, each fragment's counted; 0: no such limit."""
        return self.rounds * self.fragments

    def over(self, t: int, tokens: float) -> str | None:
        """Which limit a run has reached that is past round `t` (each fragment's counted), and has trained so many
        tokens: "rounds", "tokens" or None."""
        if self.exchanges and t >= self.exchanges:
            return "rounds"
        return "tokens" if self.tokens and tokens >= self.tokens else None

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one peer uses in one inner step."""
        return self.inner.batch_size * self.inner.accumulate

    @property
    def blocks_per_round(self) -> int:
        """Blocks that one peer uses in one round."""
        return self.steps_per_round * self.blocks_per_step

    @property
    def blocks_per_lease(self) -> int:
        """Length of one lease: `data.lease_blocks`, or where that is 0 two rounds of blocks, with overlap three: one is
        on its way to a round, one is trained on, and one is left where a round takes long. With deadlines four times
        as many: for the peers that are faster than the median."""
        rounds = (2 if self.overlap == "none" else 3) * (1 if self.sync_mode == "steps" else DEADLINE_LEASES)
        return self.data.lease_blocks or rounds * self.sync_every * self.blocks_per_step

    @property
    def tokens_per_round(self) -> int:
        """Tokens that one peer uses in one round: its full weight."""
        return self.blocks_per_round * self.data.seq_len

    @property
    def horizon_steps(self) -> int:
        """Global inner step at which the cosine ends; 0: the rate is constant after the warm-up."""
        return self.inner.total_steps or self.exchanges * self.steps_per_round

    @cached_property
    def hash(self) -> bytes:
        """BLAKE3 of the canonical bytes, 32 bytes: equal on all peers of a run."""
        return blake3.blake3(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Canonical bytes: msgpack, keys sorted at every level."""
        packed: bytes = msgpack.packb(_sorted(self.to_dict()))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> RunSpec:
        """The inverse of `to_bytes`, for bytes that came from another peer.

        ProtocolError: not canonical msgpack. ConfigError: options that this version of dlc does not know or accept.
        """
        if len(data) > SPEC_BYTES_MAX:
            raise ProtocolError(f"RunSpec of {len(data)} bytes is over the limit of {SPEC_BYTES_MAX}")
        try:
            plain = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise ProtocolError(f"not a RunSpec: {error}") from None
        spec = cls.from_dict(plain)
        if spec.to_bytes() != data:
            raise ProtocolError("RunSpec is not in the canonical form of this version of dlc")
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values, every option named; a fresh copy."""
        plain: dict[str, Any] = options.to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_dict`; what is left out keeps its default. ConfigError names the option at fault."""
        return options.from_plain(cls, plain)

    @classmethod
    def from_toml(cls, path: str | Path) -> RunSpec:
        """Read a RUN.toml; ConfigError names the file and the option or line at fault."""
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8-sig")))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is no text in UTF-8: give a RUN.toml") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path} is nested too deep to be read") from None
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_toml(self) -> str:
        """Text of a RUN.toml that gives this RunSpec, every option written out."""
        import tomli_w  # here, since only who writes a RUN.toml needs it

        return tomli_w.dumps(self.to_dict())

    def differences(self, other: RunSpec, mine: str = "here", theirs: str = "there") -> list[str]:
        """One line per differing option, such as "inner.lr: 0.001 here, 0.002 there"; empty if equal."""
        differ = self._differing(other).items()
        return [f"{name}: {here} {mine}, {there} {theirs}" for name, (here, there) in differ]

    def same_but_length(self, other: RunSpec) -> bool:
        """Whether they differ in nothing but `LENGTH`."""
        return set(self._differing(other)) <= set(LENGTH)

    def _differing(self, other: RunSpec) -> dict[str, tuple[str, str]]:
        """By option: what it is here, and there."""
        here, there = options.flatten(self.to_dict()), options.flatten(other.to_dict())
        both = {name: (_shown(here, name), _shown(there, name)) for name in {**here, **there}}
        return {name: (mine, theirs) for name, (mine, theirs) in both.items() if mine != theirs}


def _sorted(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _sorted(plain[key]) for key in sorted(plain)}
    return [_sorted(item) for item in plain] if isinstance(plain, list) else plain


def _shown(flat: dict[str, Any], name: str) -> str:
    return repr(flat[name]) if name in flat else "(absent)"
