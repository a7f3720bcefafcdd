"""`manylora base …`: the base models that adapters are checked against."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli import views
from manylora.cli.output import Json, note, print_json, print_table, say
from manylora.cli.session import actor, session_of

app = typer.Typer(no_args_is_help=True, help="Base models that adapters are checked against.")


@app.command()
def add(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local folder, or a hub id that is in the cache.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name to register; the folder's or id's by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Register a base model, so that adapters can be pushed without serving it here.

    Only its config and the headers of its weights are read. `manylora serve` registers its own model.

    \b
    Example:
      manylora base add ./models/Llama-3.1-8B-Instruct --name llama-8b
    """
    from manylora.registry.base_model import describe

    described = describe(model, name=name)
    with session_of(ctx).catalog() as catalog:
        catalog.register_base_model(described, actor=actor())
    if as_json:
        print_json(views.base_model_view(described))
    else:
        say(f"registered {described.name} ({len(described.modules)} modules that adapters may change)")


@app.command("list")
def list_base_models(ctx: typer.Context, as_json: Json = False) -> None:
    """List the registered base models."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.base_models()
    if as_json:
        print_json({"base_models": [views.base_model_view(model) for model in found]})
    elif not found:
        note("no base models; `manylora serve MODEL` or `manylora base add MODEL` registers one")
    else:
        rows = [(m.name, str(len(m.modules)), str(m.vocab_size), m.revision or "-", m.source) for m in found]
        print_table(("NAME", "MODULES", "VOCABULARY", "REVISION", "SOURCE"), rows)
