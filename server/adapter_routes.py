"""Routes that load and unload adapters while serving, as vLLM has them."""

from __future__ import annotations

import functools

import fastapi
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from jaxserve.api.errors import RequestError
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_app import StrictModel
from jaxserve.server.models import Models

MAX_PATH_CHARS = 4096


class LoadRequest(StrictModel):
    lora_name: str
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    base_model_name: str = Field("", description="needed where the server has several models")
    load_inplace: bool = False
    is_3d_lora_weight: bool = Field(False, description="of vLLM's experts; has no effect")


class UnloadRequest(StrictModel):
    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description="of vLLM's adapters; has no effect")


def adapter_routes(models: Models) -> fastapi.APIRouter:
    """Returns the routes; see the module."""
    router = fastapi.APIRouter()

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(body: LoadRequest) -> Response:
        """Serves an adapter of a folder below --lora_root as a model of its name."""
        frontend = _base(models, body.base_model_name)
        adapters = frontend.require_replica().adapters
        work = functools.partial(
            adapters.load, body.lora_name, body.lora_path, in_place=body.load_inplace
        )
        async with models.naming:
            models.check_unused(body.lora_name, frontend)
            adapter = await frontend.ask_replica(work)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(body: UnloadRequest) -> Response:
        """Takes no new requests for an adapter; those that were accepted go on with it."""
        frontend = _base(models, body.lora_name, "lora_name")
        adapters = frontend.require_replica().adapters
        await frontend.ask_replica(functools.partial(adapters.unload, body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _base(models: Models, name: str, field: str = "base_model_name") -> Frontend:
    """Returns the frontend of the model that an adapter belongs to. name: of the model or the
    adapter. Errors: RequestError of `field`."""
    try:
        return models.named(name)
    except RequestError as error:
        raise RequestError(field, error.message, error.status, reason=error.reason) from None


def refuse_keyed(request: fastapi.Request) -> None:
    """Refuses users with keys of their own: they are not to change what others use. Errors:
    RequestError."""
    if request.state.caller.name:
        raise RequestError(
            "", "adapters are loaded on the admin port, with an admin key", "PERMISSION_DENIED"
        )
