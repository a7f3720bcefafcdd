"""`manylora tenant …`: who owns adapters and keys."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli import views
from manylora.cli.output import Json, note, print_json, print_table, say, time_text
from manylora.cli.session import actor, session_of

app = typer.Typer(no_args_is_help=True, help="Tenants: who owns adapters and API keys.")

Tenant = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '.', '_' and '-'.")]


@app.command()
def create(ctx: typer.Context, name: Tenant, as_json: Json = False) -> None:
    """Create a tenant. `default` comes into being by itself."""
    with session_of(ctx).catalog() as catalog:
        catalog.create_tenant(name, actor=actor())
    if as_json:
        print_json({"created": name})
    else:
        say(f"created tenant {name}; give it a key: manylora key create {name}")


@app.command("list")
def list_tenants(ctx: typer.Context, as_json: Json = False) -> None:
    """List the tenants."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.tenants()
    if as_json:
        print_json({"tenants": [views.tenant_view(tenant) for tenant in found]})
    elif not found:
        note("no tenants; create one with `manylora tenant create NAME`")
    else:
        print_table(("NAME", "CREATED"), [(tenant.name, time_text(tenant.created_at)) for tenant in found])


@app.command()
def remove(ctx: typer.Context, name: Tenant, as_json: Json = False) -> None:
    """Remove a tenant that owns no adapters any more."""
    with session_of(ctx).catalog() as catalog:
        catalog.remove_tenant(name, actor=actor())
    if as_json:
        print_json({"removed": name})
    else:
        say(f"removed tenant {name}")
