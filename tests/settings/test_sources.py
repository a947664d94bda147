"""Settings from a file and from the environment: who wins, what is refused, and that what is
printed can be read back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from jaxserve.cli import main as cli
from jaxserve.settings.fields import count
from jaxserve.settings.flags import parse
from jaxserve.settings.schema.mesh import DEGREES
from jaxserve.settings.sources import MAX_FILE_BYTES, from_file

SERVE = cli.load("serve")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in os.environ:
        if name.startswith("JAXSERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def written(text: str | bytes) -> str:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return written


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    return code, *capsys.readouterr()


def test_flags_go_before_the_environment_and_that_before_the_file(write, monkeypatch):
    file = write("ttft: 1.5\ntpot: 0.2\npolicy: edf\nmax_seqs: 8\n")
    monkeypatch.setenv("JAXSERVE_TPOT", "0.3")
    monkeypatch.setenv("JAXSERVE_POLICY", "llf")
    values = parse(SERVE, [f"--config={file}", "--policy=fcfs"])
    assert [values[name] for name in ("ttft", "tpot", "policy", "max_seqs", "chunking")] == [
        1.5,
        0.3,
        "fcfs",
        8,
        "adaptive",
    ]
    assert {name: values.origins.get(name) for name in ("ttft", "tpot", "policy", "chunking")} == {
        "ttft": f"{file} line 1",
        "tpot": "JAXSERVE_TPOT",
        "policy": "--policy",
        "chunking": None,
    }
    monkeypatch.setenv("JAXSERVE_CONFIG", file)
    assert parse(SERVE, ["--ttft=9"])["max_seqs"] == 8 and parse(SERVE, ["--ttft=9"])["ttft"] == 9


def test_a_flag_that_says_what_the_default_says_wins_too(write):
    file = write("reflection: false\ngrpc_port: 1234")
    assert parse(SERVE, [f"--config={file}"])["reflection"] is False
    values = parse(SERVE, [f"--config={file}", "--reflection", "--grpc_port=8470"])
    assert values["reflection"] is True and values["grpc_port"] == 8470


@pytest.mark.parametrize("text, value", [("128K", 131072), ("10M", 10 * 2**20), ("4096", 4096)])
def test_counts_have_units_everywhere(write, monkeypatch, text, value):
    assert count(text) == value
    assert parse(SERVE, [f"--max_model_len={text}"])["max_model_len"] == value
    assert parse(SERVE, [f"--config={write(f'max_model_len: {text}')}"])["max_model_len"] == value
    monkeypatch.setenv("JAXSERVE_MAX_MODEL_LEN", text)
    assert parse(SERVE, [])["max_model_len"] == value


def test_values_are_of_the_flags_kinds(write):
    file = write(
        "ttft: 2\nstep_time: 1e-3\npages: null\nmesh: spp=2,tp=3\nprefix_caching: "
        "no\ncompile_cache: ''\nprofile: none\n"
    )
    values = parse(SERVE, [f"--config={file}"])
    assert [
        values[name]
        for name in (
            "ttft",
            "step_time",
            "pages",
            "mesh",
            "prefix_caching",
            "compile_cache",
            "profile",
        )
    ] == [2.0, 0.001, None, "spp=2,tp=3", False, "", "none"]
    assert isinstance(values["ttft"], float)


def test_lists_are_flags_that_may_be_given_often(write):
    command = cli.load("generate")
    values = parse(command, [f"--config={write('stop: [a, b]')}"])
    assert list(values["stop"]) == ["a", "b"]


def test_a_file_serves_all_commands(write):
    file = write("port: 1\nmax_seqs: 3\n")
    assert parse(cli.load("generate"), [f"--config={file}", "--prompt=x"])["max_seqs"] == 3


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n...\n"])
def test_a_file_may_be_empty(write, text):
    assert from_file(write(text), SERVE.options) == {}


@pytest.mark.parametrize(
    "text, message",
    [
        ("prt: 1", "line 1: unknown setting 'prt'; did you mean port?"),
        ("\n\nzzzzzz: 1", "line 3: unknown setting 'zzzzzz'"),
        ("config: other.yaml", "line 1: unknown setting 'config'"),
        ("port: 1\nttft: 1\nport: 2", "line 3: port is given more than once"),
        ("port: x", "line 1: port: must be a whole number, not 'x'"),
        ("port: 1.5", "line 1: port: must be a whole number, not 1.5"),
        ("port: true", "line 1: port: must be a whole number, not True"),
        ("grpc_port: null", "line 1: grpc_port: must be a whole number, not None"),
        ("port: '128'", "line 1: port: must be a whole number, not '128'"),
        ("port: 65536", "line 1: port: 65536 is above the limit 65535"),
        ("port: [1]", "line 1: port: must be a whole number, not [1]"),
        ("ttft: soon", "line 1: ttft: must be a number, not 'soon'"),
        ("ttft: .nan", "line 1: ttft: must be a number, not nan"),
        ("ttft: 2026-01-01", "line 1: ttft: must be a number, not datetime.date"),
        ("reflection: 1", "line 1: reflection: must be true or false, not 1"),
        ("model: 3", "line 1: model: must be a text, not 3"),
        ("dtype: int8", "line 1: dtype: 'int8' is not one of auto, float32, bfloat16, float16"),
        ("mesh: ep=2", "line 1: mesh: 'ep=2' is not AXIS=DEGREE"),
        ("mesh: {tp: 2}", "line 1: mesh: has values inside; settings are flat"),
        ("server:\n  port: 1", "line 2: server: has values inside"),
        ("port: [[1]]", "line 1: port: has values inside"),
        ("? [a]\n: 1", "line 1: a name must be a plain text"),
        ("- port", "line 1: must be lines of `name: value`"),
        ("port", "line 1: must be lines of `name: value`"),
        ("port: 1\n---\nport: 2", "line 2: a second document begins"),
        ("---\n---\nport: 2", "line 2: a second document begins"),
        ("ttft: &a 1\ntpot: *a", "line 1: ttft: anchors, aliases and tags"),
        ("model: !!python/object/apply:os.system [ls]", "line 1: model: anchors, aliases and tags"),
        ("model: !!python/name:os.system x", "line 1: model: anchors, aliases and tags"),
        ("<<: {port: 1}", "line 1: <<: has values inside"),
        ("port: 1\n  ttft: 2", "line 2: not YAML: mapping values are not allowed here"),
        ("model: 'x", "not YAML: found unexpected end of stream"),
        ("model: \x01", "not YAML: "),
        (b"model: \xff", "is not a text in UTF-8"),
        ("#" * MAX_FILE_BYTES + "\n", "is larger than the limit, 65536 bytes"),
        ("model: " + "[" * 60_000, "line 1: model: has values inside"),
    ],
)
def test_mistakes_name_file_line_and_setting(capsys, write, text, message):
    file = write(text)
    code, out, err = run(capsys, "serve", f"--config={file}")
    assert code == 2 and not out and len(err.splitlines()) == 1, err
    assert err.startswith(f"jaxserve serve: --config: {file}") and message in err, err


def test_files_that_cannot_be_read_are_named(capsys, tmp_path):
    assert "No such file" in run(capsys, "serve", f"--config={tmp_path}/none")[2]
    assert "Is a directory" in run(capsys, "serve", f"--config={tmp_path}")[2]


def test_what_the_engine_refuses_names_where_it_is_from(capsys, write, monkeypatch):
    file = write("\nclasses: chat:ttft=x")
    assert (
        f"jaxserve serve: {file} line 2: classes: chat: ttft"
        in run(capsys, "serve", f"--config={file}")[2]
    )
    monkeypatch.setenv("JAXSERVE_CLASSES", "chat:ttft=y")
    assert (
        "jaxserve serve: JAXSERVE_CLASSES: classes: chat: ttft: 'y'"
        in run(capsys, "serve", f"--config={file}")[2]
    )


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("PORT", "x", "JAXSERVE_PORT: must be a whole number, not 'x'"),
        ("TTFT", "", "JAXSERVE_TTFT: must be a number, not ''"),
        ("REFLECTION", "maybe", "JAXSERVE_REFLECTION: must be true or false, not 'maybe'"),
        ("TTFT", "0", "JAXSERVE_TTFT: 0.0 is below"),
    ],
)
def test_mistakes_in_the_environment_name_the_variable(capsys, monkeypatch, name, text, message):
    monkeypatch.setenv(f"JAXSERVE_{name}", text)
    code, out, err = run(capsys, "serve")
    assert code == 2 and not out and message in err and len(err.splitlines()) == 1


def test_variables_that_are_no_settings_are_warned_of(monkeypatch, caplog):
    for name, value in {
        "TFTT": "1",
        "CACHE": "/x",
        "DATA": "/y",
        "PORT": "tcp://10.0.0.1:8470",
        "PORT_8470_TCP_ADDR": "10.0.0.1",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8470",
    }.items():
        monkeypatch.setenv(f"JAXSERVE_{name}", value)
    # what Kubernetes sets for a service of our name is not for us
    assert parse(SERVE, [])["port"] == 8000
    (record,) = caplog.records
    assert record.getMessage() == "'JAXSERVE_TFTT' is not a setting; did you mean ttft?"


def test_what_is_printed_reads_back_as_the_same(capsys, write, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CLASSES", "chat:ttft=0.5; batch:ttft=600 # no comment")
    monkeypatch.setenv("JAXSERVE_COMPILE_CACHE", "a\nb: 'é'\x01")
    file = write(
        "max_model_len: 8K\nstep_time: 1e-3\nmesh: tp=3\nprofile: 'null'\nprefix_caching: off\n"
    )
    code, first, _ = run(capsys, "serve", f"--config={file}", "--grpc_port=0", "--print_config")
    assert (
        code == 0
        and "max_model_len: 8192" in first
        and f"# {file} line 1" in first
        and "grpc_port: 0  # --grpc_port" in first
    )
    assert not any("#" in line for line in first.splitlines() if line.startswith("max_seqs:"))
    values = yaml.safe_load(first)
    assert (
        values.keys() == SERVE.options.keys() - {"config", "print_config", *DEGREES}
        and values["profile"] == "null"
    )
    for name in ("CLASSES", "COMPILE_CACHE"):
        monkeypatch.delenv(f"JAXSERVE_{name}")
    second = run(capsys, "serve", f"--config={write(first)}", "--print_config")[1]
    assert yaml.safe_load(second) == values and values["compile_cache"] == "a\nb: 'é'\x01"
    assert "print_config" not in first


def test_reading_settings_needs_no_jax(write):
    code = (
        "import sys; from jaxserve.cli import main as cli\nassert cli.main(['serve', '--config', "
        "sys.argv[1], '--print_config']) == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, write("port: 3")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "port: 3" in done.stdout, done.stderr
