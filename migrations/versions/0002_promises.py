"""Owners of collections, clocks and what clean-up keeps"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: What the registry's time begins with: what was written before was by this clock.
SHOWN = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch from clock_timestamp())::float8",
}


def upgrade() -> None:
    """Add what the promises rest on."""
    with op.batch_alter_table("upgrades") as upgrades:
        upgrades.add_column(sa.Column("paused_at", sa.Float(53)))
        upgrades.add_column(sa.Column("listing", sa.JSON()))
    with op.batch_alter_table("workers") as workers:
        workers.add_column(sa.Column("heard_at", sa.Float(precision=53), nullable=False, server_default="0"))
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("root", sa.BigInteger(), nullable=True))
        batches.add_column(sa.Column("restore", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "clock",
        sa.Column("id", Serial, nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("shown", sa.Float(precision=53), nullable=False),
        sa.Column("back", sa.Float(precision=53), nullable=False),
        sa.Column("starts", sa.BigInteger(), nullable=False),
        sa.Column("jump", sa.Float(precision=53), nullable=False),
        sa.Column("jumped_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clock")),
    )
    shown = SHOWN[op.get_bind().dialect.name]
    op.execute(f"INSERT INTO clock (time, shown, back, starts, jump, jumped_at) SELECT {shown}, {shown}, 0, 0, 0, 0")
    with op.batch_alter_table("galleries") as galleries:
        galleries.add_column(sa.Column("served_since", sa.Float(precision=53), nullable=True))
    serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    identity = op.create_table(
        "identity",
        sa.Column("id", serial, nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_identity")),
    )
    op.bulk_insert(identity, [{"id": 1, "name": uuid.uuid4().hex}])
    op.create_table(
        "traces",
        sa.Column("gallery_id", serial, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("reported", sa.Integer(), nullable=False),
        sa.Column("trouble", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_traces_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("gallery_id", name=op.f("pk_traces")),
    )


def downgrade() -> None:
    """Take it away."""
    with op.batch_alter_table("upgrades") as upgrades:
        upgrades.drop_column("listing")
        upgrades.drop_column("paused_at")
    with op.batch_alter_table("workers") as workers:
        workers.drop_column("heard_at")
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("restore")
        batches.drop_column("root")
    with op.batch_alter_table("galleries") as galleries:
        galleries.drop_column("served_since")
    op.drop_table("clock")
    op.drop_table("traces")
    op.drop_table("identity")
