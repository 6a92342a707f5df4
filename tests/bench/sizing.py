"""Compute what an upgrade of 1 M, 100 M and 10 B records needs, from one of some thousand records: a table.

python tests/bench/sizing.py [--dim 768] [--batch 500]

Two upgrades of galleries in one process, on Faiss and SQLite, are measured: files, rows and the memory of the verification. The
difference between them counts for each further record. Vectors are counted at the dimension that is asked for, 4 bytes a number.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rmvdb.storage.folders import LocalFolder
from rmvdb.text import size
from tests.support.inprocess import DIMS, drive, make

#: The galleries that are measured, and those that the table is for.
MEASURED = (4_000, 16_000)
WANTED = {"1 M": 10**6, "100 M": 10**8, "10 B": 10**10}
#: Records a second of all embedders together.
SPEEDS = (100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The costs of an upgrade: bytes, files, and seconds to list the files."""

    archive: int
    files: int
    registry: int
    verification: int
    listing: float


def upgrade(records: int, batch: int) -> Taken:
    """Upgrade a gallery of so many records and measure what is there before the clean-up."""
    with tempfile.TemporaryDirectory() as folder:
        gallery = make(Path(folder), records=records, batch=batch)
        ids = random.Random(0).sample(sorted(gallery.source.of), records)  # as an order has them: not one after the other
        gallery.registry.forget_work(gallery.upgrade.id)
        gallery.registry.add_batches(
            gallery.upgrade.id, [(ids[at : at + batch], None) for at in range(0, records, batch)], first=1
        )
        drive(gallery)
        tracemalloc.start()
        gallery.verify()
        verification = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gallery.registry.close()  # the write-ahead log goes into the database
        since = time.perf_counter()
        entries = list(LocalFolder(Path(folder) / "archive").entries())
        return Taken(
            archive=sum(entry.bytes for entry in entries),
            files=len(entries),
            registry=(Path(folder) / "registry.sqlite").stat().st_size,
            verification=verification,
            listing=time.perf_counter() - since,
        )


def main() -> None:
    """Print the table, and what it is made from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=768, help="Of both models.")
    parser.add_argument("--batch", type=int, default=500, help="Records in a batch, as backfill.batch.")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    few, many = (upgrade(records, asked.batch) for records in MEASURED)
    more = MEASURED[1] - MEASURED[0]
    besides = (many.archive - few.archive) / more - 4 * DIMS["v1"]
    row = (many.registry - few.registry) / more
    verification = (many.verification - few.verification) / more
    files = many.files / MEASURED[1]
    listing = many.listing / many.files
    print(
        f"a record: {besides:.0f} bytes of the archive besides its vector, {row:.0f} bytes of the registry, {verification:.0f} "
        f"bytes of a verification's memory; {files * asked.batch:.1f} files a batch, each listed in {listing * 1e6:.0f} µs\n"
    )
    head = ["records", "vectors, both models", "archive", "its files", "registry", "memory to verify"]
    print(f"| {' | '.join([*head, *(f'embed at {speed:,}/s' for speed in SPEEDS)])} |")
    print("|---" * (len(head) + len(SPEEDS)) + "|")
    for name, n in WANTED.items():
        vector = 4 * asked.dim
        needs = [
            size(2 * n * vector),
            size(n * (vector + besides)),
            f"{n * files:,.0f}",
            size(n * row),
            size(n * verification),
        ]
        print(f"| {' | '.join([name, *needs, *(lasting(n / speed) for speed in SPEEDS)])} |")


def lasting(seconds: float) -> str:
    """Return a time as people write it."""
    for most, unit, each in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600), (2 * 31_557_600, "days", 86_400)):
        if seconds < most:
            return f"{seconds / each:.3g} {unit}"
    return f"{seconds / 31_557_600:.3g} years"


if __name__ == "__main__":
    main()
