"""The first schema: base models, tenants, keys, grants, adapters, versions, aliases, audit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("action", sa.String(63), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_table(
        "base_models",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("modules", sa.Text(), nullable=False),
        sa.Column("revision", sa.String(255)),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("aliases", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_base_models"),
    )
    op.create_table(
        "blobs",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("digest_prefix", sa.String(16), nullable=False),
        sa.Column("config_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_blobs"),
        sa.UniqueConstraint("digest_prefix", name="uq_blobs_digest_prefix"),
    )
    op.create_table(
        "change_counter",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_change_counter"),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("removed_at", sa.DateTime()),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("canary_weight", sa.Float(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("removed_at", sa.DateTime()),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_adapters_tenant"),
        sa.UniqueConstraint("tenant", "name", name="uq_adapters_tenant_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("hint", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("revoked_at", sa.DateTime()),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_api_keys_tenant"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])
    op.create_table(
        "grants",
        sa.Column("grantee", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(63), nullable=False),
        sa.Column("pattern", sa.String(63), nullable=False),
        sa.PrimaryKeyConstraint("grantee", "owner", "pattern", name="pk_grants"),
        sa.ForeignKeyConstraint(["owner"], ["tenants.name"], name="fk_grants_owner"),
        sa.ForeignKeyConstraint(["grantee"], ["tenants.name"], name="fk_grants_grantee"),
    )
    op.create_table(
        "alias_changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("adapter_id", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("number", sa.Integer()),
        sa.Column("previous", sa.Integer()),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alias_changes"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_alias_changes_adapter_id"),
    )
    op.create_index("ix_alias_changes_adapter_id_alias", "alias_changes", ["adapter_id", "alias"])
    op.create_table(
        "aliases",
        sa.Column("adapter_id", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_aliases"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_aliases_adapter_id"),
    )
    op.create_table(
        "versions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("adapter_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(255), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_versions"),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.name"], name="fk_versions_base_model"),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name="fk_versions_digest"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_versions_adapter_id"),
        sa.UniqueConstraint("adapter_id", "number", name="uq_versions_adapter_id_number"),
    )
    op.create_index("ix_versions_digest", "versions", ["digest"])
    op.execute("INSERT INTO change_counter (id, seq) VALUES (1, 0)")
