"""The quality of an upgrade at each moment of its backfill, on models that others trained: `python -m tests.bench.curves`."""
