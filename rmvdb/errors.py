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
    """Something failed."""

    exit_code = 1


class UsageError(RmvdbError):
    """The caller can mend it by asking differently."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, malformed or out of range."""


class UnknownName(UsageError):
    """No thing of that kind has that name; the message offers the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        super().__init__(f"No {kind} is called {name!r}; {offer(name, known, hint=hint)}")


class AlreadyExists(UsageError):
    """That name is taken by something else."""


class UpgradeRunning(UsageError):
    """The gallery has an upgrade that has not ended."""


class WrongPhase(UsageError):
    """The upgrade's phase does not allow that step."""


class Paused(WrongPhase):
    """The upgrade is paused: nothing of it goes on before `rmvdb resume`."""


class Mismatch(UsageError):
    """A dimension, a metric or a model does not fit."""


class FilterError(UsageError):
    """A filter expression that cannot be understood."""


class CannotAdopt(UsageError):
    """An existing collection that rmvdb cannot serve."""


class NeedsConsent(UsageError):
    """A step that removes something was not agreed to."""


class NotOwner(UsageError):
    """Another registry owns the gallery's collections, or this one has gone back behind what was done to them."""


class EngineError(RmvdbError):
    """The vector engine refused a call."""


class EngineUnavailable(EngineError):
    """The vector engine cannot be reached."""


class EngineKilled(EngineError):
    """The vector engine ended during a call, again and again; the call is not sent any more.

    `ids`: of a write, the records by which it ended, if it is known by which; they are as they were, the others are written.
    """

    def __init__(self, message: str, *, ids: Iterable[int | str] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


class Refused(EngineError):
    """The vector engine refused a call before it did any of it."""


class Unwritable(Refused):
    """A record that its collection cannot hold; nothing of that call was sent."""


class CollectionMissing(EngineError):
    """No collection of that name."""


class CollectionChanged(EngineError):
    """A collection is not what the registry remembers."""


class RegistryError(RmvdbError):
    """The SQL registry refused a call."""


class RegistryUnavailable(RegistryError):
    """The database cannot be reached."""


class SchemaOutdated(RegistryError):
    """The database is at another schema revision."""


class ModelError(RmvdbError):
    """An embedder cannot be loaded, or is broken for every item."""


class SourceError(RmvdbError):
    """A source cannot be loaded, or gives nothing at all."""


class SourceUnavailable(SourceError):
    """What a source reads is not at hand on this machine."""


class ItemError(RmvdbError):
    """One item cannot be read or embedded; that record is quarantined and the others go on."""


class ArtifactError(RmvdbError):
    """An artifact file is missing or altered."""


class DiskFull(RmvdbError):
    """A file could not be written for lack of space."""


class PlanRefused(RmvdbError):
    """The plan would lower the quality, or cannot be made."""


class VerifyFailed(RmvdbError):
    """The new gallery is not the old one, re-embedded."""


class Quarantined(RmvdbError):
    """Records are quarantined, and no cut-over leaves them behind."""


class RecordsMissing(RmvdbError):
    """Records are gone from an old collection, in numbers, and rmvdb did not remove them."""


class StalePlan(RmvdbError):
    """A client's serving plan is too old to answer without risking to miss records."""


class NotServed(RmvdbError):
    """An application cannot serve the next plan yet, and it was waited for as long as may be."""


class LeaseLost(RmvdbError):
    """Another worker has taken over this batch."""


class Stopped(RmvdbError):
    """Somebody asked for a stop; the same command goes on from there."""
