"""What the registry cannot be without, in a file beside the archive, for the day on which the database is lost.

The registry hands its contents over within every transaction that changes them, before it is committed: the file is never behind
the database, and at most one change ahead of it, which is one that the same command makes again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rmvdb.errors import ArtifactError, RegistryError, SchemaOutdated
from rmvdb.registry.manifest_rows import Contents
from rmvdb.storage import files

#: Grows when an older rmvdb could not read what this one writes.
FORMAT = 1


class Manifest:
    """One file, whole or not there at all, that knows its own SHA-256."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, contents: Contents) -> None:
        """Keep these contents; nothing is written where the file has them already.

        Raises RegistryError where the file holds the galleries of another registry: one that was lost must not be forgotten
        because somebody begins anew; and where it is ahead, but for one change that was not committed: an older copy of the
        registry must not take its place. Raises DiskFull and ArtifactError where it cannot be written.
        """
        known = self._known()
        if known == contents:
            return
        if known and known["galleries"] and not _versions(known) & _versions(contents):
            raise self._lost(known)
        if known and (kept := _changes(known)) > (own := _changes(contents)):
            raise RegistryError(
                f"The registry is an older copy: {self.path} holds its change {kept}, and this is change {own}; put the newer "
                "database back, or empty this one and run rmvdb registry rebuild; to go on with the older one, move that file "
                "away"
            )
        whole = {"rmvdb": FORMAT, "sha256": _digest(contents), "tables": contents}
        files.durable_write(self.path, json.dumps(whole, indent=1, ensure_ascii=False).encode())

    def read(self) -> Contents:
        """The contents; ArtifactError where the file is missing or altered, SchemaOutdated where a newer rmvdb wrote it."""
        try:
            whole = json.loads(self.path.read_bytes())
        except FileNotFoundError as exc:
            raise ArtifactError(f"{self.path} is missing; put it back from a backup of that folder") from exc
        except OSError as exc:
            raise ArtifactError(f"{self.path} cannot be read ({exc.strerror}); mend that and run the step again") from exc
        except ValueError:
            whole = None
        return self._checked(whole)

    def check_forgotten(self) -> None:
        """RegistryError where the file holds galleries; for a registry that has none."""
        known = self._known()
        if known and known["galleries"]:
            raise self._lost(known)

    def _lost(self, contents: Contents) -> RegistryError:
        names = ", ".join(row["name"] for row in contents["galleries"])
        return RegistryError(
            f"The registry does not know gallery {names}, which {self.path} holds: was it lost? rmvdb registry rebuild brings it "
            "back; to begin anew, move that file away"
        )

    def _checked(self, whole: Any) -> Contents:
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
            raise ArtifactError(f"{self.path} was altered: it is not what its SHA-256 says; put it back from a backup")
        return contents

    def _known(self) -> Contents | None:
        """What the file holds; nothing where it is missing or damaged, which the next write mends."""
        try:
            return self.read()
        except ArtifactError:
            return None


def _versions(contents: Contents) -> set[tuple[str, float]]:
    """What a registry is known by: no change takes the model versions of all its galleries out of it."""
    return {(row["name"], row["created_at"]) for row in contents["model_versions"]}


def _changes(contents: Contents) -> int:
    """How many changes led to these contents."""
    return max((row["number"] for row in contents.get("changes", ())), default=0)


def _digest(contents: Contents) -> str:
    return files.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode())
