"""The report of a comparison, and how far a comparison is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rmvdb.text import counted
from rmvdb.types import Id

#: Problems that a report names. It counts the others.
NAMED = 20
#: The share of the searched records that an approximate index may pass over.
PASSED_OVER = 0.05

#: Seconds after which the position of an interrupted comparison or copy counts no more: others may have changed records since.
COUNTS = 600.0


@dataclass(kw_only=True, slots=True)
class VerifyReport:
    """The numbers of a comparison, and the differences."""

    records: int = 0
    fields_compared: int = 0
    embedded_again: int = 0
    #: Records that searches were asked for, by their own vectors.
    searched: int = 0
    #: How many of these records an approximate index missed, and a sentence for each of the first.
    passed_over: int = 0
    index_misses: list[str] = field(default_factory=list)
    #: Listed records that left the old collection without a batch and without a client's deletion.
    missing: int = 0
    #: The first of them.
    gone: list[Id] = field(default_factory=list)
    problems: int = 0
    #: The first problems, a sentence each.
    examples: list[str] = field(default_factory=list)
    #: Sentences about parts that were not compared. Of a damaged archive file, only the ids are compared. Of items that cannot be
    #: embedded again, the first are named.
    unread: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no difference."""
        return not self.problems

    def complain(self, sentence: str) -> None:
        """Count a problem, and keep its sentence if there are few."""
        self.problems += 1
        if len(self.examples) < NAMED:
            self.examples.append(sentence)

    def pass_over(self, sentences: Sequence[str]) -> None:
        """Count records that an approximate index passed over, and keep the first sentences."""
        self.passed_over += len(sentences)
        self.index_misses += sentences[: NAMED - len(self.index_misses)]

    def judge_index(self) -> None:
        """Count the records that the index passed over as problems if they are more than an approximation explains."""
        if self.passed_over > max(1, PASSED_OVER * self.searched):
            self.problems += self.passed_over
            self.examples += (self.index_misses or [self.approximation])[: NAMED - len(self.examples)]

    @property
    def approximation(self) -> str:
        """How many records the index passed over, in words; empty if none."""
        few = counted(self.passed_over, "record")
        return (
            f"the index is approximate: searches by their own vectors miss {few} of {self.searched}" if self.passed_over else ""
        )

    def leave_out(self, record: Id, why: str) -> None:
        """Keep why a record was not embedded again, if there are few such records."""
        if len(self.unread) < NAMED:
            self.unread.append(f"record {record!r} cannot be embedded again, so its vector was not compared: {why}")

    def miss(self, ids: Sequence[Id]) -> None:
        """Count records that are gone, and keep the first."""
        self.missing += len(ids)
        self.gone += ids[: NAMED - len(self.gone)]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyPosition:
    """How far a comparison is that has found no difference yet."""

    #: The last batch whose records were compared, and the number of batches up to there.
    batch: int = 0
    batches: int = 0
    fields_compared: int = 0
    embedded_again: int = 0
    searched: int = 0
    passed_over: int = 0
