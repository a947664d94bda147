"""The operators' routes about cached blocks, and the command that asks them."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.cli.main import main
from tests.replica.pools import BLOCK, FilesOf, PoolOf
from tests.server.fakes import FakeReplica
from tests.server.keyed import TWO
from tests.server.test_remote_replica import Offered, offered  # noqa: F401

PROMPT = list(range(3, 20))  # four full blocks of four tokens, and a part
IDS = ",".join(map(str, PROMPT))


class Operated:
    """A server whose replica has a pool with some of a prompt's blocks, and its operators' port."""

    def __init__(self, serve, made: PoolOf | FilesOf | None = None, **config):
        self.made = made or PoolOf()
        engine = FakeReplica()
        engine.kv_pool = self.made.pool
        self.served = serve(engine, admin_port=0, **config)
        self.url = f"http://127.0.0.1:{self.served.server.server.ports['admin']}"

    def hold(self, blocks: int = 4, salt: str = "") -> None:
        self.made.hold(np.array(PROMPT, np.int32), blocks, salt)

    def post(self, action: str, key: str = "", **body) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{self.url}/admin/kv/{action}"
        return httpx.post(url, json=body, headers=headers, timeout=60)


@pytest.fixture
def operated(serve) -> Operated:
    return Operated(serve)


def test_an_operator_finds_keeps_and_releases_blocks(operated):
    operated.hold()
    (found,) = operated.post("find", prompt=PROMPT).json()
    assert (found["on_devices"], found["blocks"], found["block_size"]) == (4, 4, BLOCK)
    lease = operated.post("lease", prompt=PROMPT, seconds=60).json()
    assert lease["on_devices"] == 4
    leases = httpx.get(f"{operated.url}/admin/kv/leases", timeout=60).json()
    assert leases == [lease]
    assert operated.post("release", lease=lease["id"]).status_code == 200
    assert operated.post("release", lease=lease["id"]).status_code == 404


def test_a_prompt_may_be_a_text(operated):
    found = operated.post("find", prompt="some text of a prompt, and more of it")
    assert found.status_code == 200 and found.json()[0]["blocks"] > 0


@pytest.mark.parametrize(
    ("action", "body", "field", "status"),
    [
        ("find", {}, "prompt", 400),
        ("find", {"prompt": []}, "prompt", 400),
        ("find", {"prompt": [-1]}, "prompt", 400),
        ("find", {"prompt": [10**9]}, "prompt", 400),
        ("find", {"prompt": [3] * 100_000}, "prompt", 400),
        ("find", {"prompt": [3], "unknown": 1}, "unknown", 400),
        ("lease", {"prompt": PROMPT}, "seconds", 400),
        ("lease", {"prompt": PROMPT, "seconds": 0}, "seconds", 400),
        ("lease", {"prompt": PROMPT, "seconds": 1e9}, "seconds", 400),
        ("lease", {"prompt": PROMPT, "seconds": 5}, "prompt", 404),
        ("lease", {"prompt": PROMPT, "seconds": 5, "replica": "x"}, "replica", 400),
        ("replicate", {"prompt": PROMPT, "replica": "x"}, "replica", 400),
        ("release", {"lease": "unknown"}, "lease", 404),
    ],
)
def test_mistakes_name_the_field(operated, action, body, field, status):
    answer = operated.post(action, **body)
    assert answer.status_code == status and field in answer.text


def test_a_replica_without_a_pool_says_so(serve):
    served = serve(FakeReplica(), admin_port=0)
    url = f"http://127.0.0.1:{served.server.server.ports['admin']}/admin/kv/leases"
    assert "no pool" in httpx.get(url, timeout=60).text


def test_only_admin_keys_may_ask_and_tenants_prefixes_are_apart(serve, key_file):
    made = Operated(serve, api_keys=str(key_file(TWO)))
    made.hold(salt="tenant:salt")
    for key in ("", "a-key"):
        assert made.post("find", key, prompt=PROMPT).status_code in (401, 403)
    find = lambda **whose: made.post("find", "r-key", prompt=PROMPT, **whose).json()[0][
        "on_devices"
    ]
    assert find() == 0 and find(tenant="tenant", cache_salt="salt") == 4


# --- the command


def said(capsys, operated: Operated, *flags: str) -> tuple[int, str]:
    code = main(["kv", f"--url={operated.url}", *flags])
    output = capsys.readouterr()
    return code, output.err if code else output.out


def test_the_command_finds_keeps_and_releases(operated, capsys, tmp_path):
    operated.hold(3)
    code, text = said(capsys, operated, "--find", f"--tokens={IDS}")
    assert code == 0 and text.splitlines()[2].split() == ["-", "4", "3", "4"]
    code, text = said(capsys, operated, "--lease=60", f"--tokens={IDS}", "--json")
    lease = json.loads(text)
    assert code == 0 and lease["on_devices"] == 3
    assert lease["id"] in said(capsys, operated, "--leases")[1]
    assert said(capsys, operated, f"--release={lease['id']}") == (0, f"released {lease['id']}\n")
    file = tmp_path / "prompt.txt"
    file.write_text("a text")
    assert said(capsys, operated, "--find", f"--prompt_file={file}")[0] == 0


def test_mistakes_of_the_command_are_one_line(operated, capsys):
    for flags in (
        [],
        ["--find", "--leases"],
        ["--find"],
        ["--find", "--tokens=a,b"],
        ["--find", "--prompt=a", "--tokens=1"],
        ["--find", "--prompt_file=/nowhere"],
        ["--lease=60", f"--tokens={IDS}"],
        ["--release=unknown"],
        ["--leases", "--url=http://127.0.0.1:1"],
    ):
        code, text = said(capsys, operated, *flags)
        (mistake,) = [line for line in text.splitlines() if line.startswith("jaxserve kv: ")]
        assert code == 2 and text.endswith(mistake + "\n")


def test_blocks_go_from_one_server_to_another_as_files(serve, capsys, tmp_path):
    one, other = Operated(serve, FilesOf()), Operated(serve, FilesOf())
    prompt = np.array(PROMPT, np.int32)
    blocks = one.made.fill(prompt, 3)
    folder = tmp_path / "blocks"
    assert said(capsys, one, f"--get={folder}", f"--tokens={IDS}") == (0, "3 blocks\n")
    assert said(capsys, other, f"--put={folder}") == (0, "3 blocks\n")
    assert said(capsys, other, f"--put={folder}") == (0, "0 blocks\n")  # they are there
    assert other.made.pool.find(prompt, "")[0].below == 3
    assert (other.made.pool.get(prompt, "", 0, 1 << 20).blocks == blocks).all()
    assert said(capsys, one, f"--get={folder}", f"--tokens={IDS}")[0] == 2  # it is there
    (file,) = folder.iterdir()
    file.write_bytes(b"no file")
    code, text = said(capsys, other, f"--put={folder}")
    assert code == 2 and "safetensors" in text


def test_a_replica_without_host_memory_has_no_files(operated):
    operated.hold()
    assert "--host_cache_gib" in operated.post("get", prompt=PROMPT).text


# --- over a session


def test_a_conductor_asks_the_pool_of_a_replica_on_another_process(offered):  # noqa: F811
    made = PoolOf()
    prompt = np.array(PROMPT, np.int32)
    made.hold(prompt, 4)
    offered.behind.kv_pool = made.pool
    pool = offered.reached().kv_pool
    assert pool.find(prompt, "") == made.pool.find(prompt, "")
    lease = pool.lease(prompt, "", 9.0, "")
    assert pool.leases() == [lease] == made.pool.leases()
    assert pool.release(lease.id) and not pool.release(lease.id)
    with pytest.raises(RequestError, match="seconds") as refusal:
        pool.lease(prompt, "", -1.0, "")
    assert refusal.value.field == "seconds"
