import json
import re

import pytest

from jaxserve import llm
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import generate
from jaxserve.cli import main as cli
from jaxserve.settings.flags import help_of
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer, expected


def run(capsys, *arguments):
    """(exit code, what went to stdout, to stderr)"""
    code = cli.main(list(arguments))
    return code, *capsys.readouterr()


@pytest.fixture
def fake(monkeypatch):
    made = []

    def open_engine(config, progress, warm_up):
        made.append(config)
        return FakeReplica(), FakeTokenizer()

    monkeypatch.setattr(llm, "open_engine", open_engine)
    return made


def test_the_overview_names_every_command_on_one_line(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and run(capsys)[1] == out
    for name, (_, summary) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.M)
    assert len(out.splitlines()) < 28 and max(map(len, out.splitlines())) < 105


@pytest.mark.parametrize("name", ["serve", "doctor", "generate", "demo", "fetch", "bench serve"])
def test_help_tells_every_flag_and_nothing_else(name):
    command = cli.load(name)
    shown = help_of(f"jaxserve {name}", cli.COMMANDS[name][1], cli.load(name), 90)
    assert re.findall(r"^  --(?:\[no\])?(\w+)", shown, re.M) == list(command.options)
    assert max(map(len, shown.splitlines())) <= 90
    assert all(option.help.split()[0] in shown for option in command.options.values())


def test_help_shows_defaults_limits_and_choices():
    shown = " ".join(help_of("jaxserve serve", "", cli.load("serve"), 90).split())
    assert "--grpc_port=N gRPC port; 0 takes a free one (default 8470, 0 to 65535)" in shown
    assert "usage: jaxserve serve [MODEL ...] [flags]" in shown
    assert (
        "--dtype=auto|float32|bfloat16|float16 type of weights and KV; auto: float32 on CPUs,"
        in shown
    )
    assert "--[no]reflection serve gRPC reflection (default yes)" in shown


def test_flags_are_the_settings():
    own = {"config", "print_config"}
    configs = set(options_of(EngineConfig)) | set(options_of(ServerConfig))
    degrees = {f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "context")}
    cluster = {"registry", "cluster_ca", "advertise_address", "kv_port", "transfer"}
    assert set(cli.load("serve").options) == configs | own | degrees | cluster
    others = {*own, "prompt", "input", "json", "class_name", *SamplingParams.__dataclass_fields__}
    assert set(cli.load("generate").options) == set(options_of(EngineConfig)) | others | degrees


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sreve"], "'sreve' is not a command; did you mean 'serve'?"),
        (["serve", "--prt=1"], "jaxserve serve: unknown flag --prt; did you mean --port?"),
        (
            ["serve", "--grpc_port=65536"],
            "jaxserve serve: --grpc_port=65536: 65536 is above the limit 65535",
        ),
        (
            ["serve", "--grpc_port=x"],
            "jaxserve serve: --grpc_port=x: must be a whole number, not 'x'",
        ),
        (
            ["serve", "--dtype=int8"],
            "jaxserve serve: --dtype=int8: 'int8' is not one of auto, float32, bfloat16, float16",
        ),
        (
            ["serve", "--host=0.0.0.0"],
            "jaxserve serve: --host: '0.0.0.0' is not a loopback address",
        ),
        (["serve", "--mesh=tp=0"], "jaxserve serve: --mesh: tp: 0 is below the limit 1"),
        (["serve", "--mesh=ep=2"], "jaxserve serve: --mesh: 'ep=2' is not AXIS=DEGREE"),
        (
            ["serve", "--classes=chat:ttft=x"],
            "jaxserve serve: --classes: chat: ttft: 'x' is not a number",
        ),
        (["chat", "here", "now"], "jaxserve chat: 'now' is not a flag"),
        (["serve", "here", "now"], "jaxserve serve: --model: 'here'"),
        (["fetch"], "jaxserve fetch: give one NAME"),
        (["fetch", "nothing-known"], "jaxserve fetch: model: 'nothing-known'"),
        (["generate"], "jaxserve generate: --prompt: give either --prompt or --input"),
        (
            ["generate", "--prompt=x", "--temperature=-1"],
            "jaxserve generate: --temperature: must be a number from 0 to 100, not -1.0",
        ),
        (
            ["generate", "--prompt=x", "--n=1000"],
            "jaxserve generate: --n: must be a whole number from 1 to 128, not 1000",
        ),
        (
            ["generate", "--prompt=x", "--logit_bias=3"],
            "jaxserve generate: --logit_bias: '' is not a number",
        ),
        (
            ["generate", "--input=/no/such/file"],
            "jaxserve generate: --input: /no/such/file: No such file",
        ),
        (
            ["generate", "--prompt=x", "--model=/no/such/folder"],
            "jaxserve generate: --model: /no/such/folder: no such file",
        ),
    ],
)
def test_mistakes_are_named_without_a_traceback(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert message in err, err
    assert code == 2 and len(err.strip().splitlines()) == 1 and "Traceback" not in err and not out


def test_ctrl_c_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr(llm, "open_engine", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, out, err = run(capsys, "generate", "--prompt=x")
    assert (code, out, err) == (130, "", "\n")


def test_generate_writes_the_text(capsys, fake):
    code, out, _ = run(
        capsys, "generate", "--prompt=hi", "--max_tokens=4", "--mesh=spp=2,tp=3", "--dtype=bfloat16"
    )
    assert (code, out) == (0, bytes(expected(b"hi", 4)).decode() + "\n")
    assert (str(fake[0].mesh), fake[0].source.dtype) == ("spp=2,kvp=1,tp=3", "bfloat16")


def test_generate_writes_json_lines_in_the_order_of_the_input(capsys, fake, tmp_path):
    lines = [
        {"prompt": "abc", "max_tokens": 9},
        {"prompt_ids": [5, 6], "n": 2, "logprobs": 1},
        {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    code, out, _ = run(capsys, "generate", f"--input={path}", "--json", "--max_tokens=3")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt_ids"] for row in rows] == [
        list(b"abc"),
        [5, 6],
        [5, 6],
        list(b"<user>x"),
    ]
    assert [row["output_ids"] for row in rows] == [
        expected(b"abc", 9),
        expected([5, 6], 3, 0),
        expected([5, 6], 3, 1),
        expected(b"<user>x", 3),
    ]
    assert rows[0] == {
        "prompt_ids": list(b"abc"),
        "output_ids": expected(b"abc", 9),
        "text": bytes(expected(b"abc", 9)).decode(),
        "finish_reason": "length",
    }
    assert rows[1]["logprobs"] == [-0.5, -0.515625, -0.53125]
    assert rows[1]["top_logprobs"][0] == [[rows[1]["output_ids"][0], -0.5]]
    assert rows[3]["prompt_logprobs"] == [None, *[-1.0] * 6]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ("3", "must be an object"),
        ("{}", "must have one of prompt, prompt_ids, messages"),
        (
            '{"prompt": "x", "messages": []}',
            "must have one of prompt, prompt_ids, messages, not prompt and messages",
        ),
        ('{"prompt": "x", "temprature": 1}', "unknown field 'temprature'"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature: must be a number"),
        ('{"prompt": "x", "temperature": NaN}', "temperature: must be a number"),
        ('{"prompt": 3}', "prompt: must be a text"),
        ('{"prompt_ids": "x"}', "prompt_ids: must be a list"),
        ('{"prompt_ids": [1.5]}', "prompt_ids: must be a list"),
        ('{"messages": [{}]}', "messages: must be a list"),
        ('{"prompt": "x", "stop": 3}', "stop: must be a list"),
        ('{"prompt": "x", "stop_token_ids": "3"}', "stop_token_ids: must be a list"),
        ('{"prompt": "x", "logit_bias": 3}', "logit_bias: must map"),
        ('{"prompt": ""}', "prompt: is empty"),
        ('{"prompt_ids": [257]}', "prompt: id 257"),
        ('{"prompt": "x", "min_tokens": 300}', "min_tokens: 300"),
    ],
)
def test_mistakes_in_the_input_name_line_and_field(capsys, fake, tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, out, err = run(capsys, "generate", f"--input={path}", "--json")
    assert code == 2 and not out and f"{path} line 2: {message}" in err, err


def test_requests_have_the_class_of_their_line_else_of_the_flag(capsys, monkeypatch, tmp_path):
    seen = []

    class Engine(FakeReplica):
        def submit(self, request, sink):
            seen.append(request.slo.class_name)
            super().submit(request, sink)

    def open_engine(config, progress, warm_up):
        engine = Engine()
        engine.config = config
        return engine, FakeTokenizer()

    monkeypatch.setattr(llm, "open_engine", open_engine)
    path = tmp_path / "in.jsonl"
    flags = ("generate", "--max_tokens=1", "--classes=chat:ttft=0.5;batch:ttft=600")
    path.write_text(
        '{"prompt": "x"}\n{"prompt": "y", "class_name": "batch"}\n{"prompt": "z", "class_name": '
        "null}\n"
    )
    assert run(capsys, *flags, f"--input={path}", "--class_name=chat")[0] == 0 and seen == [
        "chat",
        "batch",
        None,
    ]
    for unknown in ('"other"', "3", "[]"):
        path.write_text(f'{{"prompt": "x"}}\n{{"prompt": "y", "class_name": {unknown}}}\n')
        code, out, err = run(capsys, *flags, f"--input={path}")
        assert (
            code == 2
            and not out
            and f"{path} line 2: slo.class_name: " in err
            and "known are chat, batch" in err
        ), err
    code, out, err = run(capsys, *flags, "--prompt=x", "--class_name=other")
    assert (
        code == 2
        and not out
        and "slo.class_name: 'other' is not a class of requests here" in err
        and len(seen) == 3
    )


def test_every_sampling_field_has_a_flag_and_help():
    assert set(generate.NAMES) == set(SamplingParams.__dataclass_fields__)


def test_sampling_flags_are_the_defaults_of_the_lines():
    values = dict.fromkeys(generate.NAMES) | {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "stop_token_ids": "1,2",
        "logit_bias": "3=-1.5",
    }
    defaults = generate.sampling_fields(values)
    line = generate.parse('{"prompt": "x", "temperature": 0.5}', "line 1", defaults)
    assert line.sampling == SamplingParams(
        temperature=0.5, stop=("a", "b"), stop_token_ids=(1, 2), logit_bias=((3, -1.5),)
    )
