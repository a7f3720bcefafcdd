"""What all commands of one invocation share: the global flags, the settings, the way to the registry."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from manylora.settings import Settings

if TYPE_CHECKING:
    from manylora.registry.catalog import Catalog

DEFAULT_TENANT = "default"


@dataclass(slots=True)
class Session:
    """One invocation of `manylora`."""

    debug: bool = False
    home: Path | None = None

    def settings(self) -> Settings:
        """The settings from the environment and the global flags."""
        return Settings.from_env(home=self.home)

    @contextlib.contextmanager
    def catalog(self, settings: Settings | None = None) -> Iterator[Catalog]:
        """The registry, open for as long as the block runs."""
        # Imported late: the registry's libraries would slow down `--help`.
        from manylora.registry.catalog import Catalog

        catalog = Catalog.open(settings or self.settings())
        try:
            yield catalog
        finally:
            catalog.close()


def session_of(ctx: typer.Context) -> Session:
    """The session of a command's context."""
    session = ctx.obj
    assert isinstance(session, Session)
    return session


def actor() -> str:
    """Who acts, for the audit log: the operating system's user."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:uid-{os.getuid()}"


def ensure_default_tenant(catalog: Catalog) -> None:
    """The tenant of names without one comes into being when it is first needed."""
    if DEFAULT_TENANT not in {tenant.name for tenant in catalog.tenants()}:
        catalog.create_tenant(DEFAULT_TENANT, actor=actor())
