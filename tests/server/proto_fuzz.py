"""Made-up messages of a protocol: right ones, right ones with changed bytes, cut ones, large ones
and bytes that were never a message."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

DEPTH = 5  # of messages in messages
LARGE = 20_000  # entries of a repeated field, or bytes
INTEGERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 0.5, 1.0, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "a", "cancelled", "greedy", "\x00", "ü" * 50, "../../etc/passwd", "[1, {}]")
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzz:
    """Makes the bytes of messages of `kind`. seed: of all chance. examples: messages that make
    sense, to be sent as they are and with a few fields changed."""

    def __init__(self, kind: type[Message], seed: int, examples: Sequence[Message]):
        self._kind = kind
        self._random = random.Random(seed)
        self._examples = examples

    def message(self) -> bytes:
        make = self._random.choices(
            (self._near, self._right, self._changed, self._cut, self._noise, self._large),
            (12, 4, 3, 1, 1, 1),
        )[0]
        return make()

    def is_readable(self, data: bytes) -> bool:
        try:
            self._kind.FromString(data)
        except DecodeError:
            return False
        return True

    def _right(self) -> bytes:
        message = self._kind()
        self._fill(message, DEPTH)
        return message.SerializeToString()

    def _near(self) -> bytes:
        message = self._kind()
        message.CopyFrom(self._random.choice(self._examples))
        inner = message
        while parts := [value for _, value in inner.ListFields() if isinstance(value, Message)]:
            inner = self._random.choice(parts)
            if self._random.random() < 0.5:
                break
        for _ in range(self._random.randint(0, 2)):
            fields = inner.DESCRIPTOR.fields
            if fields:
                self._set(inner, self._random.choice(fields), DEPTH, 0)
        return message.SerializeToString()

    def _changed(self) -> bytes:
        data = bytearray(self._near())
        for _ in range(self._random.randint(1, 4)):
            place = self._random.randint(0, len(data))
            match self._random.randrange(3):
                case 0:
                    data[place:place] = self._random.randbytes(self._random.randint(1, 8))
                case 1:
                    del data[place : place + self._random.randint(1, 8)]
                case 2 if place < len(data):
                    data[place] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _cut(self) -> bytes:
        data = self._near()
        return data[: self._random.randint(0, len(data))]

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randint(0, 200))

    def _large(self) -> bytes:
        """A message in which a field of a field is large."""
        message = self._kind()
        self._fill(message, DEPTH, large=self._random.choice((1000, LARGE)))
        return message.SerializeToString()

    def _fill(self, message: Any, depth: int, large: int = 0) -> None:
        """Sets some fields, of each group of alternatives at most one; large: entries of a
        field."""
        descriptor: Descriptor = message.DESCRIPTOR
        alternatives = {
            self._random.choice(one.fields).name for one in descriptor.oneofs if len(one.fields) > 1
        }
        plain = {
            field.name
            for field in descriptor.fields
            if field.containing_oneof is None or len(field.containing_oneof.fields) == 1
        }
        for field in descriptor.fields:
            if field.name in alternatives or (field.name in plain and self._random.random() < 0.4):
                self._set(message, field, depth, large)

    def _set(self, message: Any, field: FieldDescriptor, depth: int, large: int) -> None:
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if is_message and not depth:
            return
        if is_message and field.message_type.GetOptions().map_entry:
            return
        if not field.is_repeated and is_message:
            getattr(message, field.name).SetInParent()
            self._fill(getattr(message, field.name), depth - 1, large)
        elif is_message:
            for _ in range(self._random.randint(0, 3)):
                self._fill(getattr(message, field.name).add(), depth - 1)
        elif field.is_repeated:
            values = [self._value(field) for _ in range(self._random.randint(0, 4))]
            getattr(message, field.name).extend(values * (1 + large // 4))
        else:
            setattr(message, field.name, self._value(field, large))

    def _value(self, field: FieldDescriptor, large: int = 0) -> Any:
        chance = self._random
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._ids() * (1 + large // 64)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_STRING:
                return chance.choice(TEXTS) * (1 + large // 8)
            case FieldDescriptor.CPPTYPE_ENUM:
                return chance.choice(field.enum_type.values).number
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return chance.choice((*FLOATS, chance.random()))
        low, high = RANGES[field.cpp_type]
        value = chance.choice((*INTEGERS, chance.randint(0, 300), chance.randint(0, 9)))
        return min(max(value, low), high)

    def _ids(self) -> bytes:
        """Small integers, as token ids cross, or any bytes."""
        count = self._random.randint(0, 16)
        if self._random.random() < 0.3:
            return self._random.randbytes(count)
        return struct.pack(f"<{count}i", *(self._random.randint(0, 250) for _ in range(count)))
