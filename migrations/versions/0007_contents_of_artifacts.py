"""The contents of artifacts, for machines that do not share a home"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table, empty. `rmvdb db upgrade` fills it from the home of the machine where it runs."""
    op.create_table(
        "artifact_parts",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["sha256"], ["artifacts.sha256"], name=op.f("fk_artifact_parts_sha256_artifacts")),
        sa.PrimaryKeyConstraint("sha256", "number", name=op.f("pk_artifact_parts")),
    )


def downgrade() -> None:
    """Drop the table. The files in `home` stay."""
    op.drop_table("artifact_parts")
