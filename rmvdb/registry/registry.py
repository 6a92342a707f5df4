"""The registry: one class with the methods of every subject."""

from __future__ import annotations

from rmvdb.registry.artifacts import Artifacts
from rmvdb.registry.asked import AskedFor
from rmvdb.registry.batches import Batches
from rmvdb.registry.claims import Claims
from rmvdb.registry.clients import Clients
from rmvdb.registry.galleries import Galleries
from rmvdb.registry.garbage import Garbage
from rmvdb.registry.intents import Intents
from rmvdb.registry.kept_queries import KeptQueries
from rmvdb.registry.owners import Owners
from rmvdb.registry.plans import Plans
from rmvdb.registry.quarantine import Quarantine
from rmvdb.registry.restore import Restoring
from rmvdb.registry.upgrades import Upgrades
from rmvdb.registry.versions import Versions


class Registry(
    Versions,
    Artifacts,
    Galleries,
    Owners,
    Clients,
    KeptQueries,
    Plans,
    Upgrades,
    Batches,
    Claims,
    AskedFor,
    Quarantine,
    Intents,
    Restoring,
    Garbage,
):
    """One database with the methods of every subject. See `session.Database` for its arguments."""
