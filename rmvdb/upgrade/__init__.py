"""An upgrade from its plan to its clean-up, or back: `run` drives it through its phases, and each step is a file.

The steps: `plan_step`, `register`, `deploy`, `work_list`, `backfill_step`, `complete`, `verify`, `clean_up`, `roll_back`,
`repair`. Several of them need `change_epoch` (collections, epochs, aliases), `epoch_legs` (of each epoch), `keep_original` and
`leadership` (who leads an upgrade). `context` is what each is handed. `status`, `rebuild` and `garbage` look at all of it.
"""
