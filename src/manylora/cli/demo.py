"""`manylora demo`: hands over to the demo, when what it needs is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from manylora.cli.session import session_of
from manylora.errors import Unavailable


def demo(
    ctx: typer.Context,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up afterwards and print how to call it.")] = False,
) -> None:
    """Serve a small real model with five adapters, ask them all at once, push a sixth while they answer.

    Needs no GPU. Every answer is compared with what transformers and PEFT give; a difference is a failure.
    """
    settings = session_of(ctx).settings()
    try:
        from manylora.demo import run
    except ImportError as error:
        raise Unavailable(
            f"the demo needs the package {error.name}",
            "pip install 'manylora[cpu,demo]', or `make setup` in a checkout",
        ) from error
    raise typer.Exit(run.run(keep=keep, home=settings.home))
