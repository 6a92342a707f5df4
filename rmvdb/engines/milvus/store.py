"""The vector store: its verbs, from the files beside this one."""

from __future__ import annotations

from rmvdb.engines.milvus import creating, describing, reading, searching, settling, writing
from rmvdb.engines.milvus.session import Session


class MilvusStore(Session):
    """A vector store that any number of threads share; it connects when it is first used and reconnects by itself.

    It calls `address` at each connection, because a Milvus Lite process may have moved. While the engine is unavailable, a call
    is repeated for `patience` seconds. A call without an answer within `timeout` seconds is sent once more. A strong reading then
    has `patience` seconds to answer, and a write with a permit is sent as often as the permit allows.
    """

    # Each function of a session becomes a method here.
    create, drop, move_aliases = creating.create, creating.drop, creating.move_aliases
    describe, index, exists = describing.describe, describing.index, describing.exists
    field_names, collection_names = describing.field_names, describing.collection_names
    search = searching.search
    get, scan, count = reading.get, reading.scan, reading.count
    unservable = reading.unservable
    fields_of, upsert, delete = writing.fields_of, writing.upsert, writing.delete
    settle, segments = settling.settle, settling.segments
