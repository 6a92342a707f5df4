"""The model-version registry and the work list, in SQL (SQLite or PostgreSQL). Nowhere else is a statement written.

Every method is one transaction, repeated with back-off while the database is away. Times are the registry's (`clock`). Rows come
back detached: they are what was true then.

A file here is a subject, and its class a part of `registry.Registry`: look for a method in the file of what it is about. What
several of them ask is in `shared_queries`; how a transaction goes, and what is handed to the manifest before it ends, in
`session` and `manifest_rows`. `tables` has the rows, `schema` the migrations, `mark` the registry's mark beside the data.
"""
