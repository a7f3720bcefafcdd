"""`manylora grant …`: which tenant may call adapters of another."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.adapter import shown
from manylora.cli import views
from manylora.cli.output import Json, note, print_json, print_table, say
from manylora.cli.session import actor, session_of
from manylora.errors import InvalidName

app = typer.Typer(no_args_is_help=True, help="Grants: which tenant may call adapters of another.")

Grantee = Annotated[str, typer.Argument(metavar="GRANTEE", help="The tenant that may call.")]
Pattern = Annotated[
    str, typer.Argument(metavar="OWNER/PATTERN", help="The owner's adapters; * and ? are wildcards. Quote them.")
]


@app.command()
def add(ctx: typer.Context, grantee: Grantee, pattern: Pattern, as_json: Json = False) -> None:
    """Let a tenant call adapters of another tenant. Its own it may always call.

    \b
    Examples:
      manylora grant add globex acme/support
      manylora grant add globex 'acme/support-*'
    """
    owner, names = _parse_pattern(pattern)
    with session_of(ctx).catalog() as catalog:
        catalog.grant(grantee, owner, names, actor=actor())
    _tell(as_json, "granted", f"{grantee} may call {owner}/{names}", grantee, owner, names)


@app.command("list")
def list_grants(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only what it was granted.")] = None,
    as_json: Json = False,
) -> None:
    """List the grants."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.grants(tenant)
    if as_json:
        print_json({"grants": [views.grant_view(grant) for grant in found]})
    elif not found:
        note("no grants; a tenant may call its own adapters only")
    else:
        print_table(("GRANTEE", "MAY CALL"), [(grant.grantee, f"{grant.owner}/{grant.pattern}") for grant in found])


@app.command()
def remove(ctx: typer.Context, grantee: Grantee, pattern: Pattern, as_json: Json = False) -> None:
    """Take a grant back. The pattern must be the one that was granted."""
    owner, names = _parse_pattern(pattern)
    with session_of(ctx).catalog() as catalog:
        catalog.revoke_grant(grantee, owner, names, actor=actor())
    _tell(as_json, "removed", f"{grantee} may no longer call {owner}/{names}", grantee, owner, names)


def _parse_pattern(text: str) -> tuple[str, str]:
    owner, slash, names = text.partition("/")
    if not slash or not owner or not names:
        raise InvalidName(f"'{shown(text)}' is no OWNER/PATTERN", "write acme/support, or 'acme/*' for all of acme's")
    return owner, names


def _tell(as_json: bool, verb: str, line: str, grantee: str, owner: str, names: str) -> None:
    if as_json:
        print_json({verb: {"grantee": grantee, "owner": owner, "pattern": names}})
    else:
        say(line)
