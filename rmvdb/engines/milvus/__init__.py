"""VectorStore over pymilvus: a Milvus server or cluster from 2.3 on, or a Milvus Lite process.

`store` lists the verbs, whose rooms are `creating`, `describing`, `searching`, `reading` and `writing`; `rows` has what they send
and get. Each is a call of a `session`, which repeats it where that helps, on a `connection`. `failures` reads what goes wrong,
`driver` alone imports pymilvus.

What was measured on Milvus 2.3.5, Milvus Lite 2.5.1 and 3.2.2, and decides how things are done here:
a limited query gives the lowest keys on the first two (fewer than asked where keys are duplicated) and any keys on the third;
a server collapses duplicated keys only after it has cut at the limit; an upsert that names a key twice stores it twice;
Lite 2.5 puts ids into its own SQL unescaped and its search fails on an undeclared output field of an empty collection.
"""

from rmvdb.engines.milvus.store import MilvusStore

__all__ = ["MilvusStore"]
