"""Converts parts of blocks to messages of replica.proto and back."""

from __future__ import annotations

from jaxserve.server import replica_pb2 as pb
from jaxserve.store.block_part import BlockPart, PartPlace


def part_message(part: BlockPart) -> pb.BlockPart:
    return pb.BlockPart(
        first_layer=part.layers.start,
        end_layer=part.layers.stop,
        first_head=part.heads.start,
        end_head=part.heads.stop,
    )


def part_of(message: pb.BlockPart) -> BlockPart:
    return BlockPart(
        range(message.first_layer, message.end_layer), range(message.first_head, message.end_head)
    )


def place_message(place: PartPlace) -> pb.PartPlace:
    return pb.PartPlace(part=part_message(place.part), address=place.address)


def place_of(message: pb.PartPlace) -> PartPlace:
    return PartPlace(part_of(message.part), message.address)
