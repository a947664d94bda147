"""What arrives at a simulated server, and when: recorded traces, lengths files and mixes calibrated to them.

`parse` reads one of
    FILE.jsonl[.gz]   Mooncake: timestamp, input_length, output_length, hash_ids. Options after a colon: `unit=ms|s` of the timestamps
                      (default ms, as in Mooncake's and veeksha's traces) and `block=N` tokens per hash id (default 512).
    FILE.csv[.gz]     by its header: Azure (TIMESTAMP, ContextTokens, GeneratedTokens); lengths (num_prefill_tokens,
                      num_decode_tokens); L-Eval (words, n_questions, ...). The last two have no times: rows are drawn without
                      replacement, and again once all are used, and arrive as a Poisson process of rate qps.
    poisson:OPTIONS   exponential gaps of mean 1 / qps.
    burst:OPTIONS     a Poisson process whose rate is a square wave of mean qps: `period` (60 s), of which the last `duty` (0.25) is at
                      `factor` (4) times the rate of the rest.
where OPTIONS name the lengths in tokens: `mix=NAME`, a row of MIXES, or `prompt=LENGTHS,output=LENGTHS` (with or without `mix=fixed`).
LENGTHS is N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA[:LOW:HIGH], the last cut off at LOW and HIGH.

The first arrival of a file with times is at 0. The first `requests` arrivals are taken (default: all of a file, 1000 of a generator);
then, where qps is given, recorded times are stretched so that what was taken comes at qps on average. Lengths depend on the seed alone,
so that one seed at several rates is the same work. Whatever is malformed raises ConfigError("workload", ...) with file, line and field.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NoReturn

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.request import Request, RequestError, SamplingParams, Slo

BLOCK = 512                                           # tokens per hash id in the public Mooncake traces
LONG = 100_000                                        # tokens; the shortest long prompt of medha_mixed has 100,628
REQUESTS = 1000                                       # of a generator, where not said
MOST_TOKENS = 2**31 - 1
WORD_TOKENS = 1.35                                    # tokens per English word (data/README 1.1)

CLASSES = (("short", 8192), ("medium", LONG - 1), ("long", MOST_TOKENS))     # by most prompt tokens, where arrivals name no kind

Lengths = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: `time` in seconds, lengths in tokens. Equal `blocks` (hash ids of `block` tokens each) are equal tokens; tokens
    beyond the last of them, all of them where there are none, are the request's own."""

    time: float
    prompt: int
    output: int
    kind: str = ""
    blocks: tuple[int, ...] | np.ndarray | None = None
    block: int = BLOCK


# --- distributions of lengths

CURVE = (0, .05, .1, .25, .5, .75, .9, .95, .99, 1)


def curve(*quantiles: int) -> Lengths:
    """Lengths with these quantiles at CURVE, geometric between them."""
    logs = np.log(quantiles)
    return lambda rng, count: np.exp(np.interp(rng.random(count), CURVE, logs))


def constant(value: float) -> Lengths:
    return lambda rng, count: np.full(count, value)


def uniform(low: float, high: float) -> Lengths:
    return lambda rng, count: rng.integers(int(low), int(high), count, endpoint=True)


def exponential(mean: float) -> Lengths:
    return lambda rng, count: rng.exponential(mean, count)


def lognormal(median: float, sigma: float, low: float = 1, high: float = MOST_TOKENS) -> Lengths:
    """A lognormal distribution cut off at low and high, drawn through its inverse. Errors: ValueError where nothing lies between them."""
    normal = NormalDist(math.log(median), sigma)
    first, last = normal.cdf(math.log(low)), normal.cdf(math.log(high))
    if last - first < 1e-9:
        raise ValueError(f"almost nothing of lognormal:{median:g}:{sigma:g} lies between {low:g} and {high:g}")
    inverse = lambda share: normal.inv_cdf(min(max(first + (last - first) * share, 1e-15), 1 - 1e-15))
    return lambda rng, count: np.clip(np.exp([inverse(share) for share in rng.random(count)]), low, high)


@dataclass(frozen=True)
class Part:
    """One class of requests in a mix. All its prompts begin with the same `system` blocks; a share of `follows` continues another of its
    prompts, LAG before it."""

    prompt: Lengths
    output: Lengths
    kind: str = ""
    share: float = 1.0
    system: int = 0
    follows: float = 0.0


# Quantiles at CURVE, measured in the files that data/README 1.1 names.
SHORT = curve(2, 29, 73, 574, 1712, 3730, 5683, 6559, 7435, 8032), curve(2, 43, 85, 229, 415, 629, 836, 923, 997, 1024)
LARGE = (curve(100628, 130608, 161871, 260355, 400446, 628526, 839720, 910611, 955280, 996935),
         curve(61, 137, 191, 341, 522, 672, 792, 882, 1060, 1578))
CHAT = (curve(891, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 126195),
        curve(1, 10, 24, 156, 350, 472, 597, 698, 1119, 2000))
LAG = curve(5, 99, 141, 229, 422, 901, 1660, 2129, 5104, 10514)     # from one turn to the next, Mooncake conversation
NEAR = 32                                            # prompts on either side of the lag: the longest that fits is continued


def _medha(percent: float) -> tuple[Part, ...]:
    return (Part(*SHORT, kind="short", share=1 - percent / 100), Part(*LARGE, kind="long", share=percent / 100))


def _tetris(mu: float, low: float, high: float) -> tuple[Part, ...]:
    """Only min, max and mean are published: sigma 0.8, data/README 1.3; outputs are not: those of CHAT."""
    return (Part(prompt=lognormal(math.exp(mu), 0.8, low, high), output=CHAT[1]),)


MIXES: dict[str, tuple[Part, ...]] = {
    "medha-0": (Part(*SHORT, kind="short"),), "medha-1": _medha(1), "medha-5": _medha(5), "medha-10": _medha(10),
    "sharegpt": (Part(
        prompt=curve(1, 7, 9, 16, 36, 150, 759, 1426, 2863, 3973), output=curve(1, 21, 42, 135, 283, 448, 682, 843, 999, 2384)),),
    "azure-conv": (Part(
        prompt=curve(2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050), output=curve(7, 41, 54, 85, 129, 395, 424, 451, 601, 1000)),),
    "mooncake-conversation": (Part(*CHAT, system=1, follows=0.44),),
    "mooncake-toolagent": (                          # tools as in the slice that 1.3 describes, shares fitted to Table 3
        Part(*CHAT, kind="chat", share=0.49, system=1, follows=0.58),
        Part(curve(6150, 6168, 6169, 6175, 6400, 7094, 7677, 7751, 8180, 9000), curve(3, 3, 3, 3, 3, 28, 35, 45, 60, 80), "tool", 0.35, 12),
        Part(curve(2960, 3015, 3030, 3125, 3142, 3161, 3260, 3359, 3472, 3700), curve(16, 16, 18, 20, 21, 23, 24, 24, 24, 30),
             "agent", 0.16, 5)),
    "tetris-short": _tetris(9.8126, 4e3, 95e3), "tetris-medium": _tetris(10.0656, 8e3, 142e3), "tetris-long": _tetris(10.4282, 16e3, 190e3),
}
FIXED = "fixed"


# --- the door

def parse(spec: str, *, qps: float | None = None, requests: int | None = None, seed: int = 0) -> list[Arrival]:
    """The arrivals that `spec` describes, by time. Errors: ConfigError."""
    if qps is not None and not (0 < qps < math.inf):
        _fault(f"qps must be above 0, not {qps:g}")
    if requests is not None and requests < 1:
        _fault(f"requests must be at least 1, not {requests}")
    if seed < 0:
        _fault(f"seed must not be below 0, not {seed}")
    name, _, text = spec.partition(":")
    if name in TIMES:
        return _generated(name, _options(text, ("mix", "prompt", "output", *TIMES[name][1])), qps, requests or REQUESTS, seed)
    if not (file := re.fullmatch(r"(.+?\.(?:jsonl|csv)(?:\.gz)?)(?::(.*))?", spec, re.DOTALL)):
        _fault(f"{spec!r} is neither a generator ({', '.join(TIMES)}) nor a file named .jsonl, .csv or one of these and .gz"
               + _near(name, TIMES))
    path = Path(file[1])
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return _recorded(_mooncake(path, _options(file[2], ("unit", "block"))), qps, requests)
    _options(file[2], ())
    found = _table(path)
    if not math.isnan(found[0].time):
        return _recorded(found, qps, requests)
    return _timed(_drawn(found, requests or len(found), seed), _poisson(_rate(qps, path.name), requests or len(found), seed, {}))


def to_request(arrival: Arrival, number: int, max_len: int, slo: Slo = Slo()) -> Request:      # noqa: B008 (frozen)
    """A greedy request of exactly `output` tokens, as far as `max_len` tokens a sequence leave room.

    Its prompt is made here: a token is the hash id of its block; a request's own tokens are all -1 - number, which no other has, and where
    it has no other tokens they are a view of that one. Errors: RequestError where the prompt leaves no room.
    """
    if arrival.prompt >= max_len:
        raise RequestError("prompt", f"has {arrival.prompt} tokens; with one token to generate the limit is {max_len - 1}")
    prompt = np.broadcast_to(np.int32(-1 - number), arrival.prompt)
    if arrival.blocks is not None and len(arrival.blocks):
        shared = np.repeat(np.asarray(arrival.blocks, np.int32), arrival.block)[:arrival.prompt]
        prompt = np.concatenate([shared, prompt[len(shared):]])
    sampling = SamplingParams(temperature=0.0, max_tokens=min(arrival.output, max_len - arrival.prompt), ignore_eos=True)
    return Request(str(number), prompt, sampling, arrival=arrival.time, slo=slo)


def class_of(prompt: int) -> str:
    """The kind of a request whose arrival names none."""
    return next(name for name, most in CLASSES if prompt <= most)


def summary(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """For printing. `span` from first to last in seconds; `rate` the inverse of the mean gap, 0 where there is none; `long` the share of
    prompts of at least `long_limit` tokens; `prompt` and `output` in tokens."""
    if not arrivals:
        return dict(count=0, span=0.0, rate=0.0, prompt={}, output={}, long=0.0, long_limit=LONG)
    prompts, outputs = (np.array([getattr(arrival, name) for arrival in arrivals]) for name in ("prompt", "output"))
    span = arrivals[-1].time - arrivals[0].time
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    return dict(count=len(arrivals), span=span, rate=rate, prompt=_figures(prompts), output=_figures(outputs),
                long=float((prompts >= LONG).mean()), long_limit=LONG)


def _figures(values: np.ndarray) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return dict(mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=int(values.max()))


def _fault(message: str) -> NoReturn:
    raise ConfigError("workload", message)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _options(text: str | None, known: Sequence[str]) -> dict[str, str]:
    """'a=1,b=2' as a dict."""
    options: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            _fault(f"unknown option {key!r}; known are {', '.join(known) or 'none'}{_near(key, known)}")
        if not equals or not value or key in options:
            _fault(f"{part!r} is not {key}=VALUE, given once")
        options[key] = value
    return options


def _number(name: str, text: str, low: float, high: float = math.inf) -> float:
    """The finite number that an option gives, from low to high."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        _fault(f"{name} must be a number {f'from {low:g} to {high:g}' if high < math.inf else f'of at least {low:g}'}, not {text!r}")
    return value


# --- generators

def _generated(shape: str, options: dict[str, str], qps: float | None, count: int, seed: int) -> list[Arrival]:
    parts, rng = _parts(options), np.random.default_rng((seed, 0))
    which = rng.choice(len(parts), count, p=[part.share for part in parts])
    lengths = np.empty((2, count), np.int64)
    for index, part in enumerate(parts):
        mine = which == index
        lengths[:, mine] = [np.clip(np.rint(draw(rng, int(mine.sum()))), 1, MOST_TOKENS) for draw in (part.prompt, part.output)]
    prompts, outputs = lengths.tolist()
    blocks = _blocks(parts, which.tolist(), prompts, rng) if any(part.system for part in parts) else [None] * count
    found = [Arrival(0.0, *rest) for rest in zip(prompts, outputs, (parts[index].kind for index in which), blocks)]
    return _timed(found, TIMES[shape][0](_rate(qps, shape), count, seed, options))


def _parts(options: dict[str, str]) -> tuple[Part, ...]:
    mix = options.get("mix", FIXED)
    given = [name for name in ("prompt", "output") if name in options]
    if mix != FIXED and mix not in MIXES:
        _fault(f"unknown mix {mix!r}; known are {', '.join((*MIXES, FIXED))}{_near(mix, (*MIXES, FIXED))}")
    if mix != FIXED and given:
        _fault(f"mix={mix} sets the lengths; {given[0]} goes with mix={FIXED} only")
    if mix == FIXED and len(given) < 2:
        _fault("lengths are needed: mix=NAME, or prompt=LENGTHS and output=LENGTHS")
    return MIXES[mix] if mix != FIXED else (Part(_lengths("prompt", options["prompt"]), _lengths("output", options["output"])),)


LENGTHS: dict[str, tuple[Callable[..., Lengths], int, int]] = {           # with the least and the most numbers it takes
    "constant": (constant, 1, 1), "uniform": (uniform, 2, 2), "exponential": (exponential, 1, 1), "lognormal": (lognormal, 2, 4),
}


def _lengths(name: str, text: str) -> Lengths:
    form, *words = text.split(":") if ":" in text or text.isalpha() else ("constant", text)
    if form not in LENGTHS:
        _fault(f"{name}: unknown distribution {form!r}; known are a number, {', '.join(LENGTHS)}{_near(form, LENGTHS)}")
    make, least, most = LENGTHS[form]
    if not least <= len(words) <= most or len(words) == 3:
        _fault(f"{name}: {form} takes {least if least == most else f'{least} or {most}'} numbers, not {len(words)}")
    sigma = 1 if form == "lognormal" else None
    values = [_number(name, word, 1e-6 if place == sigma else 1, MOST_TOKENS) for place, word in enumerate(words)]
    if form in ("uniform", "lognormal") and values[-2:] != sorted(values[-2:]) and len(words) == most:
        _fault(f"{name}: {values[-2]:g} to {values[-1]:g} is no range")
    try:
        return make(*values)
    except ValueError as error:
        _fault(f"{name}: {error}")


def _blocks(parts: Sequence[Part], which: list[int], prompts: list[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Hash ids of each prompt: those of its part's system prompt or of the earlier prompt that it continues, then new ones."""
    ends = np.cumsum([part.system for part in parts]).tolist()
    system = [np.arange(end - part.system, end, dtype=np.int32) for part, end in zip(parts, ends)]
    lags, follows = LAG(rng, len(prompts)), rng.random(len(prompts))
    earlier: list[list[int]] = [[] for _ in parts]
    continued: set[int] = set()
    blocks: list[np.ndarray] = []
    fresh = ends[-1]
    for number, (index, prompt) in enumerate(zip(which, prompts)):
        part, head = parts[index], system[index]
        if follows[number] < part.follows:
            place = len(earlier[index]) - round(lags[number])
            around = earlier[index][max(place - NEAR, 0):max(place + NEAR, 0)]
            fitting = [other for other in around if prompts[other] <= prompt and other not in continued]
            if fitting:
                parent = max(fitting, key=prompts.__getitem__)
                continued.add(parent)
                head = blocks[parent][:max(prompts[parent] // BLOCK, part.system)]
        head = head[:-(-prompt // BLOCK)]
        new = -(-prompt // BLOCK) - len(head)
        blocks.append(np.concatenate([head, np.arange(fresh, fresh + new, dtype=np.int32)]))
        earlier[index].append(number)
        fresh += new
    return blocks


# --- times

def _rate(qps: float | None, name: str) -> float:
    return qps if qps is not None else _fault(f"{name} has no times of its own: give qps, the requests per second")


def _poisson(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    return np.cumsum(np.random.default_rng((seed, 1)).exponential(1.0, count)) / qps


def _burst(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    """A process of unit rate, bent by the inverse of the expected number of arrivals up to a time."""
    period, factor = _number("period", options.get("period", "60"), 1e-6), _number("factor", options.get("factor", "4"), 1)
    duty = _number("duty", options.get("duty", "0.25"), 0, 1)
    quiet = (1 - duty) / (1 - duty + duty * factor)              # share of the arrivals that come at the low rate
    periods, rest = np.divmod(_poisson(qps, count, seed, {}) / period, 1)
    return (periods + np.interp(rest, (0, quiet, 1), (0, 1 - duty, 1))) * period


TIMES: dict[str, tuple[Callable[[float, int, int, dict[str, str]], np.ndarray], tuple[str, ...]]] = {
    "poisson": (_poisson, ()), "burst": (_burst, ("period", "factor", "duty")),
}


def _timed(arrivals: list[Arrival], times: np.ndarray) -> list[Arrival]:
    return [replace(arrival, time=time) for arrival, time in zip(arrivals, times.tolist())]


def _recorded(arrivals: list[Arrival], qps: float | None, requests: int | None) -> list[Arrival]:
    """In order, from time 0, cut to `requests`, and stretched to the mean rate qps."""
    taken = sorted(arrivals, key=lambda arrival: arrival.time)[:requests]
    times = np.array([arrival.time for arrival in taken]) - taken[0].time
    if qps is not None and len(taken) > 1:
        if times[-1] == 0:
            _fault(f"its first {len(taken)} arrivals come at one moment, which no qps can stretch; take more requests")
        times *= (len(taken) - 1) / qps / times[-1]
    return _timed(taken, times)


# --- files

def _text(path: Path) -> str:
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") if path.suffix == ".gz" else path.open(
                encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        there = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        _fault(f"there is no file {path}{_near(path.name, there)}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        _fault(f"{path} cannot be read: {error}")
    return text if text.strip() else _fault(f"{path} is empty")


def _length(where: str, field: str, value: Any) -> int:
    """A length in tokens, from JSON or CSV."""
    if isinstance(value, str) and value.strip().isascii() and re.fullmatch(r"-?\d{1,12}", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        _fault(f"{where}: {field} must be a whole number of tokens of at least 1, not {value!r:.80}")
    return value


def _mooncake(path: Path, options: dict[str, str]) -> list[Arrival]:
    unit, block = options.get("unit", "ms"), _length("options", "block", options.get("block", BLOCK))
    if unit not in ("ms", "s"):
        _fault(f"unit must be ms or s, not {unit!r}")
    dense: dict[int, int] = {}
    second, loose = (1e-3 if unit == "ms" else 1.0), "block" in options
    lines = enumerate(_text(path).split("\n"), 1)
    return [_line(f"{path}:{number}", text, second, dense, block, loose) for number, text in lines if text.strip()]


def _line(where: str, text: str, second: float, dense: dict[int, int], size: int, loose: bool) -> Arrival:
    """One line of a trace. `dense` renumbers hash ids from 0 on. Where `loose`, ids may be too many or too few."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fault(f"{where}: is not JSON: {error}")
    if not isinstance(row, dict):
        _fault(f"{where}: must be an object with timestamp, input_length, output_length, hash_ids; not {text:.80}")
    for field in ("timestamp", "input_length", "output_length"):
        if field not in row:
            _fault(f"{where}: {field} is missing{_near(field, row)}")
    time, ids = row["timestamp"], row.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e15:
        _fault(f"{where}: timestamp must be a number of at least 0, not {time!r:.80}")
    prompt, output = (_length(where, field, row[field]) for field in ("input_length", "output_length"))
    if ids is None:
        return Arrival(time * second, prompt, output, block=size)
    if not isinstance(ids, list) or any(type(value) is not int for value in ids):
        _fault(f"{where}: hash_ids must be a list of whole numbers, not {ids!r:.80}")
    expected = -(-prompt // size)
    if len(ids) != expected and not loose:
        _fault(f"{where}: hash_ids must have {expected} ids for {prompt} tokens in blocks of {size}, not {len(ids)}; give the trace's own "
               "block size with :block=N, which also allows too many ids or too few")
    blocks = np.array([dense.setdefault(value, len(dense)) for value in ids[:expected]], np.int32)
    return Arrival(time * second, prompt, output, blocks=blocks, block=size)


def _table(path: Path) -> list[Arrival]:
    """A CSV file of any known kind; without times, `time` is NaN."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    try:
        header = tuple(reader.fieldnames or ())
        fields = max(TABLES, key=lambda fields: len(set(fields) & set(header)))
        for field in fields:
            if field not in header:
                said = "; ".join(", ".join(fields) for fields in TABLES)
                _fault(f"{path}:1: column {field} is missing{_near(field, header)} (known sets of columns: {said})")
        found = [arrival for row in reader for arrival in TABLES[fields](f"{path}:{reader.line_num}", row)]
    except csv.Error as error:
        _fault(f"{path}:{reader.line_num}: is not CSV: {error}")
    return found or _fault(f"{path} has a header and no rows")


MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?")


def _azure(where: str, row: dict[str, str]) -> list[Arrival]:
    moment = MOMENT.fullmatch(row["TIMESTAMP"] or "")
    try:
        time = np.datetime64(f"{moment[1]}T{moment[2]}", "ns") if moment else None
    except ValueError:
        time = None
    if time is None:
        _fault(f"{where}: TIMESTAMP must be like 2023-11-16 18:15:46.6805900, not {row['TIMESTAMP']!r}")
    seconds = float((time - np.datetime64("2020-01-01", "ns")) / np.timedelta64(1, "s"))
    prompt, output = (_length(where, field, row[field]) for field in ("ContextTokens", "GeneratedTokens"))
    return [Arrival(seconds, prompt, output)]


def _pair(where: str, row: dict[str, str]) -> list[Arrival]:
    prompt, output = (_length(where, field, row[field]) for field in ("num_prefill_tokens", "num_decode_tokens"))
    return [Arrival(math.nan, prompt, output, "long" if prompt >= LONG else "short")]


def _leval(where: str, row: dict[str, str]) -> list[Arrival]:
    """A document and its questions, each a request of its own; words are counted, tokens are not."""
    words, question, answer = (
        _number(f"{where}: {field}", row[field] or "", 0, 1e9) for field in ("words", "avg_question_words", "avg_answer_words"))
    prompt, output = (max(round(WORD_TOKENS * count), 1) for count in (words + question, answer))
    return [Arrival(math.nan, prompt, output)] * int(_number(f"{where}: n_questions", row["n_questions"] or "", 1, 10_000))


TABLES: dict[tuple[str, ...], Callable[[str, dict[str, str]], list[Arrival]]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("num_prefill_tokens", "num_decode_tokens"): _pair,
    ("words", "n_questions", "avg_question_words", "avg_answer_words"): _leval,
}


def _drawn(arrivals: list[Arrival], count: int, seed: int) -> list[Arrival]:
    """`count` of them in random order, each as often as any other, give or take one."""
    rng = np.random.default_rng((seed, 0))
    orders = [rng.permutation(len(arrivals)) for _ in range(-(-count // len(arrivals)))]
    return [arrivals[index] for index in np.concatenate(orders)[:count]]
