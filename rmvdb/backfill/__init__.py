"""Moving records: the worker, its limits, and one batch from claimed to retired. The steps of an upgrade are in `upgrade`."""
