"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("suffix", sa.String(length=32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "changes",
        sa.Column("id", Serial, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_changes")),
    )
    op.create_table(
        "galleries",
        sa.Column("id", Serial, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("id_type", sa.String(length=16), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("next_epoch", sa.Integer(), nullable=True),
        sa.Column("closing_until", sa.Float(precision=53), nullable=True),
        sa.Column("rebuilding", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_galleries")),
        sa.UniqueConstraint("name", name=op.f("uq_galleries_name")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("upgrade_id", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "clients",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("ready", sa.Integer(), nullable=False),
        sa.Column("trouble", sa.Text(), nullable=False),
        sa.Column("searches", sa.Integer(), nullable=False),
        sa.Column("p99_ms", sa.Float(precision=53), nullable=False),
        sa.Column("seen_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_clients_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clients")),
    )
    op.create_index(op.f("ix_clients_gallery_id"), "clients", ["gallery_id"], unique=False)
    op.create_table(
        "traffic",
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_traffic_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("gallery_id", "record", name=op.f("pk_traffic")),
    )
    op.create_table(
        "model_versions",
        sa.Column("id", Serial, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("embedder", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("classifier", sa.Text(), nullable=True),
        sa.Column("dim", sa.Integer(), nullable=False),
        sa.Column("metric", sa.String(length=16), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("probes", sa.LargeBinary(), nullable=True),
        sa.Column("probe_kind", sa.String(length=16), nullable=True),
        sa.Column("base", sa.String(length=255), nullable=True),
        sa.Column("head", sa.String(length=64), nullable=True),
        sa.Column("compatible_with", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["base"], ["model_versions.name"], name=op.f("fk_model_versions_base_model_versions")),
        sa.ForeignKeyConstraint(["head"], ["artifacts.sha256"], name=op.f("fk_model_versions_head_artifacts")),
        sa.ForeignKeyConstraint(
            ["compatible_with"], ["model_versions.name"], name=op.f("fk_model_versions_compatible_with_model_versions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_versions")),
        sa.UniqueConstraint("name", name=op.f("uq_model_versions_name")),
    )
    op.create_table(
        "serving_plans",
        sa.Column("id", Serial, nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("legs", sa.JSON(), nullable=False),
        sa.Column("max_age", sa.Float(precision=53), nullable=False),
        sa.Column("longest_search", sa.Float(precision=53), nullable=False),
        sa.Column("staleness", sa.Float(precision=53), nullable=False),
        sa.Column("grace_before", sa.Float(precision=53), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_serving_plans_gallery_id_galleries")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_serving_plans")),
        sa.UniqueConstraint("gallery_id", "epoch", name=op.f("uq_serving_plans_gallery_id_epoch")),
    )
    op.create_table(
        "collections",
        sa.Column("id", Serial, nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("schema", sa.JSON(), nullable=False),
        sa.Column("search", sa.JSON(), nullable=False),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("removal_allowed", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("dropped_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_collections_gallery_id_galleries")),
        sa.ForeignKeyConstraint(["model"], ["model_versions.name"], name=op.f("fk_collections_model_model_versions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collections")),
        sa.UniqueConstraint("name", name=op.f("uq_collections_name")),
    )
    op.create_index(op.f("ix_collections_gallery_id"), "collections", ["gallery_id"], unique=False)
    op.create_table(
        "upgrades",
        sa.Column("id", Serial, nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("from_version", sa.String(length=255), nullable=False),
        sa.Column("to_version", sa.String(length=255), nullable=False),
        sa.Column("old_collections", sa.JSON(), nullable=False),
        sa.Column("new_collection", sa.String(length=255), nullable=False),
        sa.Column("undoes", Serial, nullable=True),
        sa.Column("supersedes", Serial, nullable=True),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("method", sa.String(length=16), nullable=False),
        sa.Column("order", sa.String(length=32), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("rate", sa.Float(precision=53), nullable=True),
        sa.Column("nice", sa.Float(precision=53), nullable=True),
        sa.Column("p99_ms", sa.Float(precision=53), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("copying", sa.JSON(), nullable=True),
        sa.Column("verifying", sa.JSON(), nullable=True),
        sa.Column("listed", sa.Boolean(), nullable=False),
        sa.Column("conductor", sa.String(length=255), nullable=True),
        sa.Column("conductor_until", sa.Float(precision=53), nullable=True),
        sa.Column("baton", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["from_version"], ["model_versions.name"], name=op.f("fk_upgrades_from_version_model_versions")),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_upgrades_gallery_id_galleries")),
        sa.ForeignKeyConstraint(["to_version"], ["model_versions.name"], name=op.f("fk_upgrades_to_version_model_versions")),
        sa.ForeignKeyConstraint(["supersedes"], ["upgrades.id"], name=op.f("fk_upgrades_supersedes_upgrades")),
        sa.ForeignKeyConstraint(["undoes"], ["upgrades.id"], name=op.f("fk_upgrades_undoes_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upgrades")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_upgrades_gallery_id"), "upgrades", ["gallery_id"], unique=False)
    op.create_index(
        "uq_upgrades_active",
        "upgrades",
        ["gallery_id"],
        unique=True,
        sqlite_where=sa.text("phase <> 'ended'"),
        postgresql_where=sa.text("phase <> 'ended'"),
    )
    op.create_table(
        "batches",
        sa.Column("id", Serial, nullable=False),
        sa.Column("upgrade_id", Serial, nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Float(precision=53), nullable=True),
        sa.Column("copied_at", sa.Float(precision=53), nullable=True),
        sa.Column("archive", sa.JSON(), nullable=True),
        sa.Column("origin", sa.JSON(), nullable=True),
        sa.Column("left", sa.LargeBinary(), nullable=True),
        sa.Column("remove", sa.LargeBinary(), nullable=True),
        sa.Column("gone", sa.LargeBinary(), nullable=True),
        sa.Column("again", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["upgrade_id"], ["upgrades.id"], name=op.f("fk_batches_upgrade_id_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_work", "batches", ["upgrade_id", "state", "priority"], unique=False)
    op.create_table(
        "intents",
        sa.Column("id", Serial, nullable=False),
        sa.Column("gallery_id", Serial, nullable=False),
        sa.Column("upgrade_id", Serial, nullable=True),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("client", sa.String(length=255), nullable=False),
        sa.Column("opened_at", sa.Float(precision=53), nullable=False),
        sa.Column("deadline", sa.Float(precision=53), nullable=False),
        sa.Column("done_at", sa.Float(precision=53), nullable=True),
        sa.Column("sketch", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["gallery_id"], ["galleries.id"], name=op.f("fk_intents_gallery_id_galleries")),
        sa.ForeignKeyConstraint(["upgrade_id"], ["upgrades.id"], name=op.f("fk_intents_upgrade_id_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_intents")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_intents_record", "intents", ["gallery_id", "record"], unique=False)
    op.create_index(op.f("ix_intents_upgrade_id"), "intents", ["upgrade_id"], unique=False)
    op.create_table(
        "phase_history",
        sa.Column("id", Serial, nullable=False),
        sa.Column("upgrade_id", Serial, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["upgrade_id"], ["upgrades.id"], name=op.f("fk_phase_history_upgrade_id_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_phase_history")),
    )
    op.create_index(op.f("ix_phase_history_upgrade_id"), "phase_history", ["upgrade_id"], unique=False)
    op.create_table(
        "quarantined",
        sa.Column("id", Serial, nullable=False),
        sa.Column("upgrade_id", Serial, nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["upgrade_id"], ["upgrades.id"], name=op.f("fk_quarantined_upgrade_id_upgrades")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quarantined")),
        sa.UniqueConstraint("upgrade_id", "record", name=op.f("uq_quarantined_upgrade_id_record")),
    )


def downgrade() -> None:
    """Drop every table and what it holds."""
    op.drop_table("quarantined")
    op.drop_table("phase_history")
    op.drop_table("intents")
    op.drop_table("batches")
    op.drop_table("upgrades")
    op.drop_table("collections")
    op.drop_table("serving_plans")
    op.drop_table("model_versions")
    op.drop_table("traffic")
    op.drop_table("clients")
    op.drop_table("workers")
    op.drop_table("galleries")
    op.drop_table("changes")
    op.drop_table("artifacts")
