"""Replays Mooncake's public traces live against a server of a tiny random model, and puts the hit
rate that the server tells beside that of a plain LRU cache over the trace's hash ids.

    python -m experiments.mooncake.live_replay --data=DATA

A block of the trace, 512 tokens, is one page of the server here (`--page`), and all lengths are
scaled by as much. The LRU cache knows nothing of our own: it takes the requests in their order, one
after the other, and has as many pages as the server tells that it has.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.clients.served import ServerError, serving
from experiments.mooncake.figure import OPTIONS, WORKLOADS, MooncakeSettings
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

BLOCK = 512  # tokens of a hash id in the traces
REPLAY = [
    Option("workloads", str, "conversation,synthetic", "traces, as NAME,NAME"),
    *(option for option in OPTIONS if option.name == "data"),
    Option("requests", int, 1500, "the first ones of a trace", 1),
    Option("page", int, 8, "tokens that a block becomes, and of a page", 1, BLOCK),
    Option("pages", str, "4096,16384", "of the server, as N,N: one replay each"),
    Option("time_scale", float, 0.5, "factor of the trace's times", 1e-6),
    Option("json", str, None, "file for all figures"),
]


# --- the plain LRU cache


@dataclass(frozen=True)
class Line:
    """A request of a trace, in tokens of the replay."""

    ids: tuple[int, ...]
    prompt: int
    output: int


def lines(file: Path, requests: int, page: int) -> Iterator[Line]:
    """The first requests of a trace by time; a block's tokens become `page`, and the tokens of a
    last block that is not full as many fewer, rounded up."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt") as text:
        rows = sorted((json.loads(line) for line in text), key=lambda row: row["timestamp"])
    for row in rows[:requests]:
        full, rest = divmod(row["input_length"], BLOCK)
        prompt = full * page + -(-rest * page // BLOCK)
        yield Line(
            tuple(row["hash_ids"]), prompt, max(1, round(row["output_length"] * page / BLOCK))
        )


def lru_hit_rate(requests: Sequence[Line], page: int, pages: int) -> float:
    """The share of all prompts' tokens that a cache of `pages` pages has when each comes.

    A prompt hits its leading blocks that are there, but never its last token, whose KV must be
    computed. Its full pages are kept, and those of its output; the least recently used goes, of one
    request the last first.
    """
    cache: OrderedDict[Any, None] = OrderedDict()
    hits = 0
    for number, request in enumerate(requests):
        full = request.prompt // page
        found = 0
        while found < full and request.ids[found] in cache:
            found += 1
        hits += min(found, (request.prompt - 1) // page) * page
        written = (request.prompt + request.output - 1) // page  # the last token is never read
        keys = [*request.ids[:full], *((number, place) for place in range(full, written))]
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > pages:
            cache.popitem(last=False)
    return hits / sum(request.prompt for request in requests)


# --- the live replay


def replayed(file: Path, pages: int, values: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The line of `jaxserve bench serve` that replays a trace on a server with `pages` pages.
    Errors: ServerError."""
    page = values["page"]
    out = scratch / "replay.jsonl"
    flags = (
        *(f"--pages={pages}", f"--block_size={page}", "--max_seqs=16", "--profile=none"),
        "--admission=queue",
    )
    with serving("random:tiny", flags, scratch) as url:
        command = [
            *(sys.executable, "-m", "jaxserve", "bench", "serve", f"--url={url}"),
            *(f"--workload={file}", f"--requests={values['requests']}", "--warmup=0"),
            *(f"--length_scale={page / BLOCK}", f"--time_scale={values['time_scale']}"),
            f"--json={out}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"bench serve: {(done.stderr or done.stdout).strip()[-500:]}")
    return json.loads(out.read_text())


def run(values: dict[str, Any]) -> int:
    settings = MooncakeSettings.of({**values, "seed": 0})
    rows = []
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in values["workloads"].split(","):
            file = settings.file(name) if name in WORKLOADS else None
            if file is None:
                raise ConfigError("workloads", f"{name}: no such trace in {settings.data}")
            requests = list(lines(file, values["requests"], values["page"]))
            for pages in map(int, values["pages"].split(",")):
                found = replayed(file, pages, values, Path(folder))["figures"]
                expected = lru_hit_rate(requests, values["page"], pages)
                unbounded = lru_hit_rate(requests, values["page"], 10**9)
                live = found["prefix_hit_rate"]
                figures.append(
                    {"trace": name, "pages": pages, "live": live, "lru": expected, **found}
                )
                rows.append(
                    [
                        name,
                        f"{found['done']} of {found['requests']}",
                        str(pages),
                        *(f"{share:.2%}" for share in (live, expected)),
                        f"{100 * (live - expected):+.2f}",
                        f"{unbounded:.2%}",
                        f"{found['ttft']['p50'] * 1e3:.0f}",
                        f"{found['lag']['p99'] * 1e3:.0f}",
                    ]
                )
                print(
                    f"{name}, {pages} pages: {live:.2%} live, {expected:.2%} LRU", file=sys.stderr
                )
    heads = ["trace", "done", "pages", "live hits", "LRU hits", "points", "unbounded"]
    print(table([*heads, "TTFT ms p50", "late ms p99"], rows))
    keep(values, replays=figures)
    return 0


COMMAND = Command({"replay": REPLAY}, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "live_replay",
            "public traces against a live server, and an LRU cache beside it",
            COMMAND,
            sys.argv[1:],
            ServerError,
        )
    )
