"""embedflow, isotrieve and a plain switch of an alias, each used as its own documentation says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.curves.cases import Case
from tests.bench.others.gallery import BATCH, NEW, OLD, Gallery, batches, order, queries


class Alias:
    """Searches use the old collection and the old model until the new collection is complete. Milvus Lite has no aliases, so
    a variable stands for one."""

    def __init__(self, case: Case, at: Path) -> None:
        self.case, self.gallery, self.order = case, Gallery(case, at), order(case)
        self.done = 0

    @property
    def moved(self) -> float:
        """The share of records that the new collection holds."""
        return self.done / len(self.order)

    def go(self, t: float) -> int:
        """Move records up to this share; return how many were moved."""
        until = round(t * len(self.order))
        rows, self.done = self.order[self.done : until], max(until, self.done)
        self.gallery.copy(rows)
        return len(rows)

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        gallery = self.gallery
        name, model = (NEW, gallery.new_model) if self.moved == 1 else (OLD, gallery.old_model)
        return [row for row, _ in gallery.search(name, queries(model, [query])[0])]

    def write(self, row: int, text: str) -> None:
        """Change a record."""
        self.gallery.write(row, text)

    def close(self) -> None:
        """Let go of everything."""
        self.gallery.close()


class Isotrieve(Alias):
    """The part in new space is re-embedded; a query is mapped into the old space for the others, and both answers are merged.

    isotrieve has the map and the merge. It has no backfill, so the plain one fills the new collection.
    """

    def __init__(self, case: Case, at: Path) -> None:
        from isotrieve.serve import QueryAdapter

        super().__init__(case, at)
        self.mapping = fitted(self.gallery)
        self.adapter = QueryAdapter(self.mapping)

    def search(self, query: str) -> list[int]:
        from isotrieve.serve import merge_results

        vector = queries(self.gallery.new_model, [query])[0]
        found = [
            [{"id": row, "score": score} for row, score in self.gallery.search(name, each, BATCH)]
            for name, each in ((OLD, np.asarray(self.adapter.map_query(vector))), (NEW, vector))
        ]
        merged = merge_results(found[0], found[1], {int(row) for row in self.order[: self.done]})
        return [hit["id"] for hit in merged[:10]]


class Transformed(Alias):
    """isotrieve's main way: stored vectors are mapped into the new space, and no record is embedded. Searches use the old
    collection until all are mapped. isotrieve knows no Milvus, so the bench gives it a `VectorStore` of its own."""

    def __init__(self, case: Case, at: Path) -> None:
        super().__init__(case, at)
        self.mapping = fitted(self.gallery)
        self.pending: list[tuple[int, str]] = []

    def go(self, t: float) -> int:
        """Map everything at t = 1. Before that a client sees no difference, whatever has been mapped."""
        if t < 1:
            return 0
        from isotrieve.migrate import migrate_store

        migrate_store(_store(self.gallery, OLD, self._halfway), _store(self.gallery, NEW), self.mapping, batch_size=BATCH)
        self.done = len(self.order)
        return self.done

    def write(self, row: int, text: str) -> None:
        """Change the record now, as another client would. It is changed again once half of the records are mapped."""
        super().write(row, text)
        self.pending.append((row, text))

    def undo(self, originals: Sequence[tuple[int, str]]) -> None:
        """Write the old texts back, so that the pending writes come in the middle."""
        for row, text in originals:
            self.gallery.write(row, text)

    def _halfway(self) -> None:
        for row, text in self.pending:
            self.gallery.write(row, text)


class Embedflow:
    """Candidates come from the old collection, and the new model ranks those whose vectors are in its cache. `sync` candidates
    without one are embedded at once. Its own background worker is off, so that t stays what it is."""

    def __init__(self, case: Case, at: Path, sync: int = 4) -> None:
        import embedflow
        from embedflow.indexes.milvus_backend import MilvusDocumentStore, MilvusIndex

        self.gallery, self.order, self.done = Gallery(case, at), order(case), 0
        index = MilvusIndex(
            self.gallery.client,
            collection=OLD,
            dimension=self.gallery.dims[OLD],
            vector_field="vector",
            text_field="text",
            uri=self.gallery.uri,
        )
        self.session = embedflow.migrate(
            index=index,
            backend="milvus",
            uri=self.gallery.uri,
            collection=OLD,
            vector_field="vector",
            text_field="text",
            old_model=_model(self.gallery.old_model, "v1"),
            new_model=_model(self.gallery.new_model, "v2"),
            documents=MilvusDocumentStore(index, text_field="text", owns_index=False),
            cache_path=at / "cache",
            state_path=at / "state.json",
            max_sync_misses=sync,
            start_worker=False,
        )

    @property
    def moved(self) -> float:
        """The share of records that the cache holds."""
        return self.done / len(self.order)

    def go(self, t: float) -> int:
        """Fill the cache up to this share; return how many records were embedded."""
        until = round(t * len(self.order))
        rows, self.done = self.order[self.done : until], max(until, self.done)
        for some in batches(rows):
            self.session.prewarm([str(row) for row in some], asynchronous=False)
        return len(rows)

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        return [int(_id(hit)) for hit in self.session.search(query, top_k=10)["results"]]

    def write(self, row: int, text: str) -> None:
        """Change a record."""
        self.gallery.write(row, text)

    def close(self) -> None:
        """Let go of everything."""
        self.session.close()
        self.gallery.close()


def fitted(gallery: Gallery) -> Any:
    """Return isotrieve's default map, fitted on as many pairs as rmvdb's plan may look at."""
    from isotrieve import RidgeMapping

    rows = np.random.default_rng(1).permutation(len(gallery.case.records))[: gallery.case.sample]
    vectors, texts = gallery.get(OLD, rows.tolist())
    mapping = RidgeMapping()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there are few pairs; the page says so
        mapping.fit(vectors, gallery.new_model.embed(texts))
    return mapping


def _store(gallery: Gallery, name: str, halfway: Callable[[], None] | None = None) -> Any:
    """Return a `VectorStore` of isotrieve over a collection of Milvus."""
    from isotrieve.stores.base import VectorRecord, VectorStore

    class MilvusStore(VectorStore):
        def count(self) -> int:
            return len(gallery.case.records)

        def iter_vectors(self, batch_size: int = BATCH) -> Iterator[list[Any]]:
            parts = batches(order(gallery.case))
            for number, rows in enumerate(parts):
                if halfway and number == len(parts) // 2:
                    halfway()
                vectors, texts = gallery.get(name, rows)
                some = zip(rows, vectors, texts, strict=True)
                yield [VectorRecord(id=str(row), vector=vector, text=text) for row, vector, text in some]

        def write_vectors(self, records: Any, *, batch_size: int = BATCH) -> int:
            written = 0
            for part in records if not isinstance(records, list) or isinstance(records[0], list) else [records]:
                texts = [each.text or gallery.get(OLD, [int(each.id)])[1][0] for each in part]
                gallery.put(name, [int(each.id) for each in part], np.array([each.vector for each in part]), texts)
                written += len(part)
            return written

    return MilvusStore()


def _model(embedder: Any, name: str) -> Any:
    """Return the model as embedflow takes it."""
    from embedflow.models.base import EmbeddingModel

    dim = embedder.embed(["a"]).shape[1]

    class Model(EmbeddingModel):
        def __init__(self) -> None:
            self.model_id, self.dimension, self.fingerprint = name, dim, f"{name}-{dim}"

        def encode_documents(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
            vectors: np.ndarray = embedder.embed(list(texts))
            return vectors

        def encode_queries(self, texts: list[str]) -> np.ndarray:
            return queries(embedder, texts)

        def metadata(self) -> dict[str, Any]:
            return {"model_id": self.model_id, "dimension": dim, "fingerprint": self.fingerprint}

        def close(self) -> None:
            """Nothing is open."""

    return Model()


def _id(hit: Any) -> Any:
    return next(hit[key] for key in ("id", "document_id", "doc_id") if key in hit)
