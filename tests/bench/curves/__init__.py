"""What an upgrade is worth at each moment of its backfill, on models that others trained: `python -m tests.bench.curves`."""
