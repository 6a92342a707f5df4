"""Drop the counts of what searches find"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Drop the table. Only the order `traffic` read it, and that order is gone."""
    op.drop_table("traffic")


def downgrade() -> None:
    """Make the table again, empty: clients of an earlier rmvdb count anew."""
    op.create_table(
        "traffic",
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_traffic_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("gallery_id", "record", name=op.f("pk_traffic")),
    )
