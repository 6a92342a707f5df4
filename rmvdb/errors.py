"""Every exception of rmvdb. Each message is one sentence that names the thing, the value and the way out.

RmvdbError                    something failed (exit code 1)
├── UsageError                the caller can mend it by asking differently (exit code 2)
│   ├── ConfigError           a setting is unknown, malformed or out of range
│   ├── UnknownName           no model version, gallery, upgrade … of that name
│   ├── AlreadyExists         that name is taken by something else
│   ├── UpgradeRunning        the gallery has an upgrade that has not ended
│   ├── WrongPhase            the upgrade's phase does not allow that step
│   │   └── Paused            nothing of the upgrade goes on before rmvdb resume
│   ├── Mismatch              dimension, metric or model does not fit
│   ├── FilterError           a filter expression that cannot be understood
│   ├── CannotAdopt           an existing collection that rmvdb cannot serve
│   ├── NeedsConsent          a step that removes something was not agreed to
│   └── NotOwner              another registry owns that collection, or this one has gone back
├── EngineError               the vector engine refused a call
│   ├── EngineUnavailable     the vector engine cannot be reached
│   ├── EngineKilled          the vector engine ended during a call, again and again
│   ├── Refused               the vector engine refused a call before it did any of it
│   │   └── Unwritable        a record that its collection cannot hold
│   ├── CollectionMissing     no collection of that name
│   └── CollectionChanged     a collection is not what the registry remembers
├── RegistryError             the SQL registry refused a call
│   ├── RegistryUnavailable   the database cannot be reached
│   └── SchemaOutdated        the database is at another schema revision
├── ModelError                an embedder cannot be loaded, or is broken for every item
├── SourceError               a source cannot be loaded, or gives nothing at all
│   └── SourceUnavailable     what a source reads is not at hand on this machine
├── ItemError                 one item cannot be read or embedded (that record is quarantined)
├── ArtifactError             an artifact file is missing or altered
├── DiskFull                  a file could not be written for lack of space
├── PlanRefused               the plan would lower the quality, or cannot be made
├── VerifyFailed              the new gallery is not the old one, re-embedded
├── Quarantined            records are quarantined, and no cut-over leaves them behind
├── RecordsMissing            records are gone from an old collection, and rmvdb did not remove them
├── StalePlan                 a client's serving plan is too old to answer safely
├── NotServed                 an application cannot serve the next plan yet
├── LeaseLost                 another worker has taken over this batch
└── Stopped                   a stop was asked for; the same command goes on
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def offer(name: str, known: Iterable[str], *, hint: str = "") -> str:
    """What to say instead of a name that is not known: the nearest one, else those there are, else the hint."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if known:
        return f"there are: {', '.join(known[:8])}{' …' if len(known) > 8 else ''}"
    return hint or "there is none yet"


def told(exc: BaseException) -> str:
    """What to say of it: of what is none of ours its kind, too."""
    return str(exc) if isinstance(exc, RmvdbError) else f"{type(exc).__name__}: {exc}"


class RmvdbError(Exception):
    """Something failed.

    Remedy: Read the message, which names the way out, and run `rmvdb doctor`.
    """

    exit_code = 1


class UsageError(RmvdbError):
    """The caller can mend it by asking differently.

    Remedy: Ask again in the way that the message names.
    """

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, malformed or out of range.

    Remedy: Correct the setting that the message names. `rmvdb init` in an empty folder writes a file with every setting.
    """


class UnknownName(UsageError):
    """No thing of that kind has that name; the message offers the nearest one.

    Remedy: Use one of the names in the message, or register the name first, such as with `rmvdb model add`.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        super().__init__(f"No {kind} is called {name!r}; {offer(name, known, hint=hint)}")


class AlreadyExists(UsageError):
    """That name is taken by something else.

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
    """The upgrade is paused: nothing of it goes on before `rmvdb resume`.

    Remedy: Run `rmvdb resume`, then the same command again.
    """


class Mismatch(UsageError):
    """A dimension, a metric or a model does not fit.

    Remedy: Use a vector or model of the dimension and metric that the message names, or correct the item that made it.
    """


class FilterError(UsageError):
    """A filter expression that cannot be understood.

    Remedy: Correct the expression at the position that the message names, or use a field of the schema.
    """


class CannotAdopt(UsageError):
    """An existing collection that rmvdb cannot serve.

    Remedy: Change the collection as the message says, or create a new gallery with `rmvdb gallery add` and write the
    records into it.
    """


class NeedsConsent(UsageError):
    """A step that removes something was not agreed to.

    Remedy: Repeat the command with the option that the message names, such as `--execute` or `--yes`, if you agree.
    """


class NotOwner(UsageError):
    """Another registry owns the gallery's collections, or this one has gone back behind what was done to them.

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
    """The vector engine ended during a call, again and again; the call is not sent any more.

    `ids`: of a write, the records by which it ended, if it is known by which; they are as they were, the others are written.

    Remedy: Look at the engine's memory and log. Correct or leave out the records of `ids`, then write again.
    """

    def __init__(self, message: str, *, ids: Iterable[int | str] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


class Refused(EngineError):
    """The vector engine refused a call before it did any of it.

    Remedy: Change what the message names, such as a right, a limit or a parameter, then call again.
    """


class Unwritable(Refused):
    """A record that its collection cannot hold; nothing of that call was sent.

    Remedy: Correct the field or the id that the message names, then write the record again.
    """


class CollectionMissing(EngineError):
    """No collection of that name.

    Remedy: Name the Milvus that holds the collection in `milvus.uri`, or restore the collection from its backup.
    """


class CollectionChanged(EngineError):
    """A collection is not what the registry remembers.

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


class ModelError(RmvdbError):
    """An embedder cannot be loaded, or is broken for every item.

    Remedy: Correct the embedder that the message names, its weights or its packages, then run the same command again.
    """


class SourceError(RmvdbError):
    """A source cannot be loaded, or gives nothing at all.

    Remedy: Correct the source with `rmvdb gallery source`, then run the same command again.
    """


class SourceUnavailable(SourceError):
    """What a source reads is not at hand on this machine.

    Remedy: Mount the folder, or bring the database back, on this machine, then run the same command again.
    """


class ItemError(RmvdbError):
    """One item cannot be read or embedded; that record is quarantined and the others go on.

    Remedy: Correct the item, then run `rmvdb quarantine retry`, or write the record again.
    """


class ArtifactError(RmvdbError):
    """An artifact file is missing or altered.

    Remedy: Restore the file from the backup of `home`, or repeat the step that wrote it.
    """


class DiskFull(RmvdbError):
    """A file could not be written for lack of space.

    Remedy: Make room on the disk that the message names, then run the same command again.
    """


class PlanRefused(RmvdbError):
    """The plan would lower the quality, or cannot be made.

    Remedy: Take the method that the message names, give more records or labels, or correct the new model.
    """


class VerifyFailed(RmvdbError):
    """The new gallery is not the old one, re-embedded.

    Remedy: Look at the differences with `rmvdb verify`, and put back what is lost with `rmvdb verify --repair`.
    """


class Quarantined(RmvdbError):
    """Records are quarantined, and no cut-over leaves them behind.

    Remedy: Look at them with `rmvdb quarantine list`, then use `rmvdb quarantine retry` or `rmvdb quarantine drop`.
    """


class RecordsMissing(RmvdbError):
    """Records are gone from an old collection, in numbers, and rmvdb did not remove them.

    Remedy: Restore the records, or agree that they were deleted with `--accept-missing`.
    """


class StalePlan(RmvdbError):
    """A client's serving plan is too old to answer without risking to miss records.

    Remedy: Call again once the registry answers; look at it with `rmvdb doctor`. After a long pause, connect again.
    """


class NotServed(RmvdbError):
    """An application cannot serve the next plan yet, and it was waited for as long as may be.

    Remedy: Correct the application that the message names, or leave it behind with `--force`, then run the same command
    again.
    """


class LeaseLost(RmvdbError):
    """Another worker has taken over this batch.

    Remedy: Nothing is to be done: the other worker goes on with the batch. Raise `backfill.lease` if it happens often.
    """


class Stopped(RmvdbError):
    """Somebody asked for a stop; the same command goes on from there.

    Remedy: Run the same command to resume.
    """
