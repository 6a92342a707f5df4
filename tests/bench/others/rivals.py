"""embedflow, isotrieve and a plain switch of an alias, each used as its own documentation says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.curves.cases import Case
from tests.bench.others.gallery import BATCH, NEW, OLD, Gallery, batches, order, queries


class Rival:
    """A gallery whose records move in random order."""

    def __init__(self, case: Case, at: Path) -> None:
        self.gallery, self.order, self.done = Gallery(case, at), order(case), 0

    @property
    def moved(self) -> float:
        """The share of records that moved."""
        return self.done / len(self.order)

    def go(self, t: float) -> int:
        """Move records up to this share; return how many were moved."""
        until = round(t * len(self.order))
        rows, self.done = self.order[self.done : until], max(until, self.done)
        for some in batches(rows):
            self.move(some)
        return len(rows)

    def move(self, rows: list[int]) -> None:
        """Embed a batch of records anew, and write them into the new collection: the plain backfill."""
        self.gallery.copy(rows)

    def write(self, row: int, text: str) -> None:
        """Change a record."""
        self.gallery.write(row, text)

    def close(self) -> None:
        """Let go of everything."""
        self.gallery.close()


class Alias(Rival):
    """Searches use the old collection and the old model until the new collection is complete. Milvus Lite has no aliases, so
    a variable stands for one."""

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        gallery = self.gallery
        name, model = (NEW, gallery.new_model) if self.moved == 1 else (OLD, gallery.old_model)
        return [row for row, _ in gallery.search(name, queries(model, [query])[0])]


class Isotrieve(Rival):
    """The part in new space is re-embedded; a query is mapped into the old space for the others, and both answers are merged.

    isotrieve has the map and the merge. It has no backfill, so the plain one fills the new collection. A moved record leaves the
    old collection, since the merge would take its old score.
    """

    def __init__(self, case: Case, at: Path) -> None:
        from isotrieve.serve import QueryAdapter

        super().__init__(case, at)
        self.mapping = fitted(self.gallery)
        self.adapter = QueryAdapter(self.mapping)
        self.scores = self._scores()

    def move(self, rows: list[int]) -> None:
        """Copy a batch, and delete it in the old collection."""
        super().move(rows)
        self.gallery.client.delete(OLD, rows)

    def _scores(self) -> Any:
        """Return isotrieve's own map from scores of mapped queries to scores of the new model, fitted on its pairs: each
        record's 20 nearest, and others at random."""
        from isotrieve.recalibration import ScoreRecalibrator

        old, new = pairs(self.gallery)
        mapped, ceiling = np.asarray(self.adapter.map_queries(new)) @ old.T, new @ new.T
        some = np.random.default_rng(3).random(mapped.shape) < 0.1
        np.put_along_axis(some, np.argsort(-mapped, axis=1)[:, :21], values=True, axis=1)
        np.fill_diagonal(some, val=False)
        return ScoreRecalibrator().fit(mapped[some], ceiling[some])

    def write(self, row: int, text: str) -> None:
        """Change the record in the collection that holds it."""
        gallery = self.gallery
        if row in self.order[: self.done]:
            gallery.put(NEW, [row], gallery.new_model.embed([text]), [text])
        else:
            gallery.write(row, text)

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        from isotrieve.serve import merge_results

        vector = queries(self.gallery.new_model, [query])[0]
        found = [
            [{"id": row, "score": score} for row, score in self.gallery.search(name, each, BATCH)]
            for name, each in ((OLD, np.asarray(self.adapter.map_query(vector))), (NEW, vector))
        ]
        for hit, score in zip(found[0], self.scores.transform(np.array([hit["score"] for hit in found[0]])), strict=True):
            hit["score"] = float(score)
        found[0].sort(key=lambda hit: -hit["score"])  # stable: its map makes ties
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


class Embedflow(Rival):
    """Candidates come from the old collection, and the new model ranks those whose vectors are in its cache. `sync` candidates
    without one are embedded at once. Its own background worker is off, so that t stays what it is."""

    def __init__(self, case: Case, at: Path, sync: int = 4) -> None:
        import embedflow
        from embedflow.indexes.milvus_backend import MilvusDocumentStore, MilvusIndex

        super().__init__(case, at)
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

    def move(self, rows: list[int]) -> None:
        """Put a batch into the cache."""
        self.session.prewarm([str(row) for row in rows], asynchronous=False)

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        return [int(_id(hit)) for hit in self.session.search(query, top_k=10)["results"]]

    def close(self) -> None:
        """Let go of everything."""
        self.session.close()
        super().close()


def fitted(gallery: Gallery) -> Any:
    """Return isotrieve's default map, fitted on the pairs."""
    from isotrieve import RidgeMapping

    mapping = RidgeMapping()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there are few pairs; the page says so
        mapping.fit(*pairs(gallery))
    return mapping


def pairs(gallery: Gallery) -> tuple[np.ndarray, np.ndarray]:
    """Return old and new vectors of as many records as rmvdb's plan may look at, each of length 1."""
    rows = np.random.default_rng(1).permutation(len(gallery.case.records))[: gallery.case.sample]
    texts = [str(gallery.case.records[row]["text"]) for row in rows]
    return gallery.old_model.embed(texts), gallery.new_model.embed(texts)


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
