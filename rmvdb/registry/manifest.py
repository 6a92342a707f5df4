"""The manifest: a file beside the archive from which rmvdb rebuilds the registry if the database is lost.

The registry hands over its contents in each transaction that changes them, before the commit. So the file is never behind the
database. It is at most one change ahead, and the same command makes that change again.
"""

from __future__ import annotations

import json
from typing import Any

from rmvdb.errors import ArtifactError, RegistryError, SchemaOutdated
from rmvdb.registry.manifest_rows import Contents
from rmvdb.storage import files
from rmvdb.storage.folders import Folder

#: The file's name in home.
NAME = "manifest.json"
#: Grows if an older rmvdb could not read this file.
FORMAT = 1


class Manifest:
    """One file with its own SHA-256. It is whole, or it does not exist."""

    def __init__(self, home: Folder) -> None:
        self._home = home
        #: Where it is, for messages.
        self.path = home.where(NAME)

    def write(self, contents: Contents) -> None:
        """Write these contents, unless the file has them already.

        Raises:
            RegistryError: the file holds the galleries of another registry, which may be lost, or is more than one uncommitted
                change ahead, so that this registry is an older copy.
            DiskFull: the disk has no room.
            ArtifactError: the file cannot be written.
        """
        known = self._known()
        if known == contents:
            return
        if known and known["galleries"] and not _versions(known) & _versions(contents):
            raise self._lost(known)
        if known and (newer := _changes(known)) > (own := _changes(contents)):
            raise RegistryError(
                f"The registry is an older copy: {self.path} holds its change {newer}, and this is change {own}; put the newer "
                "database back, or empty this one and run rmvdb registry rebuild. To continue with the older one, move that file "
                "away"
            )
        whole = {"rmvdb": FORMAT, "sha256": _digest(contents), "tables": contents}
        self._home.write(NAME, json.dumps(whole, indent=1, ensure_ascii=False).encode())

    def read(self) -> Contents:
        """Return the contents.

        Raises:
            ArtifactError: the file is missing, unreadable or was altered.
            HomeUnreachable: the bucket does not answer.
            SchemaOutdated: a newer rmvdb wrote it.
        """
        return self._checked(self._home.read(NAME))

    def check_forgotten(self) -> None:
        """Raise RegistryError if the file holds galleries. Call this for a registry that has none."""
        known = self._known()
        if known and known["galleries"]:
            raise self._lost(known)

    def _lost(self, contents: Contents) -> RegistryError:
        names = ", ".join(row["name"] for row in contents["galleries"])
        return RegistryError(
            f"The registry does not know gallery {names}, which {self.path} holds; if the registry was lost, bring it back: "
            "rmvdb registry rebuild. To start again without it, move that file away"
        )

    def _checked(self, data: bytes) -> Contents:
        try:
            whole: Any = json.loads(data)
        except ValueError:
            whole = None
        if isinstance(whole, dict) and isinstance(whole.get("rmvdb"), int) and whole["rmvdb"] > FORMAT:
            raise SchemaOutdated(
                f"{self.path} is of format {whole['rmvdb']}, this rmvdb knows {FORMAT}; install the newer release that wrote it"
            )
        try:
            contents: Contents = whole["tables"]
            intact = whole["sha256"] == _digest(contents)
        except (TypeError, KeyError):
            intact = False
        if not intact:
            raise ArtifactError(f"{self.path} was altered: its SHA-256 does not match; put it back from a backup")
        return contents

    def _known(self) -> Contents | None:
        """Return the contents, or None if the file is missing or damaged. The next write repairs it."""
        try:
            data = self._home.read(NAME)
        except ArtifactError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return None
            raise  # it may hold the galleries of another registry
        try:
            return self._checked(data)
        except ArtifactError:
            return None


def _versions(contents: Contents) -> set[tuple[str, float]]:
    """Return the model versions, which identify a registry: no change removes all of those that its galleries use."""
    return {(row["name"], row["created_at"]) for row in contents["model_versions"]}


def _changes(contents: Contents) -> int:
    """Return how many changes led to these contents."""
    return max((row["number"] for row in contents.get("changes", ())), default=0)


def _digest(contents: Contents) -> str:
    return files.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode())
