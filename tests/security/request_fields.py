"""Every text that a request can carry, found in the descriptors: a new field is attacked without a new test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from rankscope.v1 import (
    capture_service_pb2,
    job_service_pb2,
    policy_service_pb2,
    profile_service_pb2,
    rank_service_pb2,
    recording_service_pb2,
)

FILES = (
    capture_service_pb2,
    job_service_pb2,
    policy_service_pb2,
    profile_service_pb2,
    rank_service_pb2,
    recording_service_pb2,
)
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


@dataclass(frozen=True)
class TextField:
    method: MethodDescriptor
    path: tuple[FieldDescriptor, ...]

    def __str__(self) -> str:
        return f"{self.method.name}.{'.'.join(step.name for step in self.path)}"

    def request(self, text: str, honest: dict[str, object]) -> Message:
        """With the text in this field, and what an honest caller would say in the others."""
        made: Message = message_factory.GetMessageClass(self.method.input_type)()
        for name, value in honest.items():
            field = self.method.input_type.fields_by_name.get(name)
            if field is not None and not field.is_repeated:
                setattr(made, name, value)
        inner = made
        for step in self.path[:-1]:
            if step.message_type.GetOptions().map_entry:
                assert self.path[-1].name == "value", "a map with texts as keys is not attacked yet"
                getattr(inner, step.name)[0] = text
                return made
            inner = getattr(inner, step.name).add() if step.is_repeated else getattr(inner, step.name)
        last = self.path[-1]
        value = text.encode() if last.type == FieldDescriptor.TYPE_BYTES else text
        if last.is_repeated:
            getattr(inner, last.name).append(value)
        else:
            setattr(inner, last.name, value)
        return made


def text_fields() -> Iterator[TextField]:
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield from (TextField(method, path) for path in _paths(method.input_type, ()))


def known_services() -> set[str]:
    return {service.full_name for file in FILES for service in file.DESCRIPTOR.services_by_name.values()}


def _paths(message: Descriptor, before: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    for step in message.fields:
        if step.type in TEXTS:
            yield (*before, step)
        elif step.message_type is not None and step not in before:
            yield from _paths(step.message_type, (*before, step))
