"""The demo's gallery of digits before anything is changed: `rmvdb simulate` with labels, without, and with queries of its own.

    python tests/bench/simulation.py [--out FOLDER]

Two small networks are trained first, v1 on the digits 0-4, v2 on all ten. The queries are pictures that are not in the gallery;
each should find all records of its digit. FOLDER gets a picture of each; what else there is in it is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
import demo_data


def main() -> None:
    """Print each simulation, its table and its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("simulation"))
    folder = parser.parse_args().out.resolve()
    demo._fresh(folder)
    pictures = demo_data.digits(0)
    made = demo.Demo(folder, pictures, 0)
    try:
        made.train()
        made.set_up()
        made.rmvdb("model", "add", "v2", *demo._model("v2"))
        labels = pictures.labelled.labels
        answers = [{"item": f"queries/{n}.png", "answers": (labels == y).nonzero()[0].tolist()[:20]}
                   for n, y in enumerate(pictures.queries.labels)]  # fmt: skip
        (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, answers)))
        for name, options in {
            "labels": ("--labels", "label"),
            "neighbours": (),
            "queries": ("--labels", "label", "--queries", "queries.jsonl"),
        }.items():
            began = time.monotonic()
            made.rmvdb("simulate", *demo.CHANGE[:4], *options, "--png", f"{name}.png")
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        made.rmvdb.end()


if __name__ == "__main__":
    main()
