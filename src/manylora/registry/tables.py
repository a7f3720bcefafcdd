"""The registry's tables, as Alembic needs them and people may read them. How they came to be is told by `migrations`;
the statements that use them are text (see `connection`).

Times are UTC without a zone, for SQLite keeps none. JSON is kept as ASCII text. Nothing is deleted but aliases and
grants: what was published, and who did what, stays on record.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# One row. Every writing transaction raises `seq` first: so writers queue, and no change escapes a reader of `seq`.
change_counter = Table(
    "change_counter",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("seq", BigInteger, nullable=False),
)

base_models = Table(
    "base_models",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("config", Text, nullable=False),
    Column("modules", Text, nullable=False),
    Column("revision", String(255)),
    Column("vocab_size", Integer, nullable=False),
    Column("source", Text, nullable=False),
    Column("aliases", Text, nullable=False),
    Column("created_at", DateTime, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", DateTime, nullable=False),
    Column("removed_at", DateTime),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("key_hash", String(64), nullable=False, unique=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False, index=True),
    Column("label", String(200), nullable=False),
    Column("is_admin", Boolean, nullable=False),
    Column("hint", String(16), nullable=False),
    Column("created_at", DateTime, nullable=False),
    Column("revoked_at", DateTime),
)

grants = Table(
    "grants",
    metadata,
    Column("grantee", ForeignKey("tenants.name"), primary_key=True),
    Column("owner", ForeignKey("tenants.name"), primary_key=True),
    Column("pattern", String(63), primary_key=True),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False),
    Column("name", String(63), nullable=False),
    Column("next_number", Integer, nullable=False),
    Column("canary_weight", Float, nullable=False),
    Column("created_at", DateTime, nullable=False),
    Column("removed_at", DateTime),
    UniqueConstraint("tenant", "name"),
)

# The bytes of one content, however many versions share it. Engine names carry the digest's first 16 characters, so two
# contents that agree in those may not both exist.
blobs = Table(
    "blobs",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("digest_prefix", String(16), nullable=False, unique=True),
    Column("config_bytes", BigInteger, nullable=False),
    Column("weights_bytes", BigInteger, nullable=False),
    Column("created_at", DateTime, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("adapter_id", ForeignKey("adapters.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("digest", ForeignKey("blobs.digest"), nullable=False),
    Column("base_model", ForeignKey("base_models.name"), nullable=False),
    Column("lora_rank", Integer, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("metadata", Text, nullable=False),
    Column("created_at", DateTime, nullable=False),
    Column("created_by", String(200), nullable=False),
    UniqueConstraint("adapter_id", "number"),
    Index(None, "digest"),
)

aliases = Table(
    "aliases",
    metadata,
    Column("adapter_id", ForeignKey("adapters.id"), primary_key=True),
    Column("alias", String(63), primary_key=True),
    Column("number", Integer, nullable=False),
)

alias_changes = Table(
    "alias_changes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("adapter_id", ForeignKey("adapters.id"), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("number", Integer),
    Column("previous", Integer),
    Column("action", String(16), nullable=False),
    Column("at", DateTime, nullable=False),
    Column("actor", String(200), nullable=False),
    Index(None, "adapter_id", "alias"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", DateTime, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("action", String(63), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("detail", Text, nullable=False),
)
