"""Text from containers, users and other programs, made safe for terminals, logs, metric labels and pages."""

from __future__ import annotations

import hashlib

_DIGEST_CHARACTERS = 8


def printable(text: str, characters: int | None = None) -> str:
    """One line of at most `characters`, the last of them "…" if some were cut. White space becomes a space. What a
    terminal obeys, what XML forbids and what turns the writing direction becomes "�"."""
    if characters is not None and len(text) > characters:
        text = text[: characters - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def one_line(text: str, characters: int) -> str:
    """Like `printable`, with each run of white space as one space: for messages of several lines."""
    return printable(" ".join(text.split()), characters)


def printable_name(text: str, characters: int) -> str:
    """Like `printable`, for names that must stay distinct: "/" becomes "-", and a hash of the whole name is added if
    anything is replaced or cut."""
    name = printable(text).replace("/", "-")
    if name == text and len(text) <= characters:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{name[: characters - _DIGEST_CHARACTERS - 1]}~{digest}"
