"""One upgrade, as its batches see it."""

from __future__ import annotations

from dataclasses import dataclass

from rmvdb.registry.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One upgrade, as its batches see it."""

    upgrade: int
    gallery: str
    #: The collections that are emptied, newest first.
    old: tuple[str, ...]
    #: The collection that is filled. A roll back adds the collections behind it, into which the archive puts records back.
    new: tuple[str, ...]
    #: The model version whose vectors go into `new`.
    version: str
    #: Seconds between copied and removed.
    grace: float
    #: Whether records may leave `old`. False for an adopted collection until you agree to removals.
    removal_allowed: bool = True
    #: The upgrade that a roll back undoes: its done intents override the archive. None for a step forward.
    undoes: int | None = None
    #: For a roll back: the transforms (new → old) that replace an embedder which cannot be loaded.
    fallback_transforms: tuple[str, ...] = ()
    #: The collection whose vectors key the embeddings that planning kept, if `old` has other vectors.
    cache_vectors_from: str | None = None
    #: The share of a batch, and of the work list, that may be missing from `old` without a reason. 1 accepts every loss.
    missing: float = 0.01

    @property
    def in_place(self) -> bool:
        """Whether the records stay in their collection, and only their vectors are replaced."""
        return self.old == self.new

    @property
    def archive_folders(self) -> tuple[str, str]:
        """The folders of this upgrade in the archive."""
        return self.gallery, str(self.upgrade)


def grace(registry: Registry, task: Task) -> float:
    """Return the seconds between copied and removed; the plan in force may ask for more than the task's own plan did."""
    return max(task.grace, registry.plan(task.gallery).grace)
