"""Command lines copied from the documentation of vLLM, with the model's name replaced: each starts,
or says in one line what to type instead."""

from __future__ import annotations

import pytest
import yaml

from jaxserve.cli import main as cli
from jaxserve.settings import foreign, renamed
from jaxserve.settings.flags import parse
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig

SERVE = cli.load("serve")
MODEL = "random:tiny"

STARTS = [  # what is typed behind `serve`, and what becomes of it
    ("MODEL", {}),
    ("MODEL --dtype auto --api-key token-abc123", {"api_key": ("token-abc123",)}),
    ("--model MODEL --dtype half", {"dtype": "float16"}),
    ("MODEL --tensor-parallel-size 2", {"mesh": "spp=1,kvp=1,tp=2"}),
    ("MODEL -tp 2 -pp 2", {"mesh": "spp=2,kvp=1,tp=2"}),
    (
        "MODEL --tensor-parallel-size=2 --pipeline-parallel-size=2 --context-parallel-size=2",
        {"mesh": "spp=2,kvp=2,tp=2"},
    ),
    ("MODEL --max-model-len 8K", {"max_model_len": 8192}),
    ("MODEL --max-model-len=25.6k", {"max_model_len": 25_600}),
    ("MODEL --max-num-seqs 32 --max-num-batched-tokens 512", {"max_seqs": 32, "chunk_tokens": 512}),
    ("MODEL --host 127.0.0.1 --port 8001", {"host": "127.0.0.1", "port": 8001}),
    ("MODEL --served-model-name gpt-4 mine", {"served_model_name": ("gpt-4", "mine")}),
    (
        "MODEL --served-model-name=gpt-4 --served-model-name=mine",
        {"served_model_name": ("gpt-4", "mine")},
    ),
    ("MODEL --enable-prefix-caching", {"prefix_caching": True}),
    ("MODEL --no-enable-prefix-caching", {"prefix_caching": False}),
    ("MODEL --kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}),
    ("MODEL --block-size 32 --num-gpu-blocks-override 100", {"block_size": 32, "pages": 100}),
    ("MODEL --enable-chunked-prefill --max-num-batched-tokens=2048", {"chunk_tokens": 2048}),
    ("MODEL --trust-remote-code --enforce-eager", {}),
    ("MODEL --enable-auto-tool-choice --tool-call-parser hermes", {"model": MODEL}),
    ("MODEL --ssl-keyfile key.pem --ssl-certfile cert.pem", {"tls_cert": "cert.pem"}),
    ("MODEL --http-port=0 --grpc-port=0", {"port": 0, "grpc_port": 0}),
    (
        "MODEL --enable-lora --max-loras 2 --lora-modules a=/x b=/y",
        {"max_loras": 2, "lora_modules": ("a=/x", "b=/y")},
    ),
    ("MODEL --enable-lora --lora-modules a=/x --max-cpu-loras 2", {"max_loras": 1}),
    ("MODEL --max-loras=4 --enable-lora --lora-dtype auto", {"max_loras": 4}),
    ("MODEL --spec-method ngram --spec-tokens 5", {"drafts": "ngram", "draft_tokens": 5}),
]
SAYS = [
    ("MODEL --data-parallel-size 4", "--data-parallel-size is not a flag here: start `jaxserve cl"),
    ("MODEL -dp 4", "-dp is not a flag here: start `jaxserve cluster --mixed=N`"),
    ("MODEL --speculative-config '{}'", "--speculative-config is not a flag here: "),
    ("MODEL --swap-space 16", "--swap-space is not a flag here: --host-cache-gib=GIB"),
    ("MODEL --max-num-sequence 8", "did you mean --max_num_seqs?"),
    ("MODEL --tensor-paralel-size 8", "did you mean --tensor_parallel_size?"),
    ("MODEL --tensor-parallel-size 0", "--tensor_parallel_size=0: 0 is below the limit 1"),
    ("MODEL -tp 2 --mesh=tp=2", "--tensor_parallel_size: give it or mesh, not both"),
]


def plain(value):
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(("typed", "expected"), STARTS)
def test_it_starts(typed, expected):
    values = parse(SERVE, typed.replace("MODEL", MODEL).split())
    assert values["model"] == MODEL
    assert {name: plain(values[name]) for name in expected} == expected


@pytest.mark.parametrize(("typed", "said"), SAYS)
def test_it_says_in_one_line_what_to_type_instead(typed, said, capsys):
    assert cli.main(["serve", *typed.replace("MODEL", MODEL).split()]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1] and len(error) == 1


def test_a_file_and_the_environment_may_spell_names_so_too(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("model: random:tiny\ntensor-parallel-size: 2\nmax-num-seqs: 4\n")
    values = parse(SERVE, [f"--config={file}"])
    assert (values["mesh"], values["max_seqs"]) == ("spp=1,kvp=1,tp=2", 4)
    monkeypatch.setenv("JAXSERVE_PIPELINE_PARALLEL_SIZE", "2")
    values = parse(SERVE, [f"--config={file}"])
    assert values["mesh"] == "spp=2,kvp=1,tp=2"


def test_so_may_python():
    config = make(EngineConfig, {"tensor_parallel_size": 2, "max_num_seqs": 4})
    assert (config.mesh.tp, config.scheduler.max_seqs) == (2, 4)
    with pytest.raises(ConfigError, match="not both"):
        make(EngineConfig, {"tensor_parallel_size": 2, "mesh": "tp=2"})


def test_what_has_no_effect_is_told(caplog):
    parse(SERVE, [MODEL, "--trust-remote-code", "--load-format", "auto"])
    assert [record.getMessage() for record in caplog.records] == [
        "--trust-remote-code has no effect: nothing from a checkpoint is ever executed",
        "--load-format has no effect: the format follows from the files",
    ]


def test_a_value_that_looks_like_a_flag_is_left_as_it_is():
    generate = cli.load("generate")
    assert parse(generate, ["--prompt", "--no-such-thing"])["prompt"] == "--no-such-thing"
    assert parse(SERVE, ["--model", "--tp"])["model"] == "--tp"
    assert parse(generate, ["--prompt=--a-b"])["prompt"] == "--a-b"


def test_keys_are_not_printed(capsys):
    assert cli.main(["serve", MODEL, "--api-key=secret-word", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "secret-word" not in printed and yaml.safe_load(printed)["model"] == MODEL


def test_no_name_of_ours_is_in_the_tables_of_others():
    tables = (
        foreign.NO_EFFECT,
        foreign.NO_EFFECT_VALUES,
        foreign.STANDS_FOR,
        foreign.INSTEAD,
        renamed.ALIASES,
    )
    others = {name for table in tables for name in table}
    assert not others & set(SERVE.options)
    assert sum(map(len, tables)) == len(others)
    meant = {setting for setting, _ in foreign.STANDS_FOR.values()}
    assert meant | set(renamed.ALIASES.values()) <= set(SERVE.options)
