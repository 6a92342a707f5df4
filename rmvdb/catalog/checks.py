"""Checks of a collection against its row in the registry: the schema, and the model that made its vectors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from rmvdb import errors
from rmvdb.items.check import embed_checked
from rmvdb.items.field import FieldSource
from rmvdb.items.sources import given
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import key, schema_from_json
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import CollectionRow, GalleryRow, VersionRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.text import counted
from rmvdb.types import Id, Metric, Record, Schema, Vectors

#: Records that are embedded again to see whether the model made a collection's vectors.
COMPARED = 8
#: Pages of so many records in which it looks for those that no client wrote.
PAGE, PAGES = 64, 16
#: The answer of `check_vectors` if the source has no item for any of these records.
UNCOMPARED = "no vector could be compared"
#: The largest cosine distance between the model's vector and one that another program stored, perhaps in half precision.
AGREES = 1e-3


def check_fits(schema: Schema, version: VersionRow) -> None:
    """Raise Mismatch if a collection's dimension or metric is not the version's."""
    if schema.dim != version.dim:
        raise errors.Mismatch(
            f"Collection {schema.collection!r} has dimension {schema.dim}, model version {version.name!r} gives {version.dim}; "
            "name the version that made these vectors"
        )
    if schema.metric != Metric(version.metric).stored:
        raise errors.Mismatch(
            f"Collection {schema.collection!r} is compared by {schema.metric}, model version {version.name!r} by "
            f"{version.metric}; register it anew: rmvdb model remove {version.name}, then rmvdb model add {version.name} with "
            f"--metric {schema.metric}"
        )


def check_ids(store: VectorStore, collection: str) -> None:
    """Raise CannotAdopt if the collection holds an id that rmvdb could not move: another program may write what rmvdb refuses."""
    if (id := store.unservable(collection)) is not None:
        raise errors.CannotAdopt(
            f"Collection {collection!r} holds the id {id!r}, which {store.version()} cannot read or delete by its value; copy "
            "the records into a collection with other ids, or into a Milvus server"
        )


def check_unchanged(store: VectorStore, row: CollectionRow) -> Schema:
    """Return the collection's schema.

    Raises: CollectionChanged if it is not the registered one, CollectionMissing if the collection is gone.
    """
    registered, current = schema_from_json(row.schema), store.describe(row.name)
    for name in ("dim", "metric", "id_type", "id_field", "vector_field"):
        if getattr(current, name) != getattr(registered, name):
            raise errors.CollectionChanged(
                f"Collection {row.name!r} has {name} {getattr(current, name)}, not {getattr(registered, name)} as when it "
                "was registered; restore it, or register it as a gallery of its own"
            )
    return current


def check_vectors(
    registry: Registry, store: VectorStore, loaded_models: LoadedModels, gallery: GalleryRow, source: Source
) -> str:
    """Say how many records of the gallery, embedded again by their model, match the stored vectors.

    If a copy is being emptied, its original is compared. A collection whose model cannot be loaded is not compared, and none is
    if the source is not reachable from here.

    Raises: Mismatch if they do not match.
    """
    upgrade = registry.active_upgrade(gallery.id)
    original = upgrade.original if upgrade else None
    compared, leave_out = 0, functools.partial(written_by_clients, registry, gallery)
    for collection in [original] if original else [leg.collection for leg in registry.plan(gallery.name).legs]:
        version = registry.version(registry.collection(collection).model)
        try:
            if _loads(loaded_models, version):
                compared += check_made(store, loaded_models, collection, version, source, leave_out=leave_out)
        except errors.SourceUnavailable as exc:
            return f"no vector could be compared: {exc}; run rmvdb doctor on a machine that has it"
    return say_compared(compared)


def written_by_clients(registry: Registry, gallery: GalleryRow, ids: Sequence[Id]) -> set[str]:
    """Return the keys of the records that clients wrote during an upgrade: ψ, or another item, may have made their vectors."""
    return {record for row in registry.upgrades(gallery.id) for record in registry.announced(row.id, ids)}


def say_unsettled(store: VectorStore, collection: str, gallery: str) -> str:
    """Say that searches may miss fresh rows of the collection, and the way out. Say nothing if they find each."""
    segments = store.segments(collection)
    if segments.settled:
        return ""
    return (
        f"{counted(segments.fresh, 'row is', 'rows are')} not flushed, and a search with a filter may miss some of them; to "
        f"flush and index them: rmvdb gallery settle {gallery}"
    )


def say_compared(compared: int) -> str:
    """Say how many records were compared."""
    if not compared:
        return UNCOMPARED
    return f"{counted(compared, 'record')}, embedded again, {'matches' if compared == 1 else 'match'} the stored vectors"


def _loads(loaded_models: LoadedModels, version: VersionRow) -> bool:
    try:
        loaded_models.embedder(version.base or version.name)
    except errors.ModelError:
        return False
    return True


def check_made(
    store: VectorStore,
    loaded_models: LoadedModels,
    collection: str,
    version: VersionRow,
    source: Source,
    *,
    agrees: float = AGREES,
    leave_out: Callable[[Sequence[Id]], Collection[str]] = lambda _: (),
) -> int:
    """Embed a few records again and compare them with the stored vectors. Return how many could be compared.

    Another model may have the same dimension, so the schema alone does not tell. `agrees` is the largest cosine distance at
    which two vectors count as the same. `leave_out` returns the keys of the records among these that are not compared.

    Raises: Mismatch if more than half of them differ.
    """
    records: list[Record] = []
    for page in itertools.islice(store.scan(collection, fields=None, vector=True, page=PAGE), PAGES):
        left_out = leave_out([record.id for record in page])
        records += [record for record in page if key(record.id) not in left_out]
        if len(records) >= COMPARED:
            break
    records = records[:COMPARED]
    items = given(source, records)[0]
    with_item = [record for record in records if record.id in items]
    if not with_item:
        if records and isinstance(source, FieldSource):
            _expect_field(store, collection, records, source.field)
        return 0
    embedder = loaded_models.embedder(version.base or version.name)
    raw, bad = embed_checked(embedder, [items[record.id] for record in with_item], version.dim, confirm=True)
    own = loaded_models.apply_head(version.name, raw)
    far = [record for at, record in enumerate(with_item) if at not in bad and _distance(record, own[at]) > agrees]
    if len(far) * 2 > len(with_item) - len(bad):
        raise errors.Mismatch(
            f"The vectors in collection {collection!r} were not made by model version {version.name!r} from these items: "
            f"{len(far)} of {counted(len(with_item), 'record')}, such as {far[0].id!r}, gave another vector; name the version, "
            "or the source, that made them"
        )
    return len(with_item) - len(bad)


def _expect_field(store: VectorStore, collection: str, records: Sequence[Record], field: str) -> None:
    """Raise UsageError if neither the collection nor one of these records has that field."""
    declared = (each.name for each in store.describe(collection).fields)
    known = sorted({*declared, *(name for record in records for name in record.fields)})
    if field not in known:
        raise errors.UsageError(
            f"Collection {collection!r} has no field {field!r}, from which --source takes the items; it has: "
            f"{', '.join(known) or 'none'}"
        )


def _distance(record: Record, own: Vectors) -> float:
    stored = np.asarray(record.vector, np.float64)
    scale = float(np.linalg.norm(stored) * np.linalg.norm(own))
    return 1.0 - float(stored @ own) / scale if scale else 0.0
