"""The vector store, its verbs in the rooms below."""

from __future__ import annotations

from rmvdb.engines.milvus import creating, describing, reading, searching, settling, writing
from rmvdb.engines.milvus.session import Session


class MilvusStore(Session):
    """A vector store that any number of threads share; it connects when it is first used and reconnects by itself.

    `address` is asked again at each connection, because a Milvus Lite process may have moved. A call that finds the engine
    unavailable is repeated for `patience` seconds; one that gets no answer for `timeout` seconds is sent once more, a strong
    reading with `patience` seconds to answer, a write with a permit as often as that allows.
    """

    # A function of a session is a method here: these are the verbs, and the rooms where they are.
    create, drop, move_aliases = creating.create, creating.drop, creating.move_aliases
    describe, index, exists = describing.describe, describing.index, describing.exists
    field_names, collection_names = describing.field_names, describing.collection_names
    search = searching.search
    get, scan, count = reading.get, reading.scan, reading.count
    fields_of, upsert, delete = writing.fields_of, writing.upsert, writing.delete
    settle, segments = settling.settle, settling.segments
