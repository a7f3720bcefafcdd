"""The audit log: one entry for every change of the registry, in the same transaction as the change."""

from __future__ import annotations

import json

from manylora.adapter import shown
from manylora.registry.connection import Connection, as_utc, utc_now
from manylora.registry.records import AuditEntry

_ACTOR_CHARS = 199


def actor_name(actor: str) -> str:
    """`actor` as it is kept: printable and bounded, whatever the caller handed over."""
    return shown(actor, _ACTOR_CHARS)


def record(connection: Connection, actor: str, action: str, subject: object, **detail: object) -> None:
    """Note that `actor` did `action` to `subject`."""
    connection.change(
        "INSERT INTO audit (at, actor, action, subject, detail) VALUES (:at, :actor, :action, :subject, :detail)",
        at=utc_now(),
        actor=actor_name(actor),
        action=action,
        subject=str(subject),
        detail=json.dumps(detail, sort_keys=True),
    )


def entries(connection: Connection, limit: int) -> list[AuditEntry]:
    """The newest entries, newest first."""
    rows = connection.rows("SELECT * FROM audit ORDER BY id DESC LIMIT :limit", limit=limit)
    return [
        AuditEntry(row.id, as_utc(row.at), row.actor, row.action, row.subject, json.loads(row.detail)) for row in rows
    ]
