"""The gRPC service jaxserve.v1.Control: facts about model and server, load, aborting."""

from __future__ import annotations

import contextlib

import grpc

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.observe.metric_rows import PREFIX
from jaxserve.replica.protocol import Replica
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc.auth import current_caller
from jaxserve.server.models import Models
from jaxserve.server.streams import abortable_ids

SCHEMA_REVISION = 1


class Control:
    """Methods of the service; see jaxserve.proto."""

    def __init__(self, models: Models):
        self._models = models

    async def Abort(
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Aborts requests of the caller; never those of others."""
        match message.WhichOneof("target"):
            case "request_id":
                ids = abortable_ids(current_caller(), self._models.streams, message.request_id)
            case "all" if message.all:
                ids = abortable_ids(current_caller(), self._models.streams, None)
            case _:
                raise RequestError("target", "is missing: set request_id, or all to true")
        return pb.AbortResponse(aborted=await self._models.abort(ids))

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        frontend = self._models.named(message.model)
        info = frontend.info
        tokenizer = frontend.tokenizer
        return pb.GetModelInfoResponse(
            model=info.served_name,
            max_len=info.max_model_len,
            vocab=info.vocab,
            eos_ids=info.eos_ids,
            bos_id=info.bos_id,
            dtype=info.dtype,
            block_size=info.block_size,
            layers=info.layers,
            heads=info.heads,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.template is not None,
        )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        response = pb.GetServerInfoResponse(
            version=jaxserve.__version__,
            schema_revision=SCHEMA_REVISION,
            state=self._models.state,
            max_message_bytes=self._models.config.max_message_mib << 20,
        )
        if self._models.several and not message.model:
            return response
        frontend = self._models.named(message.model)
        response.state = frontend.state
        replica = frontend.replica
        if replica is not None:
            info = replica.info
            response.mesh.spp = info.mesh.spp
            response.mesh.kvp = info.mesh.kvp
            response.mesh.tp = info.mesh.tp
            response.max_seqs = info.max_seqs
            response.max_queue = info.max_queue
            response.classes.extend(info.class_names)
            response.details.update(await self._details(frontend, replica))
        return response

    async def _details(self, frontend: Frontend, replica: Replica) -> dict[str, str]:
        """Facts for people to read."""
        details = {name: str(value) for name, value in replica.info.summary().items()}
        registry = replica.metrics_registry
        with contextlib.suppress(RequestError):  # a step hangs, and keeps metrics from being read
            compiles = await frontend.ask_replica(
                lambda: registry.get_sample_value(f"{PREFIX}xla_compiles_total")
            )
            if compiles is not None:
                details["compiles"] = str(int(compiles))
        return details

    async def GetLoad(
        self, message: pb.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadResponse:
        frontend = self._models.named(message.model)
        load = await frontend.ask_replica(frontend.require_replica().load)
        fields = [field.name for field in pb.GetLoadResponse.DESCRIPTOR.fields]
        return pb.GetLoadResponse(**{name: getattr(load, name) for name in fields})
