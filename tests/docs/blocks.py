"""The fenced blocks of README and docs, and the command lines in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs import generate

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: Every page by its name; those that are made from the code are among them.
PAGES = {
    "README.md": README.read_text(),
    **{
        str(path.relative_to(generate.DOCS)): path.read_text()
        for path in sorted(generate.DOCS.rglob("*.md"))
        if generate.REFERENCE not in path.parents
    },
    **{f"reference/{name}": text for name, text in generate.pages().items()},
}
#: Pages that people have written.
WRITTEN = [page for page in PAGES if not page.startswith("reference/")]

_BLOCK = re.compile(
    r"^(?:[ ]*<!-- (?:not run: (?P<reason>[^\n]*?)|(?P<printed>printed)) -->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    #: The reason why it is not run, None if it is run.
    reason: str | None
    #: Whether the commands before it print these lines, but for their numbers.
    printed: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its lines without comments, a line that is continued by the next one joined with it."""
        joined = self.text.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if shlex.split(line, comments=True)]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text = PAGES[page]
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("indent")) + 1,
            language=found["language"],
            text=textwrap.dedent(found["text"]),
            reason=found["reason"],
            printed=bool(found["printed"]),
        )
        for found in _BLOCK.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def rmvdb_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line of rmvdb in a block, with its place: its words after `rmvdb`."""
    for block in ALL:
        for line in block.commands if block.language == "sh" else block.text.splitlines():
            found = re.match(r"(?:ExecStart=\S*/)?rmvdb (?!.*\[OPTIONS\])(.+)", line)
            if found and block.language in ("sh", "ini"):
                yield f"{block}: {line}", shlex.split(found[1], comments=True)


def spans(page: str) -> list[str]:
    """Return the words in `backticks` outside of blocks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _BLOCK.sub("", PAGES[page]))
