"""Routes of the operators' port that change weights while serving, by the names that vLLM and
SGLang have for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated, Literal

import fastapi
from pydantic import Field

from jaxserve.api.errors import RequestError
from jaxserve.replica.weights import ASLEEP, PARTS, RUNNING, Mode, ReplicaWeights
from jaxserve.server.http_app import StrictModel
from jaxserve.server.json_body import JsonObject
from jaxserve.server.models import Models

MAX_PATH_CHARS = 4096
ModeName = Literal["abort", "finish", "wait", "keep"]  # wait: vLLM's name of finish


class UpdateRequest(StrictModel):
    model_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    weight_version: str | None = None
    mode: ModeName = "finish"
    abort_all_requests: bool = Field(False, description="SGLang's name of mode=abort")


def weight_routes(models: Models) -> fastapi.APIRouter:
    """Returns the routes; see the module. model: whose weights are meant; needed where the server
    has several."""
    router = fastapi.APIRouter()

    async def change(model: str, work: Callable[[ReplicaWeights], object]) -> JsonObject:
        frontend = models.named(model)
        weights = frontend.require_replica().weights
        began = time.monotonic()
        await frontend.ask_replica(lambda: work(weights))
        seconds = round(time.monotonic() - began, 4)
        return {"state": weights.state, "weight_version": weights.version, "seconds": seconds}

    @router.post("/pause")
    async def pause(mode: ModeName = "abort", model: str = "") -> JsonObject:
        """Runs no steps until /resume. Requests that have begun are ended (abort), go on to their
        ends first (finish, wait) or stay where they are (keep); others wait."""
        return await change(model, lambda weights: weights.pause(_mode(mode)))

    @router.post("/resume")
    async def resume(model: str = "") -> JsonObject:
        return await change(model, lambda weights: weights.resume())

    @router.get("/is_paused")
    async def is_paused(model: str = "") -> dict[str, bool]:
        return {"is_paused": models.named(model).require_replica().weights.state != RUNNING}

    @router.post("/sleep")
    async def sleep(level: int = 1, mode: ModeName = "abort", model: str = "") -> JsonObject:
        """Pauses, and frees the devices of KV and weights, which go to host memory (level 1) or
        nowhere (level 2)."""
        return await change(model, lambda weights: weights.sleep(level, _mode(mode)))

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[str] | None, fastapi.Query()] = None, model: str = ""
    ) -> JsonObject:
        """Brings back what sleeps: `weights`, `kv_cache`, or all."""
        return await change(model, lambda weights: weights.wake_up(PARTS if tags is None else tags))

    @router.get("/is_sleeping")
    async def is_sleeping(model: str = "") -> dict[str, bool]:
        return {"is_sleeping": models.named(model).require_replica().weights.state == ASLEEP}

    @router.post("/update_weights_from_disk")
    async def update(body: UpdateRequest, model: str = "") -> JsonObject:
        """Replaces the weights by those of a folder on this machine, /dev/shm among them."""
        mode = _mode("abort" if body.abort_all_requests else body.mode)
        work = functools.partial(_update, body.model_path, body.weight_version, mode)
        changed = await change(model, work)
        message = f"Weights of version {changed['weight_version']} are served."
        return {"success": True, "message": message, **changed}

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def weight_version(model: str = "") -> dict[str, str]:
        return {"weight_version": models.named(model).require_replica().weights.version}

    return router


def _update(path: str, version: str | None, mode: Mode, weights: ReplicaWeights) -> None:
    if "\0" in path:
        raise RequestError("model_path", "has a NUL character")
    weights.update(path, version, mode)


def _mode(name: ModeName) -> Mode:
    return "finish" if name == "wait" else name
