"""Shares one Milvus Lite file between the processes of a machine: `address(path)` gives the socket of the server of that file.

Milvus Lite lets one process open a file, and its server ends with that process. So the owner is neither the application nor
the command line. It is a small process of rmvdb (`python -m rmvdb.engines.lite PATH`), which the first user starts.
Beside `x.db` lie

    .x.db.lock      Milvus Lite's own lock. The owner has it, so that pymilvus does not open the file meanwhile
    .x.db.lease     locked shared by every process that uses the file, exclusively by an owner that ends
    .x.db.address   where the owner's server listens; locked by a process that reads it or starts an owner
    .x.db.log       the last messages of the server
    .x.db.turn, .x.db.room    the gate: searches share it, a replacement is alone (Lite deletes, then inserts)

Only their owner can open these files and the database: a user who could open them could lock them. All locks are the kernel's:
they end with their process, however it ends. The server ends with its owner (on Linux by a death signal, elsewhere because it
watches the first lock itself).
"""

from rmvdb.engines.lite.lease import address, release
from rmvdb.engines.lite.locks import gate

__all__ = ["address", "gate", "release"]
