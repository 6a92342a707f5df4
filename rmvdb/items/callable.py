"""The source `call:`: your own function or object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmvdb.errors import SourceError
from rmvdb.items.objects import Allowed, load_object

if TYPE_CHECKING:
    from rmvdb.types import Id, Item, Record


class CallableSource:
    """A function(ids) → {id: item}, or your own source: an object, or a class without arguments, with load(records)."""

    def __init__(self, spec: str, *, allowed: Allowed | None = None) -> None:
        """Raise SourceError if the object cannot be loaded, ConfigError if its module is not `allowed`."""
        self.spec = spec
        named = load_object(spec, error=SourceError, allowed=allowed)
        if inspect.isclass(named):
            named = self._guarded(named)
        self._load: Callable[[Sequence[Record]], object]
        #: Whether it gets the records with their fields, and not only the ids.
        self.reads_fields = callable(getattr(named, "load", None))
        if self.reads_fields:
            self._load = named.load
        elif callable(named):
            self._load = lambda records: named([record.id for record in records])
        else:
            raise SourceError(f"{spec!r} is a {type(named).__name__}; name a function(ids) or an object with load(records)")

    def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
        """Return items by id, as the function gives them. Leave out other ids and items that are None."""
        items = self._guarded(lambda: self._load(records))
        if not isinstance(items, Mapping):
            raise SourceError(f"{self.spec!r} gives a {type(items).__name__}; it must give a mapping of ids to items")
        wanted = self._guarded(lambda: {record.id: items.get(record.id) for record in records})
        return {id: item for id, item in wanted.items() if item is not None}

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (SourceError, MemoryError):  # smaller parts may fit into memory
            raise
        except (Exception, SystemExit) as exc:
            raise SourceError(f"{self.spec!r} fails: {type(exc).__name__}: {exc}; fix it and run the step again") from exc
