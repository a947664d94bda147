"""Every setting of jaxserve, once: frozen dataclasses whose fields carry help and limits. The
command line's flags are made from them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT_CLASS = "default"  # what requests that name no class are called in metrics


class ConfigError(ValueError):
    """A setting that cannot be used. `field` is its name, which is also the flag's."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


def option(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
) -> Any:
    """A dataclass field with what a flag needs: help, limits (inclusive), choices."""
    return dataclasses.field(
        default=default, metadata={"help": help, "low": low, "high": high, "choices": choices}
    )


class Checked:
    """Base of the config classes: limits are checked when an object is made."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            meta = f.metadata
            if value is None or not meta:
                continue
            if meta["choices"] and value not in meta["choices"]:
                raise ConfigError(
                    f.name, f"{value!r} is not one of {', '.join(map(str, meta['choices']))}"
                )
            if meta["low"] is not None and value < meta["low"]:
                raise ConfigError(f.name, f"{value} is below the limit {meta['low']}")
            if meta["high"] is not None and value > meta["high"]:
                raise ConfigError(f.name, f"{value} is above the limit {meta['high']}")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Degrees of the three axes. A replica is stages x lanes x ranks."""

    spp: int = option(1, "pipeline stages (ranges of layers)", low=1)
    kvp: int = option(1, "lanes (shares of KV and of tokens)", low=1)
    tp: int = option(1, "tensor parallel ranks", low=1)

    @property
    def devices(self) -> int:
        return self.spp * self.kvp * self.tp

    @classmethod
    def parse(cls, text: str) -> MeshConfig:
        """'spp=2,kvp=2,tp=3' -> MeshConfig(2, 2, 3); axes left out are 1. Errors: ConfigError."""
        degrees: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in ("spp", "kvp", "tp") or name in degrees or not value.isdigit():
                raise ConfigError(
                    "mesh",
                    f"{part!r} is not AXIS=DEGREE, each of spp, kvp, tp at most once, for example spp=2,kvp=2,tp=3",
                )
            degrees[name] = int(value)
        return cls(**degrees)

    def __str__(self) -> str:
        return f"spp={self.spp},kvp={self.kvp},tp={self.tp}"


@dataclasses.dataclass(frozen=True)
class CacheConfig(Checked):
    """KV cache of one replica. Pages are counted per lane."""

    block_size: int = option(16, "tokens per KV block (and per page)", low=1, high=1024)
    pages: int | None = option(None, "KV pages per lane; default: from kv_memory_gib", low=2)
    kv_memory_gib: float = option(
        1.0, "memory for KV pages per device, in GiB, where pages is not given", low=0.001
    )
    lane_tokens: int | None = option(
        None,
        "tokens of a request that a lane holds before the next joins; default: as many as fit",
        low=1,
    )
    placement: str = option(
        "grow",
        "lanes that the blocks of a long prompt go to: the next lane once one holds lane_tokens "
        "(grow); evenly over all lanes if it is longer than lane_tokens, or over those that a planner "
        "chooses (striped, zigzag); block after block to another lane (round_robin, random)",
        choices=("grow", "striped", "zigzag", "round_robin", "random"),
    )
    prefix_caching: bool = option(True, "reuse the KV of equal prefixes")
    kv_cache_dtype: str = option(
        "auto",
        "type of KV: auto, that of the weights, or fp8 (e4m3 with a scale for each vector), half the "
        "bytes of bfloat16 and 4 significant bits",
        choices=("auto", "fp8"),
    )


@dataclasses.dataclass(frozen=True)
class Objectives(Checked):
    """What requests of a class are promised."""

    ttft: float = option(
        2.0, "objective: seconds to the first token, where a request names none", low=0.001
    )
    ttft_stretch: float = option(
        3.0, "objective for long prompts, where higher: this many times its prefill alone", low=1
    )
    tpot: float = option(
        0.1, "objective: seconds per output token, where a request names none", low=0.0001
    )


@dataclasses.dataclass(frozen=True)
class SchedulerConfig(Objectives):
    """How requests are scheduled. Its own objectives are those of requests that name no class."""

    policy: str = option(
        "fcfs",
        "order of prefill: by arrival, deadline, slack in seconds, or slack as a share of the time given",
        choices=("fcfs", "edf", "lrs", "slack"),
    )
    chunking: str = option(
        "static",
        "prefill tokens of a step: as many as chunk_tokens, or fewer so that decodes meet their objective",
        choices=("static", "adaptive"),
    )
    max_seqs: int = option(16, "sequences that run at once", low=1, high=4096)
    chunk_tokens: int = option(
        512, "most prefill tokens of one step on one lane", low=1, high=65536
    )
    min_chunk: int = option(
        64, "fewest prefill tokens of a chunk, and tokens of a row where chunks share a step", low=1
    )
    sharing: float = option(
        0.95,
        "most of a step's time for others beside a prompt of several steps (adaptive chunks)",
        low=0,
        high=1,
    )
    classes: str = option(
        "",
        "objectives of requests that name a class, as chat:ttft=0.5,tpot=0.05;batch:ttft=600,stretch=20,tpot=1; what "
        "a class leaves out is as for all others",
    )
    exchange: str = option(
        "gather",
        "how queries of a prompt on several lanes and its blocks meet: queries go to all lanes (gather) or "
        "round a ring (pass_q), blocks round a ring (pass_kv), what is predicted to be fastest in each step "
        "(auto), or what the context parallel paper's Algorithms 1 and 5 say (alg1, alg5)",
        choices=("gather", "pass_q", "pass_kv", "auto", "alg1", "alg5"),
    )
    planner: str = option(
        "none",
        "how many lanes compute a prompt: chosen for each of its chunks so that it ends soonest "
        "(cdsp), chosen once for all of it (single), always N (fixed-N), or by lane_tokens (none); "
        "needs a placement of striped or zigzag and an exchange other than gather",
        choices=("none", "single", "cdsp", "fixed-2", "fixed-4", "fixed-8", "fixed-16"),
    )
    improvement: float | None = option(
        None,
        "share of a prompt's time that more lanes must save for it to get them (planner); default: by "
        "the load, as `jaxserve profile` found out, else 0.1",
        low=0,
        high=0.99,
    )
    admission: str = option(
        "queue",
        "requests that cannot have their first token in time: they wait (queue), or are refused when they "
        "come, as are those that would make others late (predict; needs a profile)",
        choices=("queue", "predict"),
    )
    step_time: float = option(
        0.25,
        "most seconds of a step without decodes or of a prompt of several steps (adaptive chunks)",
        low=0.0001,
    )
    max_queue: int = option(4096, "requests that wait before new ones are refused", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.objectives  # a mistake in `classes` is told when the object is made

    @functools.cached_property
    def objectives(self) -> Mapping[str | None, Objectives]:
        """By class of requests; None: of those that name none."""
        return _classes(self.classes, self)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(filter(None, self.objectives))

    @property
    def tile(self) -> int:
        """Prefill chunks that share a step are computed in rows of so many tokens; a chunk's share
        of the budget is in whole rows."""
        return min(self.min_chunk, self.chunk_tokens)

    def stripe(self, block_size: int) -> int:
        """Blocks that a prompt which is dealt out over lanes has in a row on each: as many as a row
        has tokens."""
        return max(1, self.tile // block_size)

    @property
    def tiles(self) -> int:
        """Rows of a step on one lane."""
        return -(-self.chunk_tokens // self.tile)


def _classes(text: str, default: Objectives) -> dict[str | None, Objectives]:
    """'chat:ttft=0.5,tpot=0.05;batch:stretch=20' -> objectives by class, None's too; the rest is
    `default`'s. Errors: ConfigError."""
    found: dict[str | None, Objectives] = {None: default}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, fields = map(str.strip, part.partition(":"))
        if not CLASS_NAME.fullmatch(name):
            raise ConfigError(
                "classes",
                f"{name!r} is not a name of 1 to 64 letters, digits, - and _, as in chat:ttft=0.5,tpot=0.05",
            )
        if name == DEFAULT_CLASS:
            raise ConfigError("classes", f"{name} stands for requests that name no class")
        if name in found:
            raise ConfigError("classes", f"{name} is there twice")
        found[name] = _class(name, fields, default)
    return found


def _class(name: str, text: str, default: Objectives) -> Objectives:
    names = {"ttft": "ttft", "stretch": "ttft_stretch", "tpot": "tpot"}
    given: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        field, _, value = map(str.strip, part.partition("="))
        if field not in names or names[field] in given:
            raise ConfigError(
                "classes",
                f"{name}: {part!r} is not FIELD=NUMBER, each of {', '.join(names)} at most once",
            )
        try:
            given[names[field]] = float(value)
        except ValueError:
            given[names[field]] = math.nan
        if not math.isfinite(given[names[field]]):
            raise ConfigError("classes", f"{name}: {field}: {value!r} is not a number")
    try:
        return Objectives(**{own: given.get(own, getattr(default, own)) for own in names.values()})
    except ConfigError as error:
        raise ConfigError("classes", f"{name}: {error}") from None


@dataclasses.dataclass(frozen=True)
class ModelSource(Checked):
    model: str = option(
        "smollm2-135m",
        "model: a fetched name, a folder (safetensors, orbax), a .gguf file, a hub id, or random:NAME",
    )
    dtype: str = option(
        "float32", "type of weights and KV", choices=("float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(
        None, "most tokens of a sequence, prompt and output; default: the model's own", low=2
    )


@dataclasses.dataclass(frozen=True)
class EngineConfig(Checked):
    """A replica: what runs, on what mesh, with how much cache."""

    source: ModelSource = ModelSource()
    mesh: MeshConfig = MeshConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    profile: str = option(
        "auto",
        "what steps cost: a file of `jaxserve profile`; auto measures at the first start and keeps it; none",
    )
    lookahead: int = option(
        1, "steps that are issued before the tokens of the last one are read", low=0, high=8
    )
    hang_timeout: float = option(
        60.0,
        "seconds after which a step counts as hung, if it has also taken ten times as long as predicted",
        low=0.01,
    )
    compile_cache: str | None = option(
        None, "folder of compiled programs; default: under the user's cache folder; '' for none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lanes(self.mesh, self.cache, self.scheduler)
        scheduler = self.scheduler
        for name, needs_costs in (
            ("exchange", scheduler.exchange not in ("gather", "pass_q", "pass_kv")),
            ("planner", scheduler.planner != "none"),
        ):
            if self.profile == "none" and needs_costs:
                raise ConfigError(
                    name,
                    f"{getattr(scheduler, name)} needs to know what steps cost, which --profile=none "
                    "rules out",
                )


def check_lanes(mesh: MeshConfig, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Refuses settings about lanes that would have no effect on this mesh or beside the others;
    what is the default anyway is never refused. Errors: ConfigError."""
    planner = scheduler.planner
    for name, value, default in (
        ("placement", cache.placement, CacheConfig.placement),
        ("exchange", scheduler.exchange, SchedulerConfig.exchange),
        ("planner", planner, SchedulerConfig.planner),
    ):
        if mesh.kvp == 1 and value != default:
            raise ConfigError(
                name, f"{value} has no effect on one lane; give --mesh a kvp of 2 or more"
            )
    if scheduler.improvement is not None and planner not in ("single", "cdsp"):
        raise ConfigError("improvement", f"has no effect with --planner={planner}")
    dealt = cache.placement in ("striped", "zigzag")
    if planner == "none":
        if dealt and cache.lane_tokens is None:
            raise ConfigError(
                "placement",
                f"{cache.placement} deals out prompts of more than --lane_tokens, which is not given",
            )
        return
    if not dealt:
        raise ConfigError(
            "placement",
            f"{cache.placement} cannot follow --planner={planner}; that needs striped or zigzag",
        )
    if scheduler.exchange == "gather":
        raise ConfigError(
            "exchange",
            f"with gather all lanes compute every step, whatever --planner={planner} says; that "
            "needs auto, pass_q, pass_kv, alg1 or alg5",
        )
    size = int(planner.removeprefix("fixed-")) if planner.startswith("fixed-") else 1
    if mesh.kvp % size:
        raise ConfigError(
            "planner", f"{planner} needs a kvp that {size} divides; --mesh has kvp={mesh.kvp}"
        )


@dataclasses.dataclass(frozen=True)
class ServerConfig(Checked):
    host: str = option(
        "127.0.0.1",
        "address to listen on; addresses beyond loopback need api_keys, tls_client_ca or insecure",
    )
    port: int = option(8470, "gRPC port; 0 takes a free one", low=0, high=65535)
    http_port: int | None = option(
        8000,
        "HTTP port: OpenAI protocol, /metrics, live page; 0 takes a free one",
        low=0,
        high=65535,
    )
    admin_port: int | None = option(
        None,
        "HTTP port for operators: drain, abort, cache, log levels; 0 takes a free one; default: none",
        low=0,
        high=65535,
    )
    insecure: bool = option(
        False,
        "serve everybody who can connect, on any address and by any name, without keys and without client "
        "certificates",
    )
    api_keys: str | None = option(
        None,
        "file of API keys, as `jaxserve keys` writes it, read again when it changes; default: none",
    )
    share_prefixes: bool = option(
        False, "let tenants reuse the KV of each other's equal prefixes; latencies tell of it"
    )
    tls_cert: str | None = option(
        None,
        "PEM file of the server's certificate and those between it and a root; default: no TLS",
    )
    tls_key: str | None = option(None, "PEM file of the certificate's private key")
    tls_client_ca: str | None = option(
        None,
        "PEM file of the authorities that sign clients' certificates, without which nobody connects",
    )
    reflection: bool = option(True, "serve gRPC reflection")
    max_message_mib: int = option(256, "largest gRPC message, in MiB", low=1, high=2047)
    max_body_mib: int = option(
        8, "largest body over HTTP, in MiB; longer prompts come over gRPC", low=1, high=2047
    )
    max_header_kib: int = option(32, "largest header over HTTP, in KiB", low=1, high=1024)
    max_connections: int = option(4096, "HTTP connections at once", low=1)
    header_timeout: float = option(10.0, "seconds an HTTP client has for its header", low=0.1)
    body_timeout: float = option(60.0, "seconds an HTTP client has for its body", low=0.1)
    keep_alive: float = option(30.0, "seconds an idle HTTP connection is kept", low=1)
    drain_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM", low=0
    )
    stall_timeout: float = option(
        30.0, "seconds a client may leave its stream unread before its request is aborted", low=1
    )
    progress_interval: float = option(
        5.0, "most seconds between events of a stream", low=0.1, high=10
    )
    log_format: str = option(
        "text", "lines of the log: text, or json with an object on each", choices=("text", "json")
    )
    log_level: str = option(
        "info",
        "least level of jaxserve's own lines in the log",
        choices=("debug", "info", "warning", "error"),
    )
    traces_endpoint: str | None = option(
        None,
        "OTLP endpoint for a span of each request, such as http://localhost:4317; default: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, if that is set",
    )
