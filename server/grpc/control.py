"""jaxserve.v1.Control: what runs here, how busy it is, and how to stop a request."""

from __future__ import annotations

import grpc

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.auth.access import own
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc.auth import caller

SCHEMA_REVISION = 1


class Control:
    def __init__(self, front: Frontend):
        self._front = front

    async def Abort(
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Of the caller's own requests."""
        match message.WhichOneof("target"):
            case "request_id":
                ids = own(caller(), self._front.streams, message.request_id)
            case "all" if message.all:
                ids = own(caller(), self._front.streams, None)
            case _:
                raise RequestError("target", "is missing: set request_id, or all to true")
        return pb.AbortResponse(aborted=await self._front.abort(ids))

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        engine = self._front.running
        tokenizer = self._front.tokenizer
        model = engine.model
        config = engine.config
        return pb.GetModelInfoResponse(
            model=config.source.model,
            max_len=engine.max_len,
            vocab=model.vocab,
            eos_ids=model.eos_ids,
            bos_id=model.bos_id,
            dtype=config.source.dtype,
            block_size=config.cache.block_size,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.template is not None,
        )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        info = pb.GetServerInfoResponse(
            version=jaxserve.__version__,
            schema_revision=SCHEMA_REVISION,
            state=self._front.state,
            max_message_bytes=self._front.config.max_message_mib << 20,
        )
        engine = self._front.engine
        if engine is not None:
            mesh = engine.config.mesh
            scheduler = engine.config.scheduler
            info.mesh.CopyFrom(
                pb.GetServerInfoResponse.Mesh(spp=mesh.spp, kvp=mesh.kvp, tp=mesh.tp)
            )
            info.max_seqs = scheduler.max_seqs
            info.max_queue = scheduler.max_queue
            info.classes.extend(scheduler.class_names)
            info.details.update(
                {str(name): str(value) for name, value in engine.info.summary().items()}
            )
        return info

    async def GetLoad(
        self, message: pb.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadResponse:
        load = await self._front.of_engine(self._front.running.load)
        return pb.GetLoadResponse(
            **{
                field.name: getattr(load, field.name)
                for field in pb.GetLoadResponse.DESCRIPTOR.fields
            }
        )
