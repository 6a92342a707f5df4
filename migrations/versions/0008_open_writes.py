"""An index of the writes under way"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the index. It holds the few intents that are not done."""
    where = {"sqlite_where": sa.text("done = 0"), "postgresql_where": sa.text("NOT done")}
    op.create_index("ix_intents_open", "intents", ["gallery_id"], unique=False, **where)


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_intents_open", table_name="intents")
