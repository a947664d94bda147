"""Routes of the operators' port about cached blocks of KV: which replica has those of a prompt,
leases that keep them there, and copies to other replicas."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import fastapi
import numpy as np
from pydantic import Field

from jaxserve.api.errors import RequestError
from jaxserve.replica.kv_pool import KvFiles, KvPool
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_app import StrictModel
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_questions import require_pool
from jaxserve.server.models import Models
from jaxserve.server.prompts import Text, prompt_ids
from jaxserve.store.kv_file import read_kv_file

log = logging.getLogger(__name__)
T = TypeVar("T")
FILE_TYPE = "application/octet-stream"


class KvPrompt(StrictModel):
    """A prompt, as a text or as ids of tokens, and whose prefixes are meant: the tenant of the
    requests' API key, where prefixes are kept apart by tenant, and their own `cache_salt`. model:
    needed where the server has several."""

    model: str = ""
    prompt: str | list[int]
    tenant: str = ""
    cache_salt: str = ""


class LeaseRequest(KvPrompt):
    seconds: float
    replica: str = ""


class ReplicateRequest(KvPrompt):
    replica: str
    source: str = ""


class GetRequest(KvPrompt):
    first: int = Field(0, ge=0)


class ReleaseRequest(StrictModel):
    model: str = ""
    lease: str


def kv_routes(models: Models) -> fastapi.APIRouter:
    """Returns the routes below /admin/kv."""
    router = fastapi.APIRouter(prefix="/admin/kv")

    async def ask(frontend: Frontend, work: Callable[[KvPool], T]) -> T:
        pool = require_pool(frontend.require_replica())
        return await frontend.ask_replica(lambda: work(pool))

    @router.post("/find")
    async def find(body: KvPrompt) -> list[JsonObject]:
        """Tells which replicas have a prompt's full blocks of KV, from the first one on."""
        frontend = models.named(body.model)
        prompt = _ids(frontend, body)
        return [
            _shown(one)
            for one in await ask(frontend, lambda pool: pool.find(prompt, salt_of(body)))
        ]

    @router.post("/lease")
    async def lease(body: LeaseRequest) -> JsonObject:
        """Keeps a prompt's blocks on a replica, that which has most of it or the named one, for
        some seconds."""
        frontend = models.named(body.model)
        prompt = _ids(frontend, body)
        salt = salt_of(body)
        made = await ask(
            frontend, lambda pool: pool.lease(prompt, salt, body.seconds, body.replica)
        )
        log.info("blocks are leased: %s", made)
        return _shown(made)

    @router.get("/leases")
    async def leases(model: str = "") -> list[JsonObject]:
        return [_shown(one) for one in await ask(models.named(model), lambda pool: pool.leases())]

    @router.post("/release")
    async def release(body: ReleaseRequest) -> JsonObject:
        """Ends a lease before its time."""
        if not await ask(models.named(body.model), lambda pool: pool.release(body.lease)):
            said = f"{body.lease[:100]!r} has ended or is unknown"
            raise RequestError("lease", said, "NOT_FOUND")
        return {"released": body.lease}

    @router.post("/replicate")
    async def replicate(body: ReplicateRequest) -> JsonObject:
        """Copies a prompt's blocks to a replica, from the one that has most of it or the named
        one."""
        frontend = models.named(body.model)
        prompt = _ids(frontend, body)
        salt = salt_of(body)
        return _shown(
            await ask(
                frontend, lambda pool: pool.replicate(prompt, salt, body.replica, body.source)
            )
        )

    @router.post("/get")
    async def get(body: GetRequest) -> fastapi.Response:
        """Gives blocks of a prompt that this replica has as a file: see `store.kv_file`."""
        frontend = models.named(body.model)
        prompt = _ids(frontend, body)
        salt = salt_of(body)
        most = models.config.max_body_mib << 19  # half of what `put` takes
        work = lambda pool: _files(pool).get(prompt, salt, body.first, most).content()
        return fastapi.Response(await ask(frontend, work), media_type=FILE_TYPE)

    @router.post("/put")
    async def put(
        request: fastapi.Request, tenant: str = "", cache_salt: str = "", model: str = ""
    ) -> JsonObject:
        """Takes blocks from a file into this replica's host memory."""
        content = await request.body()
        salt = salt_of(KvPrompt(prompt="", tenant=tenant, cache_salt=cache_salt))
        taken = await ask(
            models.named(model), lambda pool: _files(pool).put(read_kv_file(content), salt)
        )
        log.info("an operator put %d blocks", taken)
        return {"blocks": taken}

    return router


def _files(pool: KvPool) -> KvFiles:
    """The pool as one of files. Errors: RequestError where it is none."""
    if not isinstance(pool, KvFiles):
        said = "blocks go in and out as files at replicas of one process with --host_cache_gib"
        raise RequestError("", said, "UNIMPLEMENTED")
    return pool


def salt_of(body: KvPrompt) -> str:
    """The salt of these prefixes; see `Caller.cache_salt`."""
    return f"{body.tenant}:{body.cache_salt}" if body.tenant else body.cache_salt


def _ids(frontend: Frontend, body: KvPrompt) -> np.ndarray:
    """The tokens of a prompt [tokens] int32. Errors: RequestError."""
    info = frontend.require_replica().info
    prompt = Text(body.prompt) if isinstance(body.prompt, str) else body.prompt
    ids = prompt_ids(prompt, frontend.tokenizer, info.max_model_len)
    if not 0 < len(ids) <= info.max_model_len:
        said = f"has {len(ids)} tokens; it must have 1 to {info.max_model_len}"
        raise RequestError("prompt", said)
    if not ((ids >= 0) & (ids < info.vocab)).all():
        raise RequestError("prompt", f"holds an id that is not from 0 to {info.vocab - 1}")
    return ids.astype(np.int32)


def _shown(one: Any) -> JsonObject:
    return dataclasses.asdict(one)
