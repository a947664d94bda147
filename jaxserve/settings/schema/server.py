"""Settings of the server: addresses, security, limits, logs."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.api.request import MAX_RETENTION
from jaxserve.settings.fields import Settings, option

# as in text.chat_output.formats, which the settings do not import
TOOL_PARSERS = (
    "auto", "harmony", "deepseek_v32", "minimax_m2", "minimax_m3", "kimi_k3", "hy_v3",
    "minicpm5", "dots", "step3", "seed_oss", "qwen3_coder", "glm", "kimi_k2", "gemma4",
    "functiongemma", "phi4_mini_json", "granite", "cohere_command3", "nemotron_json",
    "hunyuan_a13b", "lfm2", "olmo3", "solar", "gigachat3", "apertus", "longcat", "internlm",
    "hermes", "mistral", "llama3", "deepseek_v3", "deepseek_v31", "pythonic",
)  # fmt: skip
REASONING_PARSERS = (
    "auto", "none", "hunyuan_a13b", "ernie45", "think", "mistral", "seed", "harmony", "gemma4",
    "cohere_command3", "kimi_k3", "minimax_m3", "hy_v3", "solar", "apertus", "apriel",
    "granite",
)  # fmt: skip


@dataclass(frozen=True)
class ServerConfig(Settings):
    """Settings of a server: addresses, callers, limits."""

    host: str = option(
        "127.0.0.1",
        "address to listen on; addresses beyond loopback need api_keys, tls_client_ca or insecure",
    )
    port: int | None = option(
        8000,
        "HTTP port: OpenAI protocol, /metrics, live page; 0 takes a free one",
        low=0,
        high=65535,
    )
    grpc_port: int = option(8470, "gRPC port; 0 takes a free one", low=0, high=65535)
    admin_port: int | None = option(
        None,
        "HTTP port for operators: drain, abort, cache, log levels; 0 takes a free one; default: "
        "none",
        low=0,
        high=65535,
    )
    replica_port: int | None = option(
        None,
        "port on which conductors reach this replica, with JAXSERVE_CLUSTER_SECRET; 0 takes a free "
        "one; default: none",
        low=0,
        high=65535,
    )
    kv_lease: int = option(
        120,
        "seconds that KV which a router's prefill request (kv_transfer_params) left in host memory "
        "waits to be fetched, before it is evicted as any other",
        low=1,
        high=MAX_RETENTION,
    )
    insecure: bool = option(
        False,
        "serve everybody who can connect, on any address and by any name, without keys and without "
        "client certificates",
    )
    api_keys: str | None = option(
        None,
        "file of API keys, as `jaxserve keys` writes it, read again when it changes; default: none",
    )
    api_key: tuple[str, ...] = option(
        (),
        "an API key that callers must send; better in the variable JAXSERVE_API_KEY, which `ps` "
        "does not show, or in a file (api_keys)",
    )
    share_prefixes: bool = option(
        False,
        "let tenants reuse the KV of each other's equal prefixes, which they can tell by latencies",
    )
    tls_cert: str | None = option(
        None, "PEM file of the server's certificate and the intermediate ones; default: no TLS"
    )
    tls_key: str | None = option(None, "PEM file of the certificate's private key")
    tls_client_ca: str | None = option(
        None,
        "PEM file of the authorities for clients' certificates; clients without one are refused",
    )
    reflection: bool = option(True, "serve gRPC reflection")
    max_message_mib: int = option(256, "largest gRPC message, in MiB", low=1, high=2047)
    max_body_mib: int = option(
        8, "largest body over HTTP, in MiB; longer prompts come over gRPC", low=1, high=2047
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin, such as https://chat.example, whose pages may send requests from a browser "
        "(CORS); *: those of all sites; default: none but the server's own",
    )
    strict_fields: bool = option(
        False, "refuse requests over HTTP with fields that are not known here, instead of telling"
    )
    stored_responses_mib: int = option(
        64,
        "memory for responses that requests ask to store (/v1/responses), MiB; the oldest go first",
        low=0,
        high=1 << 20,
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes calls of tools; auto: as its chat template shows",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "how the model writes reasoning, which answers have apart; auto: as its chat template "
        "shows; none: it is part of the answer",
        choices=REASONING_PARSERS,
    )
    max_header_kib: int = option(32, "largest header over HTTP, in KiB", low=1, high=1024)
    max_connections: int = option(4096, "largest number of HTTP connections at once", low=1)
    header_timeout: float = option(10.0, "seconds an HTTP client has to send its header", low=0.1)
    body_timeout: float = option(60.0, "seconds an HTTP client has to send its body", low=0.1)
    keep_alive: float = option(30.0, "seconds an idle HTTP connection is kept open", low=1)
    drain_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM", low=0
    )
    stall_timeout: float = option(
        30.0, "seconds a client may leave its stream unread before its request is aborted", low=1
    )
    progress_interval: float = option(
        5.0, "largest gap (s) between events of a stream", low=0.1, high=10
    )
    log_format: str = option(
        "text", "format of log lines: text, or json (an object on each)", choices=("text", "json")
    )
    log_level: str = option(
        "info",
        "lowest level of jaxserve's own log lines",
        choices=("debug", "info", "warning", "error"),
    )
    kv_events: str | None = option(
        None,
        "endpoint such as tcp://127.0.0.1:5557 on which routers hear which blocks of KV are here, "
        "in vLLM's format over ZeroMQ, tokens of prompts included; beyond loopback it needs "
        "insecure; default: none",
    )
    kv_events_replay: str | None = option(
        None,
        "endpoint such as tcp://127.0.0.1:5558 that resends KV events which a router missed; "
        "default: none",
    )
    kv_events_address: str | None = option(
        None,
        "HOST:PORT by which routers know this replica, for the topic of its KV events; default: "
        "host and port",
    )
    metrics_aliases: str = option(
        "none",
        "names under which metrics are exported a second time: vLLM's, for what reads those",
        choices=("none", "vllm"),
    )
    traces_endpoint: str | None = option(
        None,
        "OTLP endpoint that gets a span of each request, such as http://localhost:4317; default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, if that is set",
    )

    @property
    def asks_for_keys(self) -> bool:
        """True if callers must have an API key."""
        return self.api_keys is not None or bool(self.api_key)
