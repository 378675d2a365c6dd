"""Makes console/src/answers.ts, the types of the console's API in TypeScript, from its OpenAPI document.

python -m tools.generate_console_types           writes the file
python -m tools.generate_console_types --check   fails where it is not what would be written"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rankscope.operator.console.api import DOCUMENT

TYPES = Path(__file__).resolve().parents[1] / "console" / "src" / "answers.ts"
HEADER = "// The answers of the console's API. Made by `make console` from its OpenAPI document: do not edit.\n"
_NAMES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(type_of(each) for each in schema["anyOf"])
    if schema["type"] == "array":
        item = type_of(schema["items"])
        return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
    if schema["type"] == "object":
        return f"Readonly<Record<string, {type_of(schema['additionalProperties'])}>>"
    return _NAMES[schema["type"]]


def types() -> str:
    lines = [HEADER]
    for name, schema in sorted(DOCUMENT["components"]["schemas"].items()):
        if "description" in schema:
            lines.append(f"/** {' '.join(schema['description'].split())} */\n")
        lines.append(f"export interface {name} {{\n")
        # A field with a default is always sent, too.
        lines += [f"  readonly {field}: {type_of(each)};\n" for field, each in schema["properties"].items()]
        lines.append("}\n\n")
    return "".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    made = types()
    if "--check" not in arguments:
        TYPES.write_text(made, encoding="utf-8")
    elif TYPES.read_text(encoding="utf-8") != made:
        print("error: console/src/answers.ts is not what the API answers; run make console", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
