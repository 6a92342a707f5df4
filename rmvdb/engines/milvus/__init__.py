"""VectorStore over pymilvus: a Milvus server or cluster from 2.3 on, or a Milvus Lite process.

`store` lists the verbs. They are in `creating`, `describing`, `searching`, `reading`, `writing` and `settling`; `rows` has their
records, and `layouts` what a new collection takes over from another. Each verb is a call of a `session`, which repeats it if that
helps, on a `connection`. `failures` interprets errors. Only `driver` imports pymilvus.

Measured on Milvus 2.3.5, Milvus Lite 2.5.1 and 3.2.2, and decisive for this code:

- A limited query gives the lowest keys on the first two (fewer than the limit if keys are duplicated), and any keys on the third.
- A server removes duplicated keys only after it has cut at the limit. An upsert that names a key twice stores it twice.
- Lite 2.5 puts ids into its own SQL unescaped. Its search fails on an undeclared output field of an empty collection.
"""

from rmvdb.engines.milvus.store import MilvusStore

__all__ = ["MilvusStore"]
