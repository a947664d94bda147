"""Mistakes on the command lines of `jaxserve simulate` and `plan`: each is reported in one line
that names the flag and the limit, before anything is simulated."""

from __future__ import annotations

import csv
import gzip
import json

import pytest

from jaxserve.cli import main as cli
from jaxserve.lab.simulate.run import System

LINE = dict(timestamp=0, input_length=600, output_length=5, hash_ids=[1, 2])
LENGTHS = "num_prefill_tokens,num_decode_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TIMED = "arrived_at," + LENGTHS
MOMENT = "2023-11-16 18:15:46.68"


def line(**changed) -> str:
    return json.dumps({**LINE, **changed}) + "\n"


LANES = ("--mesh=kvp=4,tp=2",)
FLAGS = [
    # systems
    (["--model=llama9"], "--model: 'llama9' is not one of"),
    (["--model="], "--model: '' is not one of"),
    (["--gpu=b200"], "--gpu=b200: 'b200' is not one of a100, h100, h200"),
    (["--gpu="], "--gpu=: '' is not one of"),
    (["--mesh="], "--mesh: is empty"),
    (["--mesh=tp"], "--mesh: 'tp' is not AXIS=DEGREE"),
    (["--mesh=ep=2"], "--mesh: 'ep=2' is not AXIS=DEGREE"),
    (["--mesh=tp=0"], "--mesh: tp: 0 is below the limit 1"),
    (["--mesh=spp=0"], "--mesh: spp: 0 is below the limit 1"),
    (["--mesh=tp=-1"], "--mesh: 'tp=-1' is not AXIS=DEGREE"),
    (["--mesh=tp=1.5"], "--mesh: 'tp=1.5' is not AXIS=DEGREE"),
    (["--mesh=tp=2,tp=4"], "--mesh: 'tp=4' is not AXIS=DEGREE"),
    (["--mesh=tp=3"], "--mesh: spp=1,kvp=1,tp=3: sums over 3 ranks were not measured on a100"),
    (["--mesh=tp=16"], "--mesh: spp=1,kvp=1,tp=16: more ranks than the 8 devices of a node"),
    (["--mesh=spp=64"], "--mesh: spp=64,kvp=1,tp=1: more stages than 32 layers"),
    (["--model=llama3-70b", "--mesh=tp=1"], "131 GiB of weights per device leave no room"),
    (["--lookahead=9"], "--lookahead=9: 9 is above the limit 8"),
    (["--lookahead=-1"], "--lookahead=-1: -1 is below the limit 0"),
    (["--lookahead=one"], "--lookahead=one: must be a whole number"),
    # loads
    (
        ["--workload="],
        "--workload: '' is neither a generator (poisson, gamma, constant, burst, loogle, scbench, "
        "sharegpt-o3) nor",
    ),
    (["--workload=poison:mix=medha-5"], "did you mean poisson?"),
    (["--workload=poisson"], "--workload: lengths are needed"),
    (["--workload=poisson:mix=medha5"], "--workload: unknown mix 'medha5'"),
    (["--workload=poisson:mixx=medha-5"], "--workload: unknown option 'mixx'"),
    (["--workload=poisson:prompt=0,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=-5,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=ten,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=10"], "--workload: lengths are needed"),
    (["--workload=poisson:prompt=10,prompt=20,output=1"], "given once"),
    (["--workload=poisson:prompt=uniform:9:1,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=uniform:1,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=lognormal:0:1,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=lognormal:9:1:500:900:3,output=1"], "--workload: prompt"),
    (["--workload=poisson:prompt=exponential:-1,output=1"], "--workload: prompt"),
    (["--workload=burst:mix=medha-5,duty=2"], "--workload: duty must be a number from 0 to 1"),
    (["--workload=burst:mix=medha-5,factor=0"], "--workload: factor must be a number of at least"),
    (["--workload=burst:mix=medha-5,period=0"], "--workload: period must be a number of at least"),
    (["--workload=poisson:mix=medha-5,duty=0.5"], "--workload: unknown option 'duty'"),
    (["--workload=/no/such.csv"], "--workload: there is no file /no/such.csv"),
    (["--workload=/no/such.txt"], "--workload: '/no/such.txt' is neither"),
    (["--workload=/tmp"], "--workload: '/tmp' is neither"),
    (["--qps=0"], "--qps: must be above 0, not 0"),
    (["--qps=-1"], "--qps: must be above 0, not -1"),
    (["--qps=inf"], "--qps: must be above 0, not inf"),
    (["--qps=nan"], "--qps=nan: must be a number"),
    (["--qps=fast"], "--qps=fast: must be a number"),
    (["--requests=0"], "--requests=0: 0 is below the limit 1"),
    (["--requests=1.5"], "--requests=1.5: must be a whole number"),
    (["--seed=-1"], "--seed=-1: -1 is below the limit 0"),
    (["--duration=0"], "--duration=0: 0.0 is below the limit 0.001"),
    # scheduling
    (["--policy=lifo"], "--policy=lifo: 'lifo' is not one of"),
    (["--chunking=dynamic"], "--chunking: 'dynamic' is not one of static, adaptive"),
    (["--chunking=adaptive:512"], "--chunking: 'adaptive:512' is neither adaptive nor static:N"),
    (["--chunking=static:0"], "--chunk_tokens: 0 is below the limit 1"),
    (["--chunking=static:x"], "--chunking: 'static:x' is neither adaptive nor static:N"),
    (["--chunk_tokens=0"], "--chunk_tokens=0: 0 is below the limit 1"),
    (["--max_seqs=0"], "--max_seqs=0: 0 is below the limit 1"),
    (["--block_size=0"], "--block_size=0: 0 is below the limit 1"),
    (["--pages=1"], "--pages=1: 1 is below the limit 2"),
    (["--sharing=2"], "--sharing=2: 2.0 is above the limit 1"),
    (["--ttft=0"], "--ttft=0: 0.0 is below the limit"),
    (["--tpot=-1"], "--tpot=-1: -1.0 is below the limit"),
    (["--ttft_stretch=0.5"], "--ttft_stretch=0.5: 0.5 is below the limit 1"),
    (["--step_time=0"], "--step_time=0: 0.0 is below the limit"),
    (["--placement=near"], "--placement=near: 'near' is not one of"),
    (
        ["--exchange=ring"],
        "--exchange=ring: 'ring' is not one of gather, pass_q, pass_kv, visit, auto",
    ),
    (["--exchange=auto"], "--exchange: auto has no effect on one lane"),
    (["--planner=cdsp"], "--planner: cdsp has no effect on one lane"),
    (["--placement=zigzag"], "--placement: zigzag has no effect on one lane"),
    ([*LANES, "--placement=striped"], "--placement: striped deals out prompts of more than"),
    ([*LANES, "--planner=cdsp"], "--placement: grow cannot follow --planner=cdsp"),
    (
        [*LANES, "--placement=striped", "--planner=fixed-8", "--exchange=auto"],
        "--planner: fixed-8 needs a kvp that 8 divides; --mesh has kvp=4",
    ),
    ([*LANES, "--improvement=0.2"], "--improvement: has no effect with --planner=none"),
    (["--classes=chat:ttft=1"], "--classes: no request is of the class chat; requests are long, "),
    (["--classes=chat:ttft"], "--classes: chat: ttft: '' is not a number"),
    (["--classes=short:ttft=0"], "--classes: short: ttft: 0.0 is below the limit"),
    (
        ["--classes=short:ttft=1", "--baseline=loongserve"],
        "--baseline: loongserve knows no --classes",
    ),
    (["--kv_cache_dtype=int4"], "--kv_cache_dtype=int4: 'int4' is not one of auto, fp8"),
    (
        ["--host_cache_gib=4", "--kv_store=mooncake://host:1"],
        "--kv_store: mooncake://host:1: no shared store is simulated",
    ),
    (["--host_cache_gib=0.0001"], "--host_cache_gib: 0.0001 GiB: a block has "),
    # output
    (["--baseline=vllm"], "--baseline: 'vllm' is not one of sarathi-512, "),
    (["--baseline=lrs"], "--baseline: 'lrs' is slack-unshared now"),
    (["--baseline=fcfs"], "--baseline: 'fcfs' is fcfs-unshared now"),
    (["--baseline=fcfs-unshared,vllm"], "--baseline: 'vllm' is not one of sarathi-512, "),
    (["--json=/no/such/s.json"], "--json: /no/such/s.json: No such file"),
    (["--csv=/no/such/s.csv"], "--csv: /no/such/s.csv: No such file"),
    (["--plot=/no/such/p.png"], "--plot: /no/such/p.png: No such file"),
    (["--plot=picture.txt"], "--plot: 'picture.txt' ends neither in .png nor in .svg"),
    (["--plot=picture"], "--plot: 'picture' ends neither in .png nor in .svg"),
    (["--sead=1"], "unknown flag --sead; did you mean --seed?"),
]
FILES = [
    ("a.jsonl", "", "is empty"),
    ("a.jsonl", "{\n", "a.jsonl:1: is not JSON"),
    ("a.jsonl", "[]\n", "a.jsonl:1: must be an object with timestamp"),
    ("a.jsonl", '{"timestamp": 0}\n', "a.jsonl:1: input_length is missing"),
    ("a.jsonl", line() + line(timestamp=-1), "a.jsonl:2: timestamp must be a number of at least 0"),
    ("a.jsonl", line(input_length=0), "a.jsonl:1: input_length must be a whole number of tokens"),
    ("a.jsonl", line(output_length=1.5), "a.jsonl:1: output_length must be a whole number"),
    ("a.jsonl", line(hash_ids=[1]), "a.jsonl:1: hash_ids must have 2 ids for 600 tokens"),
    ("a.jsonl", line(hash_ids="x"), "a.jsonl:1: hash_ids must be a list of whole numbers"),
    ("a.jsonl", line(**{"class": "a b"}), "a.jsonl:1: class must be 1 to 64 letters, digits"),
    ("a.jsonl", line(**{"class": 3}), "a.jsonl:1: class must be 1 to 64 letters, digits"),
    ("a.csv", "class," + LENGTHS + "a b,2,3\n", "a.csv:2: class must be 1 to 64 letters"),
    ("a.csv", "a,b\n1,2\n", "a.csv:1: column TIMESTAMP is missing"),
    ("a.csv", LENGTHS, "has a header and no rows"),
    ("a.csv", LENGTHS + "1,2,3\n", "a.csv:2: has more fields than the 2 of the header"),
    ("a.csv", LENGTHS + "1\n", "a.csv:2: num_decode_tokens must be a whole number"),
    ("a.csv", LENGTHS + "0,1\n", "a.csv:2: num_prefill_tokens must be a whole number"),
    ("a.csv", LENGTHS + "1.5,1\n", "a.csv:2: num_prefill_tokens must be a whole number"),
    (
        "a.csv",
        "arrival," + LENGTHS + "1,2,3\n",
        "column arrival looks like times",
    ),
    ("a.csv", TIMED + "soon,2,3\n", "a.csv:2: arrived_at must be a number from 0 to 1e+12"),
    ("a.csv", TIMED + "-1,2,3\n", "a.csv:2: arrived_at must be a number from 0 to 1e+12"),
    ("a.csv", AZURE + "today,2,3\n", "a.csv:2: TIMESTAMP must be like"),
    ("a.csv", AZURE + f"{MOMENT},x,3\n", "a.csv:2: ContextTokens must be a whole number"),
    ("a.csv.gz", b"no gzip", "cannot be read"),
    ("a.csv", b"\xff\xfe\x00", "cannot be read"),
]


def simulate(capsys, *flags: str) -> tuple[int, str, str]:
    """(exit code, what went to stdout, to stderr)"""
    code = cli.main(["simulate", *flags])
    return code, *capsys.readouterr()


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr("jaxserve.lab.cli.simulate.execute", lambda *_, **__: pytest.fail("it ran"))


@pytest.mark.parametrize("flags, said", FLAGS, ids=[" ".join(flags) for flags, _ in FLAGS])
def test_a_flag(capsys, nothing_runs, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    qps = [] if any(flag.startswith("--qps") for flag in flags) else ["--qps=1"]
    code, _, err = simulate(capsys, *qps, *flags)
    assert code == 2 and len(err.splitlines()) == 1 and said in err, err
    assert not list(tmp_path.iterdir()), "a file is left"


@pytest.mark.parametrize("name, text, said", FILES, ids=[said for *_, said in FILES])
def test_a_file(capsys, nothing_runs, tmp_path, name, text, said):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = simulate(capsys, f"--workload={path}", "--qps=1")
    assert code == 2 and len(err.splitlines()) == 1, err
    assert err.startswith("jaxserve simulate: --workload: ") and said in err, err


PLAN = [
    (["--gpus=0"], "--gpus: '0' is not a number of GPUs from 1 to 1024"),
    (["--gpus="], "--gpus: '' is not a number of GPUs"),
    (["--gpus=eight"], "--gpus: 'eight' is not a number of GPUs"),
    (["--attainment=0"], "--attainment=0: 0.0 is below the limit 0.01"),
    (["--best=-1"], "--best=-1: -1 is below the limit 0"),
    (["--model=llama3-70b", "--gpus=1"], "--gpus: no mesh of 1 a100 runs the model"),
    (["--qps=0"], "--qps: must be above 0, not 0"),
    (["--plot=a.txt"], "--plot: 'a.txt' ends neither in .png nor in .svg"),
    (["--classes=chat:ttft=1"], "--classes: no request is of the class chat; requests are "),
    (
        ["--host_cache_gib=4", "--kv_store=mooncake://host:1"],
        "--kv_store: mooncake://host:1: no shared store is simulated",
    ),
]


@pytest.mark.parametrize("flags, said", PLAN, ids=[" ".join(flags) for flags, _ in PLAN])
def test_a_flag_of_plan(capsys, monkeypatch, flags, said):
    monkeypatch.setattr(System, "replica", lambda *_: pytest.fail("it ran"))
    qps = [] if any(flag.startswith("--qps") for flag in flags) else ["--qps=1"]
    assert cli.main(["plan", *qps, *flags]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and said in err, err


# --- what is taken, and reported


def test_times_of_a_file_of_lengths_are_used(capsys, tmp_path):
    path = tmp_path / "timed.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(TIMED + "10,100.0,5\n13,200,5\n11,300,5\n")
    out = tmp_path / "s.csv"
    assert simulate(capsys, f"--workload={path}", f"--csv={out}")[0] == 0
    rows = [row.split(",") for row in out.read_text().splitlines()]
    arrival, prompt = rows[0].index("arrival"), rows[0].index("prompt")
    found = sorted((float(row[arrival]), int(row[prompt])) for row in rows[1:])
    assert found == [(0.0, 100), (1.0, 300), (3.0, 200)]


TRACES = {
    "a.jsonl": "".join(
        json.dumps({**row, "hash_ids": [1, 2], "class": kind}) + "\n"
        for kind, row in (
            ("chat", dict(timestamp=7000, input_length=600, output_length=3)),
            ("batch", dict(timestamp=9500, input_length=700, output_length=4)),
        )
    ),
    "azure.csv": f"class,{AZURE}"
    "chat,2023-11-16 18:15:46.5,600,3\nbatch,2023-11-16 18:15:49.0,700,4\n",
    "lengths.csv": f"class,{TIMED}chat,3,600,3\nbatch,5.5,700,4\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_requests_of_a_trace_come_at_its_times_and_have_their_classes(capsys, tmp_path, name):
    """On lanes as on one: the objectives of a class are those of its requests."""
    path = tmp_path / name
    path.write_text(TRACES[name])
    out = tmp_path / "s.csv"
    classes = "--classes=chat:ttft=5;batch:ttft=40,tpot=1"
    lanes = ("--mesh=kvp=4,tp=2", "--placement=striped", "--planner=cdsp", "--exchange=auto")
    assert simulate(capsys, f"--workload={path}", classes, *lanes, f"--csv={out}")[0] == 0
    with open(out, newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["arrival"]))
    found = [(float(row["arrival"]), row["kind"], float(row["due"])) for row in rows]
    assert found == [(0.0, "chat", 5.0), (2.5, "batch", 42.5)]
    assert [(row["prompt"], row["output"]) for row in rows] == [("600", "3"), ("700", "4")]


def test_refused_requests_are_told_with_the_reason(capsys):
    load = ("--workload=poisson:prompt=100000,output=1", "--qps=1", "--requests=7")
    code, out, _ = simulate(capsys, *load, "--pages=100")
    assert code == 1 and "jaxserve refused 7: prompt: " in out
    assert "KV of 25,600 tokens per lane" in out
    code, out, _ = simulate(capsys, *load)
    assert code == 0 and "refused" not in out


def test_percentiles_say_over_how_many(capsys):
    load = ("--workload=poisson:prompt=1000,output=200", "--qps=50", "--requests=60")
    _, out, _ = simulate(capsys, *load, "--duration=2")
    header, _, row = out.splitlines()[2:5]
    assert header.split()[:2] == ["finished", "begun"]
    finished, begun = row.split()[2:4]
    assert int(finished.split("/")[0]) < int(begun) <= 60
