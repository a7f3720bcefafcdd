"""The command `manylora`: puts the commands together. Start-up stays light: what a command needs it imports itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import manylora
from manylora.cli import adapters, agent, audit, bases, demo, grants, keys, serve, simulate, tenants, top
from manylora.cli.output import say
from manylora.cli.reporting_group import ReportingGroup
from manylora.cli.session import session_of

app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    # Plain help: it is three times as fast to start, and reads the same in a pipe.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"manylora {manylora.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option("--home", metavar="PATH", help="Folder of registry, blobs and logs [default: ~/.manylora]."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hundreds of LoRA adapters on one base model, behind one OpenAI endpoint.

    \b
    A first session:
      manylora serve HuggingFaceTB/SmolLM2-135M-Instruct
      manylora tenant create acme                             (in another terminal)
      manylora adapter push ./my-peft-folder acme/support
      manylora key create acme
      curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer sk-…" \\
           -H "Content-Type: application/json" \\
           -d '{"model": "acme/support", "messages": [{"role": "user", "content": "Hello"}]}'

    \b
    Settings are environment variables (docs/settings.md); exit codes are in docs/cli.md.
    """
    session = session_of(ctx)
    session.home, session.debug = home, debug


app.command(short_help="Serve a base model with all its adapters.")(serve.serve)
app.command(short_help="Keep a node's adapters packed and ready in memory.")(agent.agent)
app.command(short_help="Show which adapters are where, live.")(top.top)
app.add_typer(adapters.app, name="adapter")
app.add_typer(bases.app, name="base")
app.add_typer(tenants.app, name="tenant")
app.add_typer(keys.app, name="key")
app.add_typer(grants.app, name="grant")
app.command(short_help="Show who changed what, and when.")(audit.audit)
app.command(short_help="Replay requests under each eviction policy.")(simulate.simulate)
app.command(short_help="Show it all on a small real model.")(demo.demo)
