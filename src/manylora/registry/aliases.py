"""Aliases: the only mutable thing about an adapter, and where each one pointed over time.

`live` behaves like a stack: promoting a version puts it on top, rolling back takes the top off again. So rolling back
twice goes two promotions back, and a promotion after a rollback starts from what is live then.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from manylora.adapter import CANARY
from manylora.registry.database import as_utc, utc_now
from manylora.registry.journal import actor_name
from manylora.registry.records import AliasChange
from manylora.registry.tables import adapters, alias_changes, aliases

SET = "set"
ROLLBACK = "rollback"
REMOVED = "removed"
_OF_ADAPTER = select(aliases).where(aliases.c.adapter_id == bindparam("adapter_id")).order_by(aliases.c.alias)


def current(connection: Connection, adapter_id: int) -> dict[str, int]:
    """Where the adapter's aliases point now."""
    rows = connection.execute(_OF_ADAPTER, {"adapter_id": adapter_id})
    return {row.alias: row.number for row in rows}


def point(connection: Connection, adapter_id: int, alias: str, number: int, actor: str, action: str = SET) -> bool:
    """Point an alias at a version; False where it already does."""
    previous = current(connection, adapter_id).get(alias)
    if previous == number:
        return False
    if previous is None:
        connection.execute(insert(aliases).values(adapter_id=adapter_id, alias=alias, number=number))
    else:
        connection.execute(
            update(aliases).where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias).values(number=number)
        )
    _note(connection, adapter_id, alias, number, previous, action, actor)
    return True


def drop(connection: Connection, adapter_id: int, alias: str, actor: str) -> bool:
    """Remove an alias; False where there is none."""
    previous = current(connection, adapter_id).get(alias)
    if previous is None:
        return False
    connection.execute(delete(aliases).where(aliases.c.adapter_id == adapter_id, aliases.c.alias == alias))
    _note(connection, adapter_id, alias, None, previous, REMOVED, actor)
    return True


def set_canary(connection: Connection, adapter_id: int, number: int | None, weight: float, actor: str) -> None:
    """Send the share `weight` of the adapter's traffic to a version; None ends the canary."""
    if number is None:
        drop(connection, adapter_id, CANARY, actor)
        weight = 0.0
    else:
        point(connection, adapter_id, CANARY, number, actor)
    connection.execute(update(adapters).where(adapters.c.id == adapter_id).values(canary_weight=weight))


def history(connection: Connection, adapter_id: int, alias: str) -> list[AliasChange]:
    """All changes of one alias, oldest first."""
    rows = connection.execute(
        select(alias_changes)
        .where(alias_changes.c.adapter_id == adapter_id, alias_changes.c.alias == alias)
        .order_by(alias_changes.c.id)
    )
    return [AliasChange(row.alias, row.number, row.previous, row.action, as_utc(row.at), row.actor) for row in rows]


def rollback_target(changes: Iterable[AliasChange], ready: Set[int]) -> int | None:
    """The version that was live before the present one, leaving out what is no longer ready; None where none was."""
    stack: list[int] = []
    for change in changes:
        if change.action == REMOVED or change.number is None:
            stack.clear()
        elif change.action == ROLLBACK:
            while stack and stack[-1] != change.number:
                stack.pop()
        else:
            stack.append(change.number)
    present = stack.pop() if stack else None
    return next((number for number in reversed(stack) if number in ready and number != present), None)


def _note(
    connection: Connection,
    adapter_id: int,
    alias: str,
    number: int | None,
    previous: int | None,
    action: str,
    actor: str,
) -> None:
    connection.execute(
        insert(alias_changes).values(
            adapter_id=adapter_id,
            alias=alias,
            number=number,
            previous=previous,
            action=action,
            at=utc_now(),
            actor=actor_name(actor),
        )
    )
