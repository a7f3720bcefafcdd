"""`manylora key …`: API keys. A key is shown once, when it is made."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli import views
from manylora.cli.output import Json, note, print_json, print_table, say, time_text
from manylora.cli.session import DEFAULT_TENANT, actor, ensure_default_tenant, session_of

app = typer.Typer(no_args_is_help=True, help="API keys of tenants.")


@app.command()
def create(
    ctx: typer.Context,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is.")] = DEFAULT_TENANT,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What the key is for.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="Open the management routes too.")] = False,
    as_json: Json = False,
) -> None:
    """Create an API key and print it. It is stored as a hash only and cannot be shown again.

    \b
    Examples:
      manylora key create acme --label "support team"
      export OPENAI_API_KEY=$(manylora key create acme)
    """
    with session_of(ctx).catalog() as catalog:
        if tenant == DEFAULT_TENANT:
            ensure_default_tenant(catalog)
        key, info = catalog.create_key(tenant, label=label, is_admin=admin, actor=actor())
    if as_json:
        print_json({"key": key, **views.key_view(info)})
    else:
        say(key)
        note(f"key {info.key_id} of tenant {tenant}; keep it, it is not shown again")


@app.command("list")
def list_keys(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")] = None,
    as_json: Json = False,
) -> None:
    """List keys by their ids, revoked ones too. The keys themselves are not stored."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.keys(tenant)
    if as_json:
        print_json({"keys": [views.key_view(key) for key in found]})
    elif not found:
        note("no keys; create one with `manylora key create TENANT`")
    else:
        rows = [
            (
                key.key_id,
                key.tenant,
                f"{key.hint}…",
                "admin" if key.is_admin else "-",
                key.label or "-",
                time_text(key.created_at),
                time_text(key.revoked_at) if key.revoked_at else "-",
            )
            for key in found
        ]
        print_table(("ID", "TENANT", "BEGINS", "RIGHTS", "LABEL", "CREATED", "REVOKED"), rows)


@app.command()
def revoke(
    ctx: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The id from `manylora key list`.")],
    as_json: Json = False,
) -> None:
    """End a key at once."""
    with session_of(ctx).catalog() as catalog:
        catalog.revoke_key(key_id, actor=actor())
    if as_json:
        print_json({"revoked": key_id})
    else:
        say(f"revoked {key_id}")
