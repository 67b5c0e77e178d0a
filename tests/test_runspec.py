from __future__ import annotations

import ast
import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc import options, runspec
from dlc.comm.shapes import LEASE_LEN_MAX
from dlc.errors import ConfigError, DlcError, ProtocolError
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, OuterSpec, RunSpec, TimeoutsSpec

TABLES = (ModelSpec, DataSpec, InnerSpec, OuterSpec, RunSpec)


def write(folder: Path, text: str) -> Path:
    path = folder / "RUN.toml"
    path.write_text(text, encoding="utf-8")
    return path


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    inner = InnerSpec(
        lr=draw(st.floats(1e-6, 1)),
        betas=(draw(st.floats(0, 0.99)), 0.95),
        batch_size=draw(st.integers(1, 64)),
        accumulate=draw(st.integers(1, 8)),
    )
    config = {"model_type": "gpt2", "n_layer": draw(st.integers(1, 90)), "rope": {"kinds": ["a", 1, True, 0.5]}}
    return RunSpec(
        run=draw(st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)),
        sync_every=draw(st.integers(1, 1000)),
        rounds=draw(st.integers(0, options.INT_MAX)),
        codec=draw(st.sampled_from(runspec.CODECS)),
        model=draw(st.sampled_from([ModelSpec(), ModelSpec(config=config), ModelSpec("path", path="some/ä folder")])),
        data=draw(st.sampled_from([DataSpec(), DataSpec("datasets:a/b", tokenizer="c/d", streaming=True, shards=4)])),
        inner=inner,
    )


@given(specs())
def test_every_form_gives_the_same_spec_back(spec: RunSpec) -> None:
    for same in (
        RunSpec.from_dict(spec.to_dict()),
        RunSpec.from_bytes(spec.to_bytes()),
        RunSpec.from_dict(tomllib.loads(spec.to_toml())),
    ):
        assert same == spec
        assert same.hash == spec.hash
        assert same.differences(spec) == []


@given(specs(), specs())
def test_specs_differ_in_hash_exactly_when_a_difference_is_named(one: RunSpec, other: RunSpec) -> None:
    assert (one.hash != other.hash) == bool(one.differences(other)) == (one != other)


def test_default_is_the_embedded_llama() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = RunSpec()
    fields = dict(spec.model.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == 836_736
    assert (spec.data.source, spec.data.seq_len, spec.inner.batch_size) == ("stdlib", 128, 8)
    assert len(spec.hash) == 32


def test_hash_does_not_depend_on_order_or_on_how_numbers_were_written() -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 4}
    backwards = dict(reversed(config.items()))
    assert ModelSpec(config=config) == ModelSpec(config=backwards)
    one = RunSpec(model=ModelSpec(config=config), outer=OuterSpec(lr=1, momentum=-0.0))
    other = RunSpec(model=ModelSpec(config=backwards), outer=OuterSpec(lr=1.0, momentum=0.0))
    assert one.hash == other.hash


def test_canonical_form_is_msgpack_with_sorted_keys() -> None:
    assert RunSpec().to_bytes() == msgpack.packb(_sorted(RunSpec().to_dict()))
    assert list(msgpack.unpackb(RunSpec().to_bytes())) == sorted(f.name for f in dataclasses.fields(RunSpec))


def _sorted(value: Any) -> Any:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def test_differences_name_the_options_and_both_values() -> None:
    ours = RunSpec(sync_every=20)
    theirs = RunSpec(
        sync_every=50,
        inner=InnerSpec(lr=0.5),
        model=ModelSpec(config={**ours.model.config, "hidden_size": 64, "rope_theta": 1e6}),
    )
    assert ours.differences(theirs) == [
        "sync_every: 20 here, 50 there",
        "model.config.hidden_size: 128 here, 64 there",
        "inner.lr: 0.002 here, 0.5 there",
        "model.config.rope_theta: (absent) here, 1000000.0 there",
    ]


def test_what_an_optimizer_has_not_may_be_named_with_its_default_or_zero(tmp_path: Path) -> None:
    spec = RunSpec(inner=InnerSpec(optimizer="sgd", momentum=0.0), outer=OuterSpec(optimizer="sgd", momentum=0.0))
    assert RunSpec.from_toml(write(tmp_path, spec.to_toml())) == spec
    assert (InnerSpec("muon", momentum=0.9).momentum, OuterSpec("adam", eps=1e-8).eps) == (0.9, 1e-8)


def test_words_of_other_programs_lead_to_options_that_exist() -> None:
    names = tuple(options.dotted_names(RunSpec))
    assert set(options.ELSEWHERE.values()) <= set(names)
    assert not set(options.ELSEWHERE) & set(names)


def test_toml_sets_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    spec = RunSpec.from_toml(write(tmp_path, 'run = "mine"\nrounds = 30\n[inner]\nlr = 1\nbetas = [0.8, 0.9]\n'))
    assert spec == RunSpec(run="mine", rounds=30, inner=InnerSpec(lr=1.0, betas=(0.8, 0.9)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync_evry = 3", "unknown option 'sync_evry'; did you mean 'sync_every'?"),
        ("[inner]\nlearning_rate = 3", "unknown option 'inner.learning_rate'"),
        ("[inner]\nweight_decy = 3", "unknown option 'inner.weight_decy'; did you mean 'inner.weight_decay'?"),
        ("[iner]\nlr = 3", "unknown option 'iner'; did you mean 'inner'?"),
        ("[training]\nlr = 3", "unknown option 'training'; the tables are model, data, inner, outer"),
        ("[inner.adam]\nlr = 3", "unknown option 'inner.adam'; did you mean 'inner'?"),
        ("[inner]\nH = 500", "unknown option 'inner.H'; did you mean 'sync_every'?"),
        ("RUN = 'mine'", "unknown option 'RUN'; did you mean 'run'?"),
        ("[inner]\nLR = 1", "unknown option 'inner.LR'; did you mean 'inner.lr'?"),
        ("local_steps = 500", "unknown option 'local_steps'; did you mean 'sync_every'?"),
        ("name = 'mine'", "unknown option 'name'; did you mean 'model.name' or 'run'?"),
        ("[outer]\nouter_lr = 1", "unknown option 'outer.outer_lr'; did you mean 'gossip.outer_lr' or 'outer.lr'?"),
        ("lr = 3", "unknown option 'lr'; did you mean 'inner.lr' or 'outer.lr'?"),
        ("[outer]\nbatch_size = 3", "unknown option 'outer.batch_size'; did you mean 'inner.batch_size'?"),
        ("inner = 3", "inner must be a table, got 3"),
        ("[inner]\nlr = 'fast'", "inner.lr must be a finite number, got 'fast'"),
        ("[inner]\nlr = true", "inner.lr must be a finite number, got True"),
        ("[inner]\nlr = nan", "inner.lr must be a finite number, got nan"),
        ("[inner]\nlr = 1" + 400 * "0", "inner.lr must be a finite number, got 1000"),
        ("[inner]\nlr = 0", "inner.lr must be above 0"),
        ("[inner]\nbetas = [0.9]", "inner.betas must be a list of 2 numbers"),
        ("[inner]\nbetas = [0.9, 1.0]", "inner.betas must lie in"),
        ("[inner]\nmin_lr_ratio = 1.5", "inner.min_lr_ratio must lie in"),
        ("[inner]\nclip_norm = -1.0", "inner.clip_norm must not be negative"),
        ("[inner]\nweight_decay = -1.0", "inner.weight_decay must not be negative"),
        ("[inner]\nmomentum = 1", "inner.momentum must lie in"),
        ("[inner]\ncompile = 1", "inner.compile must be true or false, got 1"),
        ("[inner]\nbatch_size = 0", "inner.batch_size must be at least 1"),
        ("[inner]\naccumulate = 0", "inner.accumulate must be at least 1"),
        ("[inner]\noptimizer = 'adam'", "must be one of adamw, muon, sgd, got 'adam'; did you mean 'adamw'?"),
        ("[inner]\nwarmup_steps = 9\ntotal_steps = 8", "inner.warmup_steps (9) must not exceed inner.total_steps (8)"),
        ("[outer]\nlr = 0", "outer.lr must be above 0"),
        ("[outer]\nmomentum = 1.0", "outer.momentum must lie in"),
        (
            '[outer]\noptimizer = "adamw"',
            "must be one of nesterov, sgd, adam, got 'adamw'; did you mean 'adam'?",
        ),
        ("[outer]\nbetas = [0.9, 1.0]", "outer.betas must lie in"),
        ('[outer]\nclip = "mean"', "outer.clip must be one of none, median, got 'mean'"),
        ("[outer]\neps = 0", "outer.eps must be above 0"),
        ("[outer]\nmin_lr_ratio = 2", "outer.min_lr_ratio must lie in"),
        ("[outer]\nwarmup_rounds = 4294967296", "must be at most 4294967295"),
        ("[outer]\nwarmup_rounds = 5\ntotal_rounds = 4", "outer.warmup_rounds (5) must not exceed outer.total_rounds"),
        ('[outer]\nschedule = "linear"', "set outer.total_rounds, or rounds"),
        (
            'rounds = 4\n[outer]\nschedule = "linear"\nwarmup_rounds = 5',
            "outer.warmup_rounds (5) must not exceed the 4 rounds of the run",
        ),
        ("[outer]\ntotal_rounds = 9", 'outer.total_rounds is given, but outer.schedule is "constant"'),
        ("[outer]\nmin_lr_ratio = 0.2", 'outer.min_lr_ratio is given, but outer.schedule is "constant"'),
        ("strategy = 'gossip'\nchunk_elems = 4096", 'chunk_elems is given, but strategy is "gossip"'),
        ("strategy = 'moshpit'\n[data]\nlease_blocks = 999", 'data.lease_blocks is given, but strategy is "moshpit"'),
        ("strategy = 'parameter-server'\n[data]\nlease_blocks = 999", "leases no data: remove it"),
        ("run = 'two words'", "run must be 1 to 64 letters"),
        ("sync_every = 0", "sync_every must be at least 1"),
        ("sync_every = 2.5", "sync_every must be a whole number"),
        ("rounds = -1", "rounds must be a whole number of at least 0"),
        ("chunk_elems = -1", "chunk_elems must be a whole number of at least 0"),
        ("chunk_elems = 9999999", "chunk_elems must lie in"),
        ("codec = 'fp61'", "codec must be one of fp32, fp16, bf16, int8, int4, topk, got 'fp61'; did you mean 'fp16'?"),
        ("strategy = 'dilocoo'", "strategy must be one of diloco"),
        ("strategy = 'gosip'", "got 'gosip'; did you mean 'gossip'?"),
        (
            "[gossip]\ngraph = 'ring'",
            '[gossip] is given, but strategy is "diloco": remove it, or set strategy = "gossip"',
        ),
        ("strategy = 'gossip'\n[gossip]\ngraph = 'rings'", "got 'rings'; did you mean 'ring'?"),
        ("strategy = 'gossip'\n[gossip]\nupdate = 'noloco'", "set gossip.graph = \"random-pairs\", not 'exponential'"),
        (
            "[inner]\noptimizer = 'sgd'\nmomentum = 0.9",
            'inner.momentum is given, but inner.optimizer is "sgd", which has no such thing: remove it',
        ),
        ("[inner]\nmomentum = 0.9", 'inner.momentum is given, but inner.optimizer is "adamw"'),
        ("[inner]\noptimizer = 'sgd'\nbetas = [0.8, 0.9]", 'inner.betas is given, but inner.optimizer is "sgd"'),
        ("[outer]\noptimizer = 'sgd'\nmomentum = 0.5", 'outer.momentum is given, but outer.optimizer is "sgd"'),
        ("[outer]\nbetas = [0.8, 0.9]", 'outer.betas is given, but outer.optimizer is "nesterov"'),
        ("[outer]\neps = 1e-8", 'outer.eps is given, but outer.optimizer is "nesterov"'),
        (
            "strategy = 'gossip'\n[gossip]\nouter_lr = 0.9",
            'gossip.outer_lr is given, but gossip.update is "average", which has no slow weights: remove it',
        ),
        ("strategy = 'gossip'\n[gossip]\npull = 1.6", "below 2 (1 - gossip.outer_momentum^2) = 1.5, got 1.6"),
        (
            "strategy = 'gossip'\noverlap = 'delayed'",
            'overlap = "delayed" cannot go with "gossip": what is averaged are',
        ),
        ("strategy = 'gossip'\ntokens = 9", 'tokens cannot end a run of "gossip": nobody counts'),
        ("strategy = 'moshpit'\ncodec = 'int4'", 'codec "int4" cannot go with "moshpit"'),
        ("strategy = 'moshpit'\ncodec = 'bf16'", 'codec "bf16" cannot go with moshpit: it would round every mean'),
        (
            "strategy = 'gossip'\ncodec = 'bf16'\n[gossip]\nupdate = 'noloco'\ngraph = 'random-pairs'",
            'codec "bf16" cannot go with noloco: it would round every mean',
        ),
        ("strategy = 'moshpit'\n[data]\nsource = 'x'\nstreaming = true", 'data.streaming cannot go with "moshpit"'),
        ("strategy = 'moshpit'\n[outer]\nlr = 0.5", '[outer] is given, but "moshpit" takes no outer step'),
        ("strategy = 'moshpit'\n[moshpit]\ngroup_size = 1", "moshpit.group_size must be 0 or lie in 2 ... 64, got 1"),
        ("[server]\nasync = true", 'strategy = "parameter-server"'),
        ("strategy = 'parameter-server'\n[server]\nmax_staleness = 3", "for server.async = true only"),
        ("strategy = 'parameter-server'\n[server]\nasync = true\npatience_s = 3", "for server.async = false only"),
        ("strategy = 'parameter-server'\n[server]\nasnc = true", "did you mean 'server.async'?"),
        ("strategy = 'parameter-server'\n[server]\nasync = 1", "server.async must be true or false"),
        ("strategy = 'parameter-server'\ncodec = 'int8'", 'codec "int8" cannot go with "parameter-server"'),
        ("strategy = 'parameter-server'\noverlap = 'delayed'", "server.async = true lets no peer wait"),
        ("strategy = 'parameter-server'\n[outer]\nclip = 'median'", "each span sees its own part"),
        ("strategy = 'data-parallel'\noverlap = 'delayed'", "the next step needs the mean gradient of this one"),
        ("strategy = 'data-parallel'\n[inner]\noptimizer = 'muon'", "a matrix product has none in common"),
        ("strategy = 'data-parallel'\ncodec = 'int8'", 'codec "int8" cannot go with "data-parallel"'),
        ("strategy = 'data-parallel'\nprecision = 'fp16'", "its loss scale is each peer's own"),
        ("strategy = 'parameter-server'\ntokens = 9", 'tokens cannot end a run of "parameter-server"'),
        (
            "strategy = 'parameter-server'\n[data]\nsource = 'x'\nstreaming = true",
            'data.streaming cannot go with "parameter-server"',
        ),
        ("strategy = 'parameter-server'\n[server]\nspans = 4097", "server.spans must be at most 4096, got 4097"),
        ("strategy = 'parameter-server'\n[server]\nweight_decay = -1.0", "server.weight_decay must not be negative"),
        ("strategy = 'parameter-server'\n[server]\npatience_s = 0.0", "server.patience_s must be above 0"),
        ("strategy = 'moshpit'\n[moshpit]\ngroup_size = 2\ndims = 3", "are both given: remove one"),
        ("strategy = 'moshpit'\n[moshpit]\ngroup_size = 65", "moshpit.group_size must be 0 or lie in 2 ... 64, got 65"),
        ("strategy = 'moshpit'\n[moshpit]\ndims = 9", "moshpit.dims must lie in 0 ... 8, got 9"),
        ("strategy = 'moshpit'\n[moshpit]\nwait_s = 0.0", "moshpit.wait_s must be above 0, got 0.0"),
        ("strategy = 'gossip'\n[gossip]\nwait_s = -1.0", "gossip.wait_s must be at least 0, got -1.0"),
        (
            "strategy = 'gossip'\n[gossip]\ngraph = 'random-pairs'\nupdate = 'noloco'\nwait_s = 0.0",
            "gossip.wait_s must be above 0, got 0.0",
        ),
        ("strategy = 'gossip'\n[gossip]\nouter_lr = 0.0", "gossip.outer_lr must be above 0, got 0.0"),
        ("strategy = 'gossip'\n[gossip]\nouter_momentum = 1.0", "gossip.outer_momentum must lie in [0, 1), got 1.0"),
        ("strategy = 'gossip'\n[gossip]\npull = 0.0", "gossip.pull must lie above 0"),
        ("overlap = 'eagr'", "overlap must be one of none, delayed, eager, got 'eagr'; did you mean 'eager'?"),
        ("overlap_steps = 3", 'overlap_steps is given, but overlap is "none": remove it'),
        (
            "overlap = 'eager'\nfragments = 2\noverlap_steps = 11",
            "overlap_steps must lie in 0 ... 10, the inner steps between two rounds, got 11",
        ),
        ("mixing = 0.5", 'mixing is given, but overlap is "none"'),
        ("overlap = 'delayed'\nmixing = 1", "mixing must lie in [0, 1)"),
        ("fragments = 3", "sync_every (20) must be a multiple of fragments (3)"),
        ("fragments = 0", "fragments must be at least 1"),
        ("strategy = 'gossip'\nfragments = 2", 'fragments is given, but strategy is "gossip"'),
        ("strategy = 'moshpit'\nsync_mode = 'deadline'", 'sync_mode is given, but strategy is "moshpit"'),
        ("sync_mode = 'time'", "sync_mode must be one of steps, deadline, got 'time'"),
        ("round_s = 3", 'round_s is given, but sync_mode is "steps"'),
        ("sync_mode = 'deadline'\nround_s = -1.0", "round_s must not be negative"),
        ("precision = 'half'", "precision must be one of"),
        ("[data]\nsource = ''", "data.source is empty"),
        ("[data]\nseq_len = 1", "data.seq_len must be at least 2"),
        ('[data]\nsource = "/x"\nstreaming = true\nshards = 5000', "data.shards must be 1 to 4096"),
        ("[data]\nseq_len = 512", "data.seq_len (512) exceeds model.config.max_position_embeddings (256)"),
        (
            "[data]\nlease_blocks = 159",
            "less than one round uses: sync_every * inner.batch_size * inner.accumulate = 160",
        ),
        ("[data]\nlease_blocks = 4294967296", "a lease would have 4294967296 blocks, and 4294967295 at most"),
        ("sync_every = 1000000000", "a lease would have 16000000000 blocks"),
        ("[model]\nkind = 'url'", "model.kind must be one of"),
        ("[model]\nkind = 'path'", "model.path is empty"),
        ("[model]\npath = 'x'", 'add kind = "path"'),
        ("[model]\nkind = 'path'\npath = 'x'\n[model.config]\na = 1", "model.config is given, but"),
        ("[model]\nname = 'x'", 'add kind = "hub"'),
        ("[model]\nkind = 'hub'", "model.name is empty"),
        ("[model]\nkind = 'hub'\nname = 'x'\npath = 'y'", 'model.path is given, but model.kind is "hub": remove'),
        ("[model]\nkind = 'path'\npath = 'x'\nrevision = 'y'", "model.revision is given"),
        ("[model]\npretrained = false", "a config has no weights"),
        ("[model.config]\nhidden_size = 3", "model.config lacks model_type"),
        ("[model.config]\nmodel_type = 'gpt2'\nvocab_size = 255", "model.config.vocab_size is 255"),
        ("[model.config]\nmodel_type = 'gpt2'\nx = 2024-01-01", "model.config.x must be a string, number"),
        ("[model.config]\nmodel_type = 'gpt2'\nx = inf", "model.config.x must be a string, number"),
        ("[model.config]\nmodel_type = 'gpt2'\nx = [[[[[[[[[1]]]]]]]]]", "nested more than 8 deep"),
        ("[model.config]\nmodel_type = 'gpt2'\nx = '" + "y" * 300_000 + "'", "over the limit of 262144"),
        ("rounds = 3\nsync_every = = 4", "line 2"),
        ("rounds = " + 10_000 * "[", "nested too deep to be read"),
    ],
)
def test_bad_toml_is_refused_with_the_file_and_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        RunSpec.from_toml(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evict_s": 5.0}, "timeouts.evict_s must be at least 32 times timeouts.probe_s, 8 s, got 5.0"),
        ({"probe_s": 0.1}, "timeouts.probe_s must be 0.14 to 1 s, got 0.1"),
        ({"probe_s": 1.5, "evict_s": 60.0}, "timeouts.probe_s must be 0.14 to 1 s, got 1.5"),
    ],
)
def test_timeouts_that_do_not_go_together_are_told_in_numbers(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        TimeoutsSpec(**options)
    assert said in str(error.value)
    for least in (0.14, 1.0):
        TimeoutsSpec(probe_s=least, evict_s=32 * least)


def test_a_file_from_an_editor_that_marks_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_bytes(b'\xef\xbb\xbfrun = "a"\r\n')
    assert RunSpec.from_toml(tmp_path / "RUN.toml").run == "a"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        RunSpec.from_toml(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'run = "\xe4"')
    with pytest.raises(ConfigError, match=r"latin\.toml is no text in UTF-8"):
        RunSpec.from_toml(tmp_path / "latin.toml")


def test_a_lease_that_a_run_may_have_is_one_that_peers_take() -> None:
    longest = RunSpec(data=DataSpec(lease_blocks=runspec.LEASE_BLOCKS_MAX))
    assert longest.blocks_per_lease == LEASE_LEN_MAX - 1


def test_derived_sizes() -> None:
    spec = RunSpec(sync_every=5, rounds=4, inner=InnerSpec(batch_size=3, accumulate=2), data=DataSpec(seq_len=10))
    assert (spec.blocks_per_round, spec.blocks_per_lease, spec.tokens_per_round) == (30, 60, 300)
    assert spec.horizon_steps == 20
    assert dataclasses.replace(spec, rounds=0).horizon_steps == 0
    assert dataclasses.replace(spec, inner=InnerSpec(total_steps=77)).horizon_steps == 77
    assert dataclasses.replace(spec, data=DataSpec(lease_blocks=31)).blocks_per_lease == 31
    cut = dataclasses.replace(spec, sync_every=6, fragments=3)
    assert (cut.steps_per_round, cut.exchanges, cut.horizon_steps, cut.blocks_per_round) == (2, 12, 24, 12)
    assert cut.blocks_per_lease == 72 and dataclasses.replace(spec, sync_mode="deadline").blocks_per_lease == 240


def test_a_spec_cannot_be_changed_under_its_hash() -> None:
    config: dict[str, Any] = {"model_type": "gpt2", "nested": {"a": 1}}
    spec = RunSpec(model=ModelSpec(config=config))
    before = spec.hash
    config["nested"]["a"] = 2
    spec.to_dict()["model"]["config"]["nested"]["a"] = 3
    assert RunSpec.from_dict(spec.to_dict()).hash == before
    with pytest.raises(TypeError):
        spec.model.config["model_type"] = "llama"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.sync_every = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        RunSpec().to_bytes()[:-1],
        RunSpec().to_bytes() + b"\0",
        msgpack.packb({"sync_every": 20}),
        msgpack.packb(dict(reversed(RunSpec().to_dict().items()))),
        msgpack.packb({3: 4}),
        b"\x91" * 3000,
        b"\0" * (runspec.SPEC_BYTES_MAX + 1),
    ],
)
def test_bytes_that_are_no_canonical_spec_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        RunSpec.from_bytes(data)


def test_an_option_of_another_version_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown option 'warp'"):
        RunSpec.from_bytes(msgpack.packb({**RunSpec().to_dict(), "warp": 9}))


@given(st.binary(max_size=60), st.integers(0, 400))
def test_no_bytes_raise_anything_else(noise: bytes, at: int) -> None:
    good = RunSpec().to_bytes()
    for data in (noise, good[:at] + noise + good[at + len(noise) :]):
        try:
            spec = RunSpec.from_bytes(data)
        except DlcError:
            continue
        assert spec.to_bytes() == data


@pytest.mark.parametrize("table", TABLES)
def test_every_option_says_what_it_is_for(table: type) -> None:
    (body,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), ast.unparse(statement)
