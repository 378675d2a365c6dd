from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import Any

import jsonschema
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rankscope.analysis.profiles.flame_graph import folded, speedscope
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack
from rankscope.common.text import printable

MAIN = Frame("main", "/app/train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
STEP = Frame("Adam.step", "/x/site-packages/torch/optim/adam.py", 3)
HOSTILE = Frame('f;g 3</script>\n"\x1b[2J\u2028', "/tmp/a;b.py", 1)
SAMPLED = [
    SampledStack((LOAD, MAIN), 41, 4_100_000_000, 3, "MainThread", "input"),
    SampledStack((LOAD, MAIN), 2, 200_000_000, 1, "MainThread", "input"),
    SampledStack((STEP, MAIN), 7, 700_000_000, 3, "pin", "optimizer"),
    SampledStack((HOSTILE,), 1, 100_000_000, 3, "MainThread", ""),
    SampledStack((), 1, 100_000_000, 3, "MainThread", ""),
]
PROFILE = Profile.of(SAMPLED)

# The public format, by its documentation: name, number and kind: a message's name, i for integers or s for strings,
# with * if it is repeated.
FORMAT = {
    "Profile": "sample_type 1 ValueType* sample 2 Sample* mapping 3 Mapping* location 4 Location* function 5 Function* "
    "string_table 6 s* drop_frames 7 i keep_frames 8 i time_nanos 9 i duration_nanos 10 i period_type 11 ValueType "
    "period 12 i comment 13 i* default_sample_type 14 i",
    "ValueType": "type 1 i unit 2 i",
    "Sample": "location_id 1 i* value 2 i* label 3 Label*",
    "Label": "key 1 i str 2 i num 3 i num_unit 4 i",
    "Mapping": "id 1 i memory_start 2 i memory_limit 3 i file_offset 4 i filename 5 i build_id 6 i",
    "Location": "id 1 i mapping_id 2 i address 3 i line 4 Line* is_folded 5 i",
    "Line": "function_id 1 i line 2 i",
    "Function": "id 1 i name 2 i system_name 3 i filename 4 i start_line 5 i",
}


def read_pprof(content: bytes) -> Any:
    """With a reader of its own: what is written has no part in it."""
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools.profiles", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in FORMAT.items():
        message = file.message_type.add(name=name)
        words = fields.split()
        for field, number, kind in zip(words[::3], words[1::3], words[2::3], strict=True):
            added = message.field.add(name=field, number=int(number), label=kinds.LABEL_OPTIONAL)
            if kind.endswith("*"):
                added.label = kinds.LABEL_REPEATED
            kind = kind.rstrip("*")
            added.type = {"i": kinds.TYPE_INT64, "s": kinds.TYPE_STRING}.get(kind, kinds.TYPE_MESSAGE)
            if added.type == kinds.TYPE_MESSAGE:
                added.type_name = f".perftools.profiles.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.profiles.Profile"))
    return found.FromString(gzip.decompress(content))


def test_pprof_holds_every_sample_with_its_stack_values_and_labels() -> None:
    read = read_pprof(pprof(PROFILE, begin_unix_nanos=5, duration_nanos=60))
    texts = read.string_table
    assert texts[0] == "" and len(set(texts)) == len(texts)
    assert [(texts[kind.type], texts[kind.unit]) for kind in read.sample_type] == [
        ("samples", "count"),
        ("wall", "nanoseconds"),
    ]
    assert (read.time_nanos, read.duration_nanos, read.period) == (5, 60, 100_000_000)
    assert texts[read.period_type.type] == texts[read.default_sample_type] == "wall"
    functions = {one.id: (texts[one.name], texts[one.filename]) for one in read.function}
    locations = {one.id: (*functions[one.line[0].function_id], one.line[0].line) for one in read.location}
    assert 0 not in functions and 0 not in locations
    found = []
    for sample in read.sample:
        labels = {texts[label.key]: texts[label.str] or label.num for label in sample.label}
        stack = tuple(Frame(*locations[number]) for number in sample.location_id)
        rank, thread, phase = labels["rank"], labels["thread"], labels.get("phase", "")
        found.append(SampledStack(stack, *sample.value, rank, thread, phase))
    printed = HOSTILE._replace(function=printable(HOSTILE.function))
    expected = [one._replace(stack=(printed,)) if HOSTILE in one.stack else one for one in SAMPLED]
    assert Counter(found) == Counter(expected)


def test_folded_lines_are_outermost_first_and_add_up() -> None:
    lines = folded(PROFILE).decode().splitlines()
    assert lines[0] == "main (/app/train.py:10);load_image (/app/dataset.py:88) 43"
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == PROFILE.samples_total


def test_a_hostile_name_is_one_frame_of_one_folded_line() -> None:
    (line,) = (line for line in folded(PROFILE).decode().split("\n") if "script" in line)
    path, _, count = line.rpartition(" ")
    assert count == "1" and ";" not in path and path.isprintable()


SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "required": ["frames"],
            "properties": {
                "frames": {
                    "items": {
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": {"type": "integer"},
                        },
                    }
                }
            },
        },
        "profiles": {
            "items": {
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "properties": {
                    "type": {"const": "sampled"},
                    "unit": {"enum": ["bytes", "microseconds", "milliseconds", "nanoseconds", "none", "seconds"]},
                    "samples": {"items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
                    "weights": {"items": {"type": "integer"}},
                },
            }
        },
    },
}


def test_speedscope_has_a_profile_per_rank_and_thread() -> None:
    document = json.loads(speedscope(PROFILE, "run"))
    jsonschema.validate(document, SPEEDSCOPE)
    frames = document["shared"]["frames"]
    parts = {part["name"]: part for part in document["profiles"]}
    assert set(parts) == {"rank 1, MainThread", "rank 3, MainThread", "rank 3, pin"}
    (stack,), (weight,) = parts["rank 1, MainThread"]["samples"], parts["rank 1, MainThread"]["weights"]
    assert [frames[number]["name"] for number in stack] == ["main", "load_image"] and weight == 200_000_000
    assert frames[stack[1]] == {"name": "load_image", "file": "/app/dataset.py", "line": 88}
    assert sum(part["endValue"] for part in parts.values()) == PROFILE.nanos_total
