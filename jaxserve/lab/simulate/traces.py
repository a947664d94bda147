"""Reads recorded traces and files of lengths. Whatever is malformed raises ConfigError("workload",
...) with file, line and field."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.lab.simulate.arrival import BLOCK, LONG, MOST_TOKENS, Arrival
from jaxserve.lab.simulate.spec import did_you_mean, fault, to_number
from jaxserve.settings.schema.objectives import CLASS_NAME

CLASS = "class"  # optional column and field: the kind of a request, see `--classes`
ARRIVED_AT = "arrived_at"  # column of seconds in a file of lengths
TIME_COLUMN = re.compile(r"arriv|time", re.IGNORECASE)
SECONDS = {"ms": 1e-3, "s": 1.0}  # by unit of a trace's times
WORD_TOKENS = 1.35  # tokens per English word (data/README 1.1)


def _text(path: Path) -> str:
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as file
        ):
            text = file.read()
    except FileNotFoundError:
        names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        fault(f"there is no file {path}{did_you_mean(path.name, names)}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        fault(f"{path} cannot be read: {error}")
    if not text.strip():
        fault(f"{path} is empty")
    return text


def _length(where: str, field: str, value: Any) -> int:
    """Checks a length in tokens, from JSON or CSV."""
    if (
        isinstance(value, str)
        and value.strip().isascii()
        and re.fullmatch(r"-?\d{1,12}(\.0+)?", value.strip())
    ):
        value = int(value.partition(".")[0])
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        fault(f"{where}: {field} must be a whole number of tokens of at least 1, not {value!r:.80}")
    return value


def _kind(where: str, value: Any) -> str:
    """Checks the name of a class, which may be missing; from JSON or CSV."""
    if value in (None, ""):
        return ""
    if not isinstance(value, str) or not CLASS_NAME.fullmatch(value):
        fault(f"{where}: {CLASS} must be 1 to 64 letters, digits, - and _, not {value!r:.80}")
    return value


def mooncake(path: Path, options: dict[str, str]) -> list[Arrival]:
    """Reads a trace in Mooncake's form."""
    unit = options.get("unit", "ms")
    block = _length("options", "block", options.get("block", BLOCK))
    if unit not in SECONDS:
        fault(f"unit must be ms or s, not {unit!r}")
    dense: dict[int, int] = {}
    second = SECONDS[unit]
    loose = "block" in options
    lines = enumerate(_text(path).split("\n"), 1)
    return [
        _line(f"{path}:{number}", text, second, dense, block, loose)
        for number, text in lines
        if text.strip()
    ]


def _line(
    where: str, text: str, second: float, dense: dict[int, int], size: int, loose: bool
) -> Arrival:
    """Parses a line of a trace. `dense` renumbers hash ids from 0 on. Where `loose`, ids may be too
    many or too few."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        fault(f"{where}: is not JSON: {error}")
    if not isinstance(row, dict):
        fault(
            f"{where}: must be an object with timestamp, input_length, output_length, hash_ids; "
            f"not {text:.80}"
        )
    for field in ("timestamp", "input_length", "output_length"):
        if field not in row:
            fault(f"{where}: {field} is missing{did_you_mean(field, row)}")
    time = row["timestamp"]
    ids = row.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e15:
        fault(f"{where}: timestamp must be a number of at least 0, not {time!r:.80}")
    prompt, output = (
        _length(where, field, row[field]) for field in ("input_length", "output_length")
    )
    kind = _kind(where, row.get(CLASS))
    if ids is None:
        return Arrival(time * second, prompt, output, kind, block=size)
    if not isinstance(ids, list) or any(type(value) is not int for value in ids):
        fault(f"{where}: hash_ids must be a list of whole numbers, not {ids!r:.80}")
    expected = -(-prompt // size)
    if len(ids) != expected and not loose:
        fault(
            f"{where}: hash_ids must have {expected} ids for {prompt} tokens in blocks of "
            f"{size}, not {len(ids)}; give the trace's own block size with :block=N, which also "
            "allows too many ids or too few"
        )
    blocks = np.array([dense.setdefault(value, len(dense)) for value in ids[:expected]], np.int32)
    return Arrival(time * second, prompt, output, kind, blocks, size)


def table(path: Path) -> list[Arrival]:
    """Reads a CSV file of any known kind; without times, `time` is NaN."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    try:
        header = tuple(reader.fieldnames or ())
        fields = max(TABLES, key=lambda fields: len(set(fields) & set(header)))
        for field in fields:
            if field not in header:
                tables = "; ".join(", ".join(fields) for fields in TABLES)
                fault(
                    f"{path}:1: column {field} is missing{did_you_mean(field, header)} "
                    "(known sets of "
                    f"columns: {tables})"
                )
        _check_columns(f"{path}:1", header, fields)
        arrivals = []
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                fault(f"{where}: has more fields than the {len(header)} of the header")
            arrivals += TABLES[fields](where, row)
    except csv.Error as error:
        fault(f"{path}:{reader.line_num}: is not CSV: {error}")
    return arrivals or fault(f"{path} has a header and no rows")


def _check_columns(where: str, header: Sequence[str], fields: Sequence[str]) -> None:
    """Refuses times that would be passed over."""
    for column in header:
        if column not in fields and TIME_COLUMN.search(column):
            fault(f"{where}: column {column} looks like times, which {ARRIVED_AT} has (seconds)")


MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?")


def _azure(where: str, row: dict[str, str]) -> list[Arrival]:
    moment = MOMENT.fullmatch(row["TIMESTAMP"] or "")
    time = None
    if moment:
        with contextlib.suppress(ValueError):
            time = np.datetime64(f"{moment[1]}T{moment[2]}", "ns")
    if time is None:
        fault(
            f"{where}: TIMESTAMP must be like 2023-11-16 18:15:46.6805900, not {row['TIMESTAMP']!r}"
        )
    seconds = float((time - np.datetime64("2020-01-01", "ns")) / np.timedelta64(1, "s"))
    prompt, output = (
        _length(where, field, row[field]) for field in ("ContextTokens", "GeneratedTokens")
    )
    return [Arrival(seconds, prompt, output, _kind(where, row.get(CLASS)))]


def _pair(where: str, row: dict[str, str]) -> list[Arrival]:
    prompt, output = (
        _length(where, field, row[field]) for field in ("num_prefill_tokens", "num_decode_tokens")
    )
    kind = _kind(where, row.get(CLASS)) or ("long" if prompt >= LONG else "short")
    return [Arrival(math.nan, prompt, output, kind)]


def _timed_pair(where: str, row: dict[str, str]) -> list[Arrival]:
    time = to_number(f"{where}: {ARRIVED_AT}", row[ARRIVED_AT] or "", 0, 1e12)
    return [replace(arrival, time=time) for arrival in _pair(where, row)]


def _leval(where: str, row: dict[str, str]) -> list[Arrival]:
    """A document and its questions, each a request of its own; words are counted, tokens are
    not."""
    words, question, answer = (
        to_number(f"{where}: {field}", row[field] or "", 0, 1e9)
        for field in ("words", "avg_question_words", "avg_answer_words")
    )
    prompt, output = (max(round(WORD_TOKENS * count), 1) for count in (words + question, answer))
    return [Arrival(math.nan, prompt, output)] * int(
        to_number(f"{where}: n_questions", row["n_questions"] or "", 1, 10_000)
    )


TABLES: dict[tuple[str, ...], Callable[[str, dict[str, str]], list[Arrival]]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("num_prefill_tokens", "num_decode_tokens"): _pair,
    (ARRIVED_AT, "num_prefill_tokens", "num_decode_tokens"): _timed_pair,
    ("words", "n_questions", "avg_question_words", "avg_answer_words"): _leval,
}
