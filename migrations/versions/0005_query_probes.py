"""Probe vectors of embed_queries"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. A version that is registered already embeds its queries as its records, as it did before."""
    op.add_column("model_versions", sa.Column("query_probes", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop the column: an earlier rmvdb embeds all queries as records."""
    with op.batch_alter_table("model_versions") as versions:
        versions.drop_column("query_probes")
