"""The model-version registry and the work list, in SQL (SQLite or PostgreSQL). No other room writes SQL.

Each method is one transaction. rmvdb repeats it with back-off while the database is away. Times are the registry's (`clock`).
Rows come back detached: they show the state at that time.

Each file is a subject, and its class a part of `registry.Registry`: a method is in the file of its subject. `shared_queries` has
the queries of several subjects. `session` and `manifest_rows` run a transaction and hand its changes to the manifest before the
commit. `tables` has the rows, `schema` the migrations, `mark` the registry's mark beside the data.
"""
