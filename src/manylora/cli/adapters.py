"""`manylora adapter …`: publish adapters, move their aliases, look at them, check their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.adapter import LIVE, AdapterName, Selector, shown
from manylora.cli import views
from manylora.cli.exit_codes import ExitCode
from manylora.cli.output import (
    Json,
    bytes_text,
    leave,
    note,
    percent_text,
    print_json,
    print_table,
    say,
    time_text,
    warn,
)
from manylora.cli.push_progress import push_progress
from manylora.cli.session import DEFAULT_TENANT, actor, ensure_default_tenant, session_of
from manylora.errors import InvalidInput, InvalidName, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from manylora.registry.catalog import Catalog
    from manylora.registry.records import Published, VerifyResult

app = typer.Typer(no_args_is_help=True, help="Publish adapters and choose which version is served.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="TENANT/ADAPTER; the tenant is `default` when left out.")]
Numbered = Annotated[str, typer.Argument(metavar="NAME@vN", help="One version, such as acme/support@v3.")]


@app.command()
def push(
    ctx: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="adapter_config.json and adapter_model.safetensors.")
    ],
    name: Name,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="Base model it was trained for, as registered.")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Serve this version from now on.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept warnings, such as another base revision.")] = False,
    meta: Annotated[
        list[str] | None, typer.Option("--meta", metavar="KEY=VALUE", help="Keep a fact with it; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Publish a PEFT folder as a new version of an adapter.

    The first version of an adapter is served at once. Later ones wait for `promote`, or take over here with --promote.
    Content that the adapter already has gives that version back. Nothing is visible before all of it is stored.

    \b
    Examples:
      manylora adapter push ./out acme/support
      manylora adapter push ./out acme/support --promote --meta run=2024-11-03
    """
    adapter, metadata = _parse_name(name), _parse_metadata(meta or [])
    session = session_of(ctx)
    with session.catalog() as catalog:
        base_model = base or _only_base_model(catalog)
        if adapter.tenant == DEFAULT_TENANT:
            ensure_default_tenant(catalog)
        with push_progress(str(adapter)) as progress:
            published = catalog.publish(
                folder,
                adapter,
                base_model=base_model,
                actor=actor(),
                force=force,
                promote=True if promote else None,
                metadata=metadata,
                progress=progress,
            )
        aliases = catalog.adapter(adapter).aliases
    for warning in published.warnings:
        warn(warning)
    if as_json:
        print_json(views.published_view(published, aliases))
    else:
        _tell_published(published, aliases)


@app.command("list")
def list_adapters(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's.")] = None,
    as_json: Json = False,
) -> None:
    """List adapters, with the version that is live and the canary."""
    with session_of(ctx).catalog() as catalog:
        found = catalog.adapters(tenant)
    if as_json:
        print_json({"adapters": [views.adapter_view(info) for info in found]})
    elif not found:
        note("no adapters; publish one with `manylora adapter push FOLDER NAME`")
    else:
        rows = [
            (str(info.name), *_where(info.aliases, info.canary_weight), str(info.versions), info.base_model)
            for info in found
        ]
        print_table(("NAME", "LIVE", "CANARY", "VERSIONS", "BASE MODEL"), rows)


@app.command()
def show(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Show one adapter with all its versions."""
    adapter = _parse_name(name)
    with session_of(ctx).catalog() as catalog:
        info, versions = catalog.adapter(adapter), catalog.versions(adapter)
    rows = [views.version_view(version, info.aliases) for version in versions]
    if as_json:
        print_json({**views.adapter_view(info), "versions": rows})
        return
    live, canary = _where(info.aliases, info.canary_weight)
    say(f"{info.name}  base {info.base_model}  live {live}  canary {canary}")
    table = [
        (
            f"v{version.ref.number}",
            version.ref.digest[:16],
            str(version.lora_rank),
            bytes_text(version.size_bytes),
            str(version.state),
            time_text(version.created_at),
            version.created_by,
            " ".join(f"{key}={value}" for key, value in version.metadata.items()),
        )
        for version in versions
    ]
    print_table(("VERSION", "DIGEST", "RANK", "SIZE", "STATE", "CREATED", "BY", "META"), table)


@app.command()
def promote(ctx: typer.Context, version: Numbered, as_json: Json = False) -> None:
    """Serve this version from the next request on.

    \b
    Example:
      manylora adapter promote acme/support@v3
    """
    adapter, number = _parse_version(version)
    with session_of(ctx).catalog() as catalog:
        catalog.promote(adapter, number, actor=actor())
    _tell_live(adapter, number, as_json)


@app.command()
def rollback(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Serve the version that was live before the present one."""
    adapter = _parse_name(name)
    with session_of(ctx).catalog() as catalog:
        number = catalog.rollback(adapter, actor=actor())
    _tell_live(adapter, number, as_json)


# A negative share looks like an option; as an argument it gets the message that says what a share is.
@app.command(context_settings={"ignore_unknown_options": True})
def canary(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="NAME@vN", help="The version to try; NAME alone with `off`.")],
    share: Annotated[str, typer.Argument(metavar="PERCENT|off", help="Share of the requests, such as 5%.")],
    as_json: Json = False,
) -> None:
    """Send a share of the requests to another version.

    \b
    Examples:
      manylora adapter canary acme/support@v4 5%
      manylora adapter canary acme/support off
    """
    number: int | None = None
    if share == "off":
        adapter, weight = _parse_name(which.partition("@")[0]), 0.0
    else:
        (adapter, number), weight = _parse_version(which), _parse_share(share)
    with session_of(ctx).catalog() as catalog:
        catalog.set_canary(adapter, number, weight, actor=actor())
    if as_json:
        print_json({"name": str(adapter), "canary": number, "canary_weight": weight})
    elif number is None:
        say(f"{adapter} has no canary")
    else:
        say(f"{adapter}@v{number} gets {percent_text(weight)} of the requests for {adapter}")


@app.command()
def remove(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Stop serving an adapter and retire all its versions. Numbering continues if the name is pushed again."""
    adapter = _parse_name(name)
    with session_of(ctx).catalog() as catalog:
        catalog.remove(adapter, actor=actor())
    if as_json:
        print_json({"removed": str(adapter)})
    else:
        say(f"removed {adapter}")


@app.command()
def verify(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One adapter; all of them when left out.")] = None,
    as_json: Json = False,
) -> None:
    """Hash every stored byte again. Exit code 7 when something is damaged."""
    adapter = _parse_name(name) if name else None
    with session_of(ctx).catalog() as catalog:
        results = _told(catalog.verify(adapter), quiet=as_json)
    damaged = sum(not result.ok for result in results)
    if as_json:
        print_json({"checked": len(results), "damaged": damaged, "results": [views.verify_view(r) for r in results]})
    else:
        say(f"{len(results)} versions checked, {damaged} damaged")
    if damaged:
        leave(ExitCode.CORRUPT)


def _told(results: Iterable[VerifyResult], *, quiet: bool) -> list[VerifyResult]:
    """Collect results, showing each as it comes."""
    found: list[VerifyResult] = []
    for result in results:
        found.append(result)
        if not quiet:
            say(f"{'ok     ' if result.ok else 'DAMAGED'}  {result.version.ref}  {result.problem}".rstrip())
    return found


def _tell_published(published: Published, aliases: Mapping[str, int]) -> None:
    version = published.version
    facts = f"{bytes_text(version.size_bytes)}, rank {version.lora_rank}, base {version.base_model}"
    say(f"{version.ref} {'published' if published.created else 'was already published, unchanged'} ({facts})")
    live = aliases.get(LIVE)
    if live == version.ref.number:
        say("it is live" if published.became_live else "it is already live")
    else:
        say(f"live is {f'v{live}' if live else 'none'}; to serve this one: manylora adapter promote {version.ref}")


def _tell_live(adapter: AdapterName, number: int, as_json: bool) -> None:
    if as_json:
        print_json({"name": str(adapter), "live": number})
    else:
        say(f"{adapter}@v{number} is live")


def _where(aliases: Mapping[str, int], canary_weight: float) -> tuple[str, str]:
    """Where `live` and `canary` point, as text."""
    live, canary = aliases.get(LIVE), aliases.get("canary")
    return f"v{live}" if live else "-", f"v{canary} {percent_text(canary_weight)}" if canary else "-"


def _only_base_model(catalog: Catalog) -> str:
    """The base model that is meant when none is named: the only one."""
    names = [model.name for model in catalog.base_models()]
    if len(names) == 1:
        return names[0]
    if names:
        raise InvalidInput(f"there are {len(names)} base models", f"choose with --base: {', '.join(sorted(names))}")
    raise NotFound("no base model is registered", "start `manylora serve MODEL` once, or run `manylora base add MODEL`")


def _parse_name(text: str) -> AdapterName:
    return AdapterName.parse(text, default_tenant=DEFAULT_TENANT)


def _parse_version(text: str) -> tuple[AdapterName, int]:
    selector = Selector.parse(text, default_tenant=DEFAULT_TENANT)
    if selector.number is None:
        raise InvalidName(f"'{shown(text)}' names no version", f"write {selector.adapter}@vN")
    return selector.adapter, selector.number


def _parse_share(text: str) -> float:
    """A percentage as a share from 0 to 1; the sign is required because `5` could mean either."""
    try:
        percent = float(text.removesuffix("%")) if text.endswith("%") else -1.0
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise InvalidInput(
            f"'{shown(text)}' is not a share of the requests",
            "write a percentage above 0% and up to 100%, such as 5%, or off",
        )
    return percent / 100


def _parse_metadata(pairs: list[str]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in metadata:
            raise InvalidInput(f"--meta '{shown(pair)}' cannot be used", "write each fact once, as KEY=VALUE")
        metadata[key] = value
    return metadata
