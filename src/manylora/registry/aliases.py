"""Aliases: the only mutable thing about an adapter, and where each one pointed over time.

`live` behaves like a stack: promoting a version puts it on top, rolling back takes the top off again. So rolling back
twice goes two promotions back, and a promotion after a rollback starts from what is live then.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from manylora.adapter import CANARY
from manylora.registry.connection import Connection, as_utc, utc_now
from manylora.registry.journal import actor_name
from manylora.registry.records import AliasChange

SET = "set"
ROLLBACK = "rollback"
REMOVED = "removed"


def current(connection: Connection, adapter_id: int) -> dict[str, int]:
    """Where the adapter's aliases point now."""
    rows = connection.rows(
        "SELECT alias, number FROM aliases WHERE adapter_id = :adapter_id ORDER BY alias", adapter_id=adapter_id
    )
    return {row.alias: row.number for row in rows}


def point(connection: Connection, adapter_id: int, alias: str, number: int, actor: str, action: str = SET) -> bool:
    """Point an alias at a version; False where it already does."""
    previous = current(connection, adapter_id).get(alias)
    if previous == number:
        return False
    if previous is None:
        statement = "INSERT INTO aliases (adapter_id, alias, number) VALUES (:adapter_id, :alias, :number)"
    else:
        statement = "UPDATE aliases SET number = :number WHERE adapter_id = :adapter_id AND alias = :alias"
    connection.change(statement, adapter_id=adapter_id, alias=alias, number=number)
    _note(connection, adapter_id, alias, number, previous, action, actor)
    return True


def drop(connection: Connection, adapter_id: int, alias: str, actor: str) -> bool:
    """Remove an alias; False where there is none."""
    previous = current(connection, adapter_id).get(alias)
    if previous is None:
        return False
    connection.change(
        "DELETE FROM aliases WHERE adapter_id = :adapter_id AND alias = :alias", adapter_id=adapter_id, alias=alias
    )
    _note(connection, adapter_id, alias, None, previous, REMOVED, actor)
    return True


def set_canary(connection: Connection, adapter_id: int, number: int | None, weight: float, actor: str) -> None:
    """Send the share `weight` of the adapter's traffic to a version; None ends the canary."""
    if number is None:
        drop(connection, adapter_id, CANARY, actor)
        weight = 0.0
    else:
        point(connection, adapter_id, CANARY, number, actor)
    connection.change(
        "UPDATE adapters SET canary_weight = :weight WHERE id = :adapter_id", weight=weight, adapter_id=adapter_id
    )


def history(connection: Connection, adapter_id: int, alias: str) -> list[AliasChange]:
    """All changes of one alias, oldest first."""
    rows = connection.rows(
        "SELECT * FROM alias_changes WHERE adapter_id = :adapter_id AND alias = :alias ORDER BY id",
        adapter_id=adapter_id,
        alias=alias,
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
    connection.change(
        "INSERT INTO alias_changes (adapter_id, alias, number, previous, action, at, actor)"
        " VALUES (:adapter_id, :alias, :number, :previous, :action, :at, :actor)",
        adapter_id=adapter_id,
        alias=alias,
        number=number,
        previous=previous,
        action=action,
        at=utc_now(),
        actor=actor_name(actor),
    )
