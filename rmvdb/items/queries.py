"""Files of queries: JSON lines."""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path

from rmvdb.errors import UsageError
from rmvdb.types import Item, Query


def read_queries(file: Path) -> list[Query]:
    """Read queries, a JSON object a line: {"item": "a text or the path of a file", "answers": [7, 42]}. Answers are optional.

    {"bytes": "…"} in base64 stands for an item of bytes.

    Raises: UsageError, with the line, for a file of another form.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON has other ends of lines inside its texts
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"The queries in {str(file)!r} cannot be read ({exc}); name a text file of JSON lines") from exc
    queries = [_query(line, f"Line {number} of {file}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not queries:
        raise UsageError(f'{str(file)!r} holds no query; write a line each: {{"item": "a text or a file"}}')
    return queries


def _query(line: str, where: str) -> Query:
    try:
        parts = json.loads(line)
        answers = parts.get("answers", [])
        item = base64.b64decode(parts["bytes"], validate=True) if "bytes" in parts else parts["item"]
    except (json.JSONDecodeError, binascii.Error, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UsageError(
            f'{where} is not a query; write {{"item": "a text or a file"}}, and beside it "answers": [ids] if you know them'
        ) from exc
    if not isinstance(answers, list) or not all(isinstance(id, int | str) and not isinstance(id, bool) for id in answers):
        raise UsageError(f"{where} has answers {answers!r}; write a list of ids")
    return Query(item=item_of(item) if isinstance(item, str) else item, answers=tuple(answers))


def line_of(item: Item) -> str:
    """Return the line from which `read_queries` reads this item: a text, a path, bytes or other JSON values."""
    value = {"bytes": base64.b64encode(item).decode()} if isinstance(item, bytes) else {"item": item}
    text = json.dumps(value, ensure_ascii=False, default=str)  # str: of a path
    # A terminal would obey some characters, and no file can hold half of a surrogate pair.
    return text if text.isprintable() else json.dumps(value, default=str)


def item_of(text: str) -> Path | str:
    """Return the file of that name, or else the text itself."""
    return Path(text) if os.path.isfile(text) else text  # noqa: PTH113 (Path.is_file raises if a text is longer than any name)
