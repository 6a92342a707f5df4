"""The model-version registry and the work list, in SQL (SQLite or PostgreSQL). Nowhere else is a statement written.

Every method is one transaction, repeated with back-off while the database is away. Times are the database's clock. Rows come
back detached: they are what was true then.

A room here is a subject, and its class a part of `Registry`: look for a method in the room of what it is about. What several of
them ask is in `queries`; how a transaction goes, and what is handed to the manifest before it ends, in `session` and `kept`.
"""

from rmvdb.registry.batches import Batches
from rmvdb.registry.claims import Claim, Claims
from rmvdb.registry.clients import Clients, Serving
from rmvdb.registry.engine import parsed_url
from rmvdb.registry.galleries import Galleries
from rmvdb.registry.intents import CONDUCTOR, Intents, Opened
from rmvdb.registry.kept import Contents
from rmvdb.registry.packing import key, leg_from_json, leg_to_json, pack_ids, schema_from_json, schema_to_json, unpack_ids
from rmvdb.registry.plans import Plans
from rmvdb.registry.quarantine import Quarantine
from rmvdb.registry.queries import BEGUN
from rmvdb.registry.restore import Restoring
from rmvdb.registry.session import transaction
from rmvdb.registry.traffic import Traffic
from rmvdb.registry.upgrades import Upgrades
from rmvdb.registry.versions import Versions

__all__ = [
    "BEGUN",
    "CONDUCTOR",
    "Claim",
    "Contents",
    "Opened",
    "Registry",
    "Serving",
    "key",
    "leg_from_json",
    "leg_to_json",
    "pack_ids",
    "parsed_url",
    "schema_from_json",
    "schema_to_json",
    "transaction",
    "unpack_ids",
]


class Registry(Versions, Galleries, Clients, Plans, Traffic, Upgrades, Batches, Claims, Quarantine, Intents, Restoring):
    """One database, with everything that is asked of it and changed in it; `session.Database` says what opens it."""
