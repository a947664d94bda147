"""Finds, keeps, copies and moves cached blocks of prompts on the replicas of a running server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from jaxserve.api.errors import RequestError
from jaxserve.cli.display import table
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.store.kv_file import read_kv_file

ABOUT = """\
Asks the operators' port (--admin_port) of a replica or of a conductor, with a key that
`jaxserve keys --add=NAME --admin` made if the server has keys. Blocks are those of the full
blocks of a prompt, given by --prompt, --prompt_file or --tokens.

  jaxserve kv --url=http://127.0.0.1:8001 --find --prompt_file=contract.txt

  jaxserve kv --url=http://127.0.0.1:8001 --lease=600 --prompt_file=contract.txt

  jaxserve kv --url=http://127.0.0.1:8001 --replicate=10.0.0.2:8480 --prompt_file=contract.txt

  jaxserve kv --url=http://127.0.0.1:8001 --get=blocks --prompt_file=contract.txt
"""
ANSWER_SECONDS = 660.0  # a copy may take that long
ACTIONS = ("find", "lease", "leases", "release", "replicate", "get", "put")
OPTIONS = [
    Option("url", str, None, "address of the operators' port of a server, http://HOST:PORT"),
    Option(
        "api_key",
        str,
        None,
        "admin key, where the server has keys; default: JAXSERVE_API_KEY, which no list of "
        "processes shows",
    ),
    Option("find", bool, False, "show which replicas have blocks of the prompt"),
    Option(
        "lease",
        float,
        None,
        "keep the prompt's blocks where they are for this number of seconds",
        0,
    ),
    Option("leases", bool, False, "show the leases that have not ended"),
    Option("release", str, None, "end the lease with this id"),
    Option("replicate", str, None, "copy the prompt's blocks to the replica of this name"),
    Option("get", str, None, "write the prompt's blocks to this new folder, as safetensors"),
    Option("put", str, None, "give the server the blocks of a folder that --get wrote"),
    Option("model", str, "", "model that is meant, where the server has several"),
    Option("json", bool, False, "print the server's answer as JSON"),
]
PROMPT = [
    Option("prompt", str, None, "text of the prompt"),
    Option("prompt_file", str, None, "file with the text of the prompt, in UTF-8"),
    Option("tokens", str, None, "ids of the prompt's tokens, separated by commas"),
    Option("replica", str, "", "with --lease: on this replica; default: that which has most of it"),
    Option(
        "source", str, "", "with --replicate: from this replica; default: that which has most of it"
    ),
    Option("tenant", str, "", "tenant of the keys whose requests have the prompt"),
    Option("cache_salt", str, "", "the cache_salt of these requests"),
]


def run(values: dict[str, Any]) -> int:
    asked = [name for name in ACTIONS if values[name] not in (None, False)]
    if len(asked) != 1:
        flags = ", ".join(f"--{name}" for name in ACTIONS)
        raise ConfigError("find", f"give one of {flags}")
    if not values["url"]:
        raise ConfigError("url", "is missing: the address of the operators' port of a server")
    (action,) = asked
    answer = _ask(values, action)
    print(json.dumps(answer) if values["json"] else _shown(action, answer))
    return 0


def _ask(values: Mapping[str, Any], action: str) -> Any:
    """Returns the server's answer. Errors: ConfigError, RequestError."""
    model = {"model": values["model"]} if values["model"] else {}
    if action == "leases":
        return _call(values, "GET", action, params=model)
    if action == "release":
        return _call(values, "POST", action, json={**model, "lease": values["release"]})
    if action == "put":
        return _put(values)
    body = {"prompt": _prompt(values)}
    body |= _whose(values)
    if action == "get":
        return _get(values, body)
    if action == "lease":
        body |= {"seconds": values["lease"], "replica": values["replica"]}
    elif action == "replicate":
        body |= {"replica": values["replicate"], "source": values["source"]}
    return _call(values, "POST", action, json=body)


def _whose(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("model", "tenant", "cache_salt") if values[name]}


def _get(values: Mapping[str, Any], body: dict[str, Any]) -> dict[str, int]:
    """Writes files of blocks, each as large as the server sends at once. Errors: ConfigError,
    RequestError."""
    rows = _call(values, "POST", "find", json=body)
    if len(rows) != 1:
        raise RequestError("", "this is a conductor: --get asks the port of a replica")
    (found,) = rows
    held = found["on_devices"] + max(found["below"], 0)
    if not held:
        raise RequestError("", "the server has no block of the prompt")
    folder = Path(values["get"])
    try:
        folder.mkdir(mode=0o700)
        first = 0
        while first < held:
            content = _send(values, "POST", "get", json={**body, "first": first}).content
            (folder / f"{first:08}.safetensors").write_bytes(content)
            first += len(read_kv_file(content).blocks)
    except OSError as error:
        raise ConfigError("get", f"{folder}: {error.strerror}") from None
    return {"blocks": first}


def _put(values: Mapping[str, Any]) -> dict[str, int]:
    """Sends files of blocks. Errors: ConfigError, RequestError."""
    files = sorted(Path(values["put"]).glob("*.safetensors"))
    if not files:
        raise ConfigError("put", f"{values['put']} has no safetensors files")
    taken = 0
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError("put", f"{file}: {error.strerror}") from None
        answer = _send(values, "POST", "put", content=content, params=_whose(values))
        taken += answer.json()["blocks"]
    return {"blocks": taken}


def _prompt(values: Mapping[str, Any]) -> str | list[int]:
    given = [name for name in ("prompt", "prompt_file", "tokens") if values[name] is not None]
    if len(given) != 1:
        raise ConfigError("prompt", "give one of --prompt, --prompt_file and --tokens")
    if given == ["prompt"]:
        return values["prompt"]
    if given == ["prompt_file"]:
        try:
            return Path(values["prompt_file"]).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError("prompt_file", str(error.strerror)) from None
        except UnicodeDecodeError:
            raise ConfigError("prompt_file", "is not UTF-8") from None
    try:
        return [int(id) for id in values["tokens"].split(",")]
    except ValueError:
        raise ConfigError("tokens", "must be ids, separated by commas") from None


def _call(values: Mapping[str, Any], method: str, action: str, **what: Any) -> Any:
    """Returns the answer of one route. Errors: ConfigError, RequestError."""
    answer = _send(values, method, action, **what)
    try:
        return answer.json()
    except ValueError:
        raise ConfigError("url", f"{values['url']} answers with something else") from None


def _send(values: Mapping[str, Any], method: str, action: str, **what: Any) -> httpx.Response:
    """Returns the response of one route. Errors: ConfigError, RequestError."""
    url = f"{values['url'].rstrip('/')}/admin/kv/{action}"
    key = values["api_key"] or os.environ.get("JAXSERVE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url, headers=headers, timeout=ANSWER_SECONDS, **what)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError("url", f"{values['url']} does not answer: {error}") from None
    if answer.status_code != 200:
        try:
            content = answer.json()
        except ValueError:
            content = {}
        fault = content.get("error", {}) if isinstance(content, dict) else {}
        said = fault.get("message", "") if isinstance(fault, dict) else str(fault)
        raise RequestError("", said or f"{url} answers {answer.status_code}")
    return answer


def _shown(action: str, answer: Any) -> str:
    if action == "release":
        return f"released {answer['released']}"
    if action in ("get", "put"):
        return f"{answer['blocks']} blocks"
    if action in ("lease", "leases"):
        rows = answer if isinstance(answer, list) else [answer]
        headers = ["replica", "lease", "blocks on devices", "below", "seconds left"]
        return table(
            headers,
            [
                [
                    one["replica"] or "-",
                    one["id"],
                    str(one["on_devices"]),
                    str(one["below"]),
                    f"{one['seconds']:.0f}",
                ]
                for one in rows
            ],
        )
    rows = answer if isinstance(answer, list) else [answer]
    return table(
        ["replica", "blocks of the prompt", "held", "tokens of a block"],
        [
            [
                one["replica"] or "-",
                str(one["blocks"]),
                str(one["on_devices"] + max(one["below"], 0)),
                str(one["block_size"]),
            ]
            for one in rows
        ],
    )


COMMAND = Command({"what to do": OPTIONS, "prompt": PROMPT}, run, ABOUT)
