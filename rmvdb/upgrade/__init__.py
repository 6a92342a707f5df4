"""Upgrades: `Conductor` takes one from its plan to its clean-up, or back; `Hands` are what it works with.

`conductor` drives an upgrade through its phases; each step has a room of its own: `asking` (resolve, plan, simulate),
`beginning`, `deploying`, `listing`, `backfilling`, `completing`, `cleaning_up`, `rolling_back`. Several steps need `serving`
(collections, epochs, aliases), `legs` (of each epoch), `mirroring` (an original that is kept) and `baton` (who conducts).
`lead` is what every room is handed.
"""

from rmvdb.upgrade.conductor import Conductor
from rmvdb.upgrade.lead import Hands

__all__ = ["Conductor", "Hands"]
