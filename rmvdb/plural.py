"""Sentences for people: how many of something, and what can be kept of a text."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 record`, `2 records`; `many` where an s does not make it: `counted(2, "batch is", "batches are")`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def storable(text: str) -> str:
    """The text without what no database and no log keeps in it: NUL, and half a surrogate pair."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
