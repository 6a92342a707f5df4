"""Everything that is asked of the registry and changed in it."""

from __future__ import annotations

from rmvdb.registry.batches import Batches
from rmvdb.registry.claims import Claims
from rmvdb.registry.clients import Clients
from rmvdb.registry.galleries import Galleries
from rmvdb.registry.garbage import Garbage
from rmvdb.registry.intents import Intents
from rmvdb.registry.owners import Owners
from rmvdb.registry.plans import Plans
from rmvdb.registry.quarantine import Quarantine
from rmvdb.registry.restore import Restoring
from rmvdb.registry.upgrades import Upgrades
from rmvdb.registry.versions import Versions


class Registry(Versions, Galleries, Owners, Clients, Plans, Upgrades, Batches, Claims, Quarantine, Intents, Restoring, Garbage):
    """One database, with everything that is asked of it and changed in it; `session.Database` says what opens it."""
