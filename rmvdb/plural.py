"""How many of something, in sentences for people."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 record`, `2 records`; `many` where an s does not make it: `counted(2, "batch is", "batches are")`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
