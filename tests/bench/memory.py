"""Is a worker's memory bounded by the batch? Peak RSS of `rmvdb upgrade` on two gallery sizes.

python tests/bench/memory.py [records records …]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.project import Project

UPGRADE = ("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "random", "--sample", "500", "--no-cutover")
MEASURED = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
MEASURED += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"


def main() -> None:
    """Print a line of JSON for each size."""
    for size in [int(word) for word in sys.argv[1:]] or [10_000, 40_000]:
        with tempfile.TemporaryDirectory() as folder:
            project = Project(Path(folder), batch=200).prepare(range(1, size + 1))  # type: ignore[arg-type]
            done = subprocess.run(
                [sys.executable, "-c", MEASURED, *project.command(*UPGRADE)],
                cwd=project.folder,
                env=project.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            peak = int(done.stdout.split("PEAK ")[1])
            print(json.dumps({"records": size, "peak_rss_mb": round(peak / 1024)}), flush=True)
            project.stop_engine()


if __name__ == "__main__":
    main()
