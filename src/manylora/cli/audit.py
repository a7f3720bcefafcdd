"""`manylora audit`: who changed what, and when."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli import views
from manylora.cli.output import Json, note, print_json, print_table, time_text
from manylora.cli.session import session_of


def audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="How many entries.")] = 100,
    as_json: Json = False,
) -> None:
    """Show the latest changes to adapters, aliases, tenants, keys and grants, newest first."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.audit(limit)
    if as_json:
        print_json({"entries": [views.audit_view(entry) for entry in found]})
    elif not found:
        note("nothing has been changed yet")
    else:
        rows = [
            (
                time_text(entry.at),
                entry.actor,
                entry.action,
                entry.subject,
                " ".join(f"{key}={value}" for key, value in entry.detail.items()),
            )
            for entry in found
        ]
        print_table(("AT", "ACTOR", "ACTION", "SUBJECT", "DETAIL"), rows)
