"""The records that searches ask for, and the figures of rescoring"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table of records to move first, and a column for what clients report."""
    op.create_table(
        "asked_for",
        sa.Column("id", Serial, nullable=False),
        sa.Column("upgrade_id", Serial, nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["upgrade_id"], ["upgrades.id"], name=op.f("fk_asked_for_upgrade_id_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_asked_for")),
    )
    with op.batch_alter_table("asked_for") as asked_for:
        asked_for.create_index(op.f("ix_asked_for_upgrade_id"), ["upgrade_id"], unique=False)
    with op.batch_alter_table("clients") as clients:
        clients.add_column(sa.Column("rescoring", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Take both away."""
    with op.batch_alter_table("clients") as clients:
        clients.drop_column("rescoring")
    op.drop_table("asked_for")
