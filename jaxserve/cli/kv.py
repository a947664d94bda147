"""Finds, keeps and copies cached blocks of prompts on the replicas of a running server."""

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

ABOUT = """\
Asks the operators' port (--admin_port) of a replica or of a conductor, with a key that
`jaxserve keys --add=NAME --admin` made if the server has keys. Blocks are those of the full
blocks of a prompt, given by --prompt, --prompt_file or --tokens.

  jaxserve kv --url=http://127.0.0.1:8001 --find --prompt_file=contract.txt

  jaxserve kv --url=http://127.0.0.1:8001 --lease=600 --prompt_file=contract.txt

  jaxserve kv --url=http://127.0.0.1:8001 --replicate=10.0.0.2:8480 --prompt_file=contract.txt
"""
ANSWER_SECONDS = 660.0  # a copy may take that long
ACTIONS = ("find", "lease", "leases", "release", "replicate")
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
    if action == "leases":
        return _call(values, "GET", action, None)
    if action == "release":
        return _call(values, "POST", action, {"lease": values["release"]})
    body = {"prompt": _prompt(values)}
    body |= {name: values[name] for name in ("tenant", "cache_salt") if values[name]}
    if action == "lease":
        body |= {"seconds": values["lease"], "replica": values["replica"]}
    elif action == "replicate":
        body |= {"replica": values["replicate"], "source": values["source"]}
    return _call(values, "POST", action, body)


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


def _call(values: Mapping[str, Any], method: str, action: str, body: Any) -> Any:
    """Returns the answer of one route. Errors: RequestError."""
    url = f"{values['url'].rstrip('/')}/admin/kv/{action}"
    key = values["api_key"] or os.environ.get("JAXSERVE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=ANSWER_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError("url", f"{values['url']} does not answer: {error}") from None
    try:
        content = answer.json()
    except ValueError:
        raise ConfigError("url", f"{url} answers {answer.status_code} and no JSON") from None
    if answer.status_code != 200:
        fault = content.get("error", {}) if isinstance(content, dict) else {}
        said = fault.get("message", "") if isinstance(fault, dict) else str(fault)
        raise RequestError("", said or f"{url} answers {answer.status_code}")
    return content


def _shown(action: str, answer: Any) -> str:
    if action == "release":
        return f"released {answer['released']}"
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
