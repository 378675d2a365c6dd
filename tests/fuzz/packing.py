"""Several small files in one input, in a form that survives being mutated: whatever is left of it is some files."""

from __future__ import annotations

from collections.abc import Mapping

_CUT = b"\n%%%% "


def pack_files(files: Mapping[str, bytes]) -> bytes:
    return b"".join(_CUT + name.encode() + b"\n" + content for name, content in files.items())


def unpack_files(data: bytes) -> dict[str, bytes]:
    """Later ones of a name replace earlier ones."""
    files: dict[str, bytes] = {}
    for piece in data.split(_CUT)[1:]:
        name, _, content = piece.partition(b"\n")
        files[name.decode("ascii", "replace")] = content
    return files
