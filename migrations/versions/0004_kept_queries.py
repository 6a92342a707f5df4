"""A sample of the queries that clients are asked"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table, empty. Clients fill it only where `search.keep_queries` is set."""
    op.create_table(
        "kept_queries",
        sa.Column("id", Serial, nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("priority", sa.Float(precision=53), nullable=False),
        sa.Column("asked_at", sa.Float(precision=53), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_kept_queries_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kept_queries")),
    )
    op.create_index(op.f("ix_kept_queries_gallery_id_priority"), "kept_queries", ["gallery_id", "priority"])


def downgrade() -> None:
    """Drop the table with its queries."""
    op.drop_table("kept_queries")
