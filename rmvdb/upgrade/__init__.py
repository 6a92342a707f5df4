"""An upgrade from its plan to its clean-up, or back: `run` drives it through its phases, and each step is a file.

The steps: `plan_step`, `register`, `deploy`, `work_list`, `backfill_step`, `complete`, `verify`, `clean_up`, `roll_back`, `lost`,
`repair`. Several steps need `change_epoch` (collections, epochs, aliases), `epoch_legs` (the legs of each epoch),
`keep_original` and `leadership`. Each step is given a `context`. `status`, `rebuild` and `garbage` look at all of it.
`compare` checks the new collection, with the help of `moved_batches`, `client_writes`, `embed_again` and `search_check`.
`same_queries` compares the answers of old and new.
"""
