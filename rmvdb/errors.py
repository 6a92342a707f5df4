"""Every exception of rmvdb. Each message names the thing, the value and the way out.

RmvdbError                    something failed (exit code 1)
├── UsageError                the request is wrong, and you can correct it (exit code 2)
│   ├── ConfigError           a setting is unknown, malformed or out of range
│   ├── UnknownName           no model version, gallery, upgrade … has that name
│   ├── AlreadyExists         something else has that name
│   ├── UpgradeRunning        the gallery has an upgrade that has not ended
│   ├── WrongPhase            the upgrade's phase does not allow that step
│   │   └── Paused            the upgrade waits for rmvdb resume
│   ├── Mismatch              dimension, metric or model does not fit
│   ├── FilterError           rmvdb cannot understand a filter expression
│   ├── CannotAdopt           rmvdb cannot serve an existing collection
│   ├── NeedsConsent          a step removes something, and you have not agreed to it
│   └── NotOwner              another registry owns that collection, or this registry has gone back
├── EngineError               the vector engine refused a call
│   ├── EngineUnavailable     the vector engine cannot be reached
│   ├── EngineKilled          the vector engine ended during a call, several times
│   ├── Refused               the vector engine refused a call and changed nothing
│   │   └── Unwritable        a collection cannot hold a record
│   ├── AnswerTooLarge        the records of one answer are larger than the vector engine allows
│   ├── CollectionMissing     no collection has that name
│   └── CollectionChanged     a collection differs from what the registry recorded
├── RegistryError             the SQL registry refused a call
│   ├── RegistryUnavailable   the database cannot be reached
│   └── SchemaOutdated        the database is at another schema revision
├── RayUnavailable            Ray cannot be reached, or its head has ended
├── ModelError                an embedder cannot be loaded, or fails for every item
├── SourceError               a source cannot be loaded, or gives no item
│   └── SourceUnavailable     this machine cannot reach what a source reads
├── ItemError                 one item cannot be read or embedded (its record is quarantined)
├── ArtifactError             an artifact file is missing or altered
│   └── HomeUnreachable       the bucket of home does not answer
├── DiskFull                  the disk has no room for a file
├── PlanRefused               the plan would lower the quality, or cannot be made
├── VerifyFailed              the new gallery differs from the re-embedded old one
├── Quarantined               records are quarantined, so the upgrade cannot cut over
├── RecordsMissing            an old collection has lost records that rmvdb did not remove
├── StalePlan                 a client's serving plan is too old to answer safely
├── NotServed                 an application cannot serve the next plan yet
├── LeaseLost                 another worker has taken over this batch
└── Stopped                   you stopped the command; the same command resumes it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def offer(name: str, known: Iterable[str], *, hint: str = "") -> str:
    """Return what to offer for an unknown name: the nearest known name, else all known names, else the hint."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if known:
        return f"there are: {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"
    return hint or "there is none yet"


def message_of(exc: BaseException) -> str:
    """Return the message of an exception. If it isn't one of rmvdb's, the message starts with its class."""
    return str(exc) if isinstance(exc, RmvdbError) else f"{type(exc).__name__}: {exc}"


class RmvdbError(Exception):
    """Something failed.

    Remedy: Read the message, which names the way out, and run `rmvdb doctor`.
    """

    exit_code = 1


class UsageError(RmvdbError):
    """The request is wrong, and you can correct it.

    Remedy: Correct the request as the message says.
    """

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, malformed or out of range.

    Remedy: Correct the setting that the message names. `rmvdb init` in an empty folder writes a file with every setting.
    """


class UnknownName(UsageError):
    """Nothing of that kind has that name. The message offers the nearest name.

    Remedy: Use one of the names in the message, or register the name first, such as with `rmvdb model add`.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        super().__init__(f"No {kind} is called {name!r}; {offer(name, known, hint=hint)}")


class AlreadyExists(UsageError):
    """Something else has that name.

    Remedy: Choose another name, or remove the thing that has this one.
    """


class UpgradeRunning(UsageError):
    """The gallery has an upgrade that has not ended.

    Remedy: Finish the upgrade with `rmvdb upgrade` and `rmvdb cleanup`, or end it with `rmvdb rollback`.
    """


class WrongPhase(UsageError):
    """The upgrade's phase does not allow that step.

    Remedy: Look at the phase with `rmvdb status`, and run the step that the message names first.
    """


class Paused(WrongPhase):
    """The upgrade is paused. It continues after `rmvdb resume`.

    Remedy: Run `rmvdb resume`, then the same command again.
    """


class Mismatch(UsageError):
    """A dimension, a metric or a model does not fit.

    Remedy: Use a vector or model of the dimension and metric that the message names, or correct the item that made it.
    """


class FilterError(UsageError):
    """rmvdb cannot understand a filter expression.

    Remedy: Correct the expression at the position that the message names, or use a field of the schema.
    """


class CannotAdopt(UsageError):
    """rmvdb cannot serve an existing collection.

    Remedy: Change the collection as the message says, or create a new gallery with `rmvdb gallery add` and write the
    records into it.
    """


class NeedsConsent(UsageError):
    """A step removes something, and you have not agreed to it.

    Remedy: Repeat the command with the option that the message names, such as `--execute` or `--yes`, if you agree.
    """


class NotOwner(UsageError):
    """Another registry owns the gallery's collections, or this registry is older than the changes made to them.

    Remedy: Use the registry that the message names. If this one has gone back, run `rmvdb registry rebuild`; if the other
    one is lost for good, run `rmvdb gallery take`.
    """


class EngineError(RmvdbError):
    """The vector engine refused a call.

    Remedy: Look at the engine's log for the call in the message, then run the same command or call again.
    """


class EngineUnavailable(EngineError):
    """The vector engine cannot be reached.

    Remedy: Start the engine, or correct `milvus.uri` and `milvus.token`, then run the same command or call again.
    """


class EngineKilled(EngineError):
    """The vector engine ended during a call, several times. rmvdb does not send the call again.

    `ids`: the records of a write that ended the engine, if rmvdb knows them. These records are unchanged. The other records
    are written.

    Remedy: Look at the engine's memory and log. Correct or leave out the records of `ids`, then write again.
    """

    def __init__(self, message: str, *, ids: Iterable[int | str] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


class Refused(EngineError):
    """The vector engine refused a call and changed nothing.

    Remedy: Change what the message names, such as a right, a limit or a parameter, then call again.
    """


class Unwritable(Refused):
    """A collection cannot hold a record. rmvdb sent nothing of that call.

    Remedy: Correct the field or the id that the message names, then write the record again.
    """


class AnswerTooLarge(EngineError):
    """The records of one answer are larger than the vector engine allows.

    Remedy: Ask for fewer records, or for fewer of their fields.
    """


class CollectionMissing(EngineError):
    """No collection has that name.

    Remedy: Name the Milvus that holds the collection in `milvus.uri`, or restore the collection from its backup.
    """


class CollectionChanged(EngineError):
    """A collection differs from what the registry recorded.

    Remedy: Give the collection its former schema back, or remove the gallery with `rmvdb gallery remove` and add it again.
    """


class RegistryError(RmvdbError):
    """The SQL registry refused a call.

    Remedy: Correct what the message names in the database, such as a right or a full disk, then run the same command again.
    """


class RegistryUnavailable(RegistryError):
    """The database cannot be reached.

    Remedy: Start the database, or correct `registry.url`, then run the same command or call again.
    """


class SchemaOutdated(RegistryError):
    """The database is at another schema revision.

    Remedy: Run `rmvdb db upgrade`, or install the rmvdb that made the schema.
    """


class RayUnavailable(RmvdbError):
    """Ray cannot be reached, or its head has ended. Nothing is lost.

    Remedy: Start Ray and run the same command again, or start plain workers: `rmvdb worker`.
    """


class ModelError(RmvdbError):
    """An embedder cannot be loaded, or fails for every item.

    Remedy: Correct the embedder that the message names, its weights or its packages, then run the same command again.
    """


class SourceError(RmvdbError):
    """A source cannot be loaded, or gives no item.

    Remedy: Correct the source with `rmvdb gallery source`, then run the same command again.
    """


class SourceUnavailable(SourceError):
    """This machine cannot reach what a source reads.

    Remedy: Mount the folder, or bring the database back, on this machine, then run the same command again.
    """


class ItemError(RmvdbError):
    """One item cannot be read or embedded. Its record is quarantined. The other records continue.

    Remedy: Correct the item, then run `rmvdb quarantine retry`, or write the record again.
    """

    def __init__(self, message: str, *, at: int | None = None, reason: str = "") -> None:
        """`at`: the place of the item among several. `reason`: why it cannot be embedded."""
        super().__init__(message)
        self.at, self.reason = at, reason


class ArtifactError(RmvdbError):
    """An artifact file is missing or altered.

    Remedy: Restore the file from the backup of `home`, or repeat the step that wrote it.
    """


class HomeUnreachable(ArtifactError):
    """The bucket of `home` does not answer. Searches go on. The backfill, and commands that change the registry, wait for it.

    Remedy: When the bucket answers again, run the same command again.
    """


class DiskFull(RmvdbError):
    """The disk has no room for a file.

    Remedy: Make room on the disk that the message names, then run the same command again.
    """


class PlanRefused(RmvdbError):
    """The plan would lower the quality, or cannot be made.

    Remedy: Take the method that the message names, give more records or labels, or correct the new model.
    """


class VerifyFailed(RmvdbError):
    """The new gallery differs from the re-embedded old one.

    Remedy: Look at the differences with `rmvdb verify`, and put back what is lost with `rmvdb verify --repair`.
    """


class Quarantined(RmvdbError):
    """Records are quarantined. The upgrade cannot cut over while they are.

    Remedy: Look at them with `rmvdb quarantine list`, then use `rmvdb quarantine retry` or `rmvdb quarantine drop`.
    """


class RecordsMissing(RmvdbError):
    """An old collection has lost many records that rmvdb did not remove.

    Remedy: Restore the records, or agree that they were deleted with `--accept-missing`.
    """


class StalePlan(RmvdbError):
    """A client's serving plan is too old, so an answer could miss records.

    Remedy: Call again when the registry answers. `rmvdb doctor` checks it. After a long pause, connect again.
    """


class NotServed(RmvdbError):
    """An application cannot serve the next plan yet, and rmvdb has waited for it for the longest time allowed.

    Remedy: Correct the application that the message names, then run the same command again. To go on without the
    application, add `--force`.
    """


class LeaseLost(RmvdbError):
    """Another worker has taken over this batch.

    Remedy: Do nothing: the other worker continues the batch. If this happens often, raise `backfill.lease`.
    """


class Stopped(RmvdbError):
    """You stopped the command. The same command resumes it.

    Remedy: Run the same command to resume.
    """
