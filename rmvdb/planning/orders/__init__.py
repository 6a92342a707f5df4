"""The backfill orders: one file each, and one row each in `table`."""
