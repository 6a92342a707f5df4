"""Moving records: `worker` claims batches, `batches` moves one, `fate` decides about each record, `throttle` holds back."""
