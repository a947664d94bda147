"""Pages of the reference, each made of what the code says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from experiments.documentation import combinations
from experiments.markdown import code, plain, table
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.main import COMMANDS, load
from jaxserve.observe.metric_rows import OF_WORKERS, READ
from jaxserve.observe.metrics import Metrics
from jaxserve.server.admin import operators_app
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.models import Models
from jaxserve.server.readiness import Readiness
from jaxserve.server.users_app import users_app
from jaxserve.settings.flags import limits, spelling
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ServerConfig

ROOT = Path(__file__).parents[2]
PROTOCOL = ROOT / "server" / "jaxserve.proto"
BODIES = "#/components/schemas/"


# --- flags


def flags() -> str:
    """Every flag of every command."""
    parts = [
        "# Flags",
        "As `jaxserve COMMAND --help` tells them. In commands that have `--config` each is also a "
        "variable `JAXSERVE_NAME` and a line of a settings file: [operations](../operations.md).",
    ]
    for name, (_, summary) in COMMANDS.items():
        command = load(name)
        parts += [f"## jaxserve {name}", f"{summary[0].upper()}{summary[1:]}."]
        for title, group in command.groups.items():
            parts += [f"### {name}: {title}", table(("flag", ""), map(_flag, group))]
    return "\n\n".join(parts) + "\n"


def _flag(option: Option) -> Sequence[str]:
    return code(spelling(option)), plain(f"{option.help} {limits(option)}".rstrip())


# --- HTTP


def http_fields() -> str:
    """Routes of the HTTP ports, and the fields of their bodies."""
    parts = [
        "# Routes and fields over HTTP",
        "What they mean beyond a line, limits and errors: [HTTP](../http.md); the operators' port: "
        "[operations](../operations.md). The server tells the same as OpenAPI at `/openapi.json`.",
    ]
    for title, schema in asyncio.run(_schemas()).items():
        bodies = {
            body: properties
            for body, properties in _bodies(schema).items()
            if properties and not body.endswith("ValidationError")
        }
        parts += [f"## {title}", table(("route", "body", ""), _routes(schema, bodies))]
        for body, properties in sorted(bodies.items()):
            rows = (_field(field, value) for field, value in properties.items())
            parts += [f"### {body}", table(("field", "type", "default", ""), rows)]
    return "\n\n".join(parts) + "\n"


async def _schemas() -> dict[str, Mapping[str, Any]]:
    models = Models(ServerConfig())
    users = users_app(models, _never_asked())
    found = {"Users' port": users.openapi(), "Operators' port": operators_app(models).openapi()}
    models.close()
    return found


def _never_asked() -> Readiness:
    """Routes are described, not called."""
    return Readiness.__new__(Readiness)


def _bodies(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    schemas = schema["components"]["schemas"]
    return {_short(name): body.get("properties", {}) for name, body in schemas.items()}


def _short(name: str) -> str:
    """Two bodies of one name have their modules' before it: responses.request.NamedTool."""
    return name.removeprefix("jaxserve__server__").replace("__", ".")


def _routes(schema: Mapping[str, Any], bodies: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            names = [_kind(body["schema"]) for body in content.values()]
            told = plain(operation.get("description", "").replace("\n", " "))
            yield f"`{method.upper()} {path}`", ", ".join(names), told


def _field(name: str, value: Mapping[str, Any]) -> Sequence[str]:
    default = value.get("default")
    shown = "" if default is None else f"`{default!r}`"
    return f"`{name}`", _kind(value), shown, plain(value.get("description", ""))


def _kind(value: Mapping[str, Any]) -> str:
    """The type of a field in a few words, such as 'list of integer'."""
    if "$ref" in value:
        return _short(value["$ref"].removeprefix(BODIES))
    if "enum" in value or "const" in value:
        return " or ".join(f"`{one!r}`" for one in value.get("enum", [value.get("const")]))
    if "type" not in value and not (kinds := value.get("anyOf") or value.get("oneOf")):
        return "any"
    if "type" not in value:
        names = (_kind(kind) for kind in kinds if kind.get("type") != "null")
        return " or ".join(dict.fromkeys(names))
    if value["type"] == "array":
        return f"list of {_kind(value.get('items', {}))}"
    return str(value["type"])


# --- gRPC


def grpc() -> str:
    """The protocol, whose comments say what each field means."""
    return (
        "# gRPC\n\nBeside `grpc.health.v1` and reflection. This is `server/jaxserve.proto`, of "
        f"which clients can be made in any language.\n\n```proto\n{PROTOCOL.read_text()}```\n"
    )


# --- metrics


def metrics() -> str:
    """Every metric of a replica and of the server before it."""
    nothing = dict.fromkeys(READ, 0.0)
    worker = dict.fromkeys([*OF_WORKERS, "worker"], 0)
    engine = Metrics(1, (), read=lambda: nothing, workers=lambda: [worker])
    engine.configured()
    head = ("name", "type", "labels", "")
    return "\n\n".join(
        [
            "# Metrics",
            "At `/metrics`, in the text format of Prometheus; counters are exported with "
            "`_total`, histograms with `_bucket`, `_sum` and `_count`. `--metrics_aliases=vllm` "
            "exports those that vLLM has under its names too. `worker_` ones are of replicas over "
            "several processes. How to read them: [operations](../operations.md).",
            "## Of a replica",
            table(head, _metrics(engine.registry)),
            "## Of the server",
            table(head, _metrics(FrontendMetrics().registry)),
            "",
        ]
    )


def _metrics(registry: CollectorRegistry) -> Iterator[Sequence[str]]:
    for metric in registry.collect():
        labels = {name for sample in metric.samples for name in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        yield f"`{metric.name}`", metric.type, shown, plain(metric.documentation)


# --- models


def models() -> str:
    """The table of models that are known by name."""
    return "\n\n".join(
        [
            "# Models",
            "A checkpoint of another name runs if its architecture is one of these (Llama, "
            "Mistral, Qwen 2, Qwen 3): [overview](../overview.md). `random:NAME` takes a row's "
            "shape with random weights. KV: KiB of each token in bfloat16, over all layers.",
            table(
                ("name", "parameters", "layers", "query / KV heads", "KV", "most tokens", "window"),
                map(_model, MODELS),
            ),
            "",
        ]
    )


def _model(name: str) -> Sequence[str]:
    model = MODELS[name]
    size = model.parameters
    return (
        f"`{name}`",
        f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M",
        str(model.layers),
        f"{model.heads} / {model.kv_heads}",
        f"{model.kv_bytes_per_token(2) / 1024:g}",
        f"{model.max_len:,}",
        f"{model.windows[0]:,}" if model.windows[0] else "",
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "flags": flags,
    "http_fields": http_fields,
    "grpc": grpc,
    "metrics": metrics,
    "models": models,
    "combinations": combinations.page,
}
