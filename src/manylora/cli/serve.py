"""`manylora serve`: prepares the registry for a base model and hands over to the supervisor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.cli.output import note, say, warn
from manylora.cli.serve_screen import ServeScreen
from manylora.cli.session import DEFAULT_TENANT, Session, actor, ensure_default_tenant, session_of
from manylora.errors import InvalidInput, InvalidSettings, ManyloraError, NotFound

if TYPE_CHECKING:
    from manylora.registry.base_model import BaseModel
    from manylora.registry.catalog import Catalog
    from manylora.settings import Settings


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local model folder, or the id of a hub model.")],
    vllm_flags: Annotated[
        list[str] | None, typer.Argument(metavar="VLLM_FLAGS", help="After `--`: any flag of `vllm serve`.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Where to listen [default: 127.0.0.1].")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any [default: 8000].")
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", metavar="NAME", help="Name of the base model in requests."),
    ] = None,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option("--adapter-root", metavar="PATH", help="Where /v1/load_lora_adapter may read; repeatable."),
    ] = None,
    adapter_memory: Annotated[
        str | None,
        typer.Option(
            "--adapter-memory",
            metavar="SIZE",
            help="Memory for adapters: a share of the device's, or a size such as 8GiB [default: 12%].",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Host memory for adapters that are kept ready: a share of the machine's, or a size [default: 10%].",
        ),
    ] = None,
    disk_budget: Annotated[
        str | None,
        typer.Option(
            "--disk-budget", metavar="SIZE", help="Disk for adapters: a share of it, or a size [default: 100GiB]."
        ),
    ] = None,
    home: Annotated[
        Path | None, typer.Option("--home", metavar="PATH", help="Folder of registry, blobs and logs.")
    ] = None,
) -> None:
    """Serve a base model and every adapter in the registry, until Ctrl-C.

    Runs vLLM, the gateway and the node's agent on this machine and restarts whichever dies. Adapters that are pushed
    later are served without a restart. The first start prints an admin key.

    \b
    Examples:
      manylora serve ./models/SmolLM2-135M-Instruct --served-model-name smol
      manylora serve meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --adapter-memory 16GiB -- --max-model-len 8192
    """
    session = session_of(ctx)
    session.home = home or session.home
    settings = _settings(session, host, port, adapter_root or [])
    settings = replace(
        settings,
        adapter_memory=adapter_memory or settings.adapter_memory,
        host_memory=host_memory or settings.host_memory,
        disk_budget=disk_budget or settings.disk_budget,
    )
    raise typer.Exit(_run(session, settings, model, served_model_name, vllm_flags or []))


def _settings(session: Session, host: str | None, port: int | None, adapter_roots: list[Path]) -> Settings:
    """The settings with what the flags say instead of the environment."""
    settings = session.settings()
    roots = tuple(root.expanduser().resolve() for root in adapter_roots)
    return replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
        adapter_roots=roots or settings.adapter_roots,
    )


def _run(session: Session, settings: Settings, model: str, served_name: str | None, vllm_flags: list[str]) -> int:
    # Imported late: asyncio and the registry's libraries would slow down `--help`.
    from manylora.engine import launch
    from manylora.settings import MemorySize
    from manylora.supervisor import machine, plan, run_dir
    from manylora.supervisor.keeper import StartFailed

    _check_arguments(model, vllm_flags)
    launch.check_vllm_args(vllm_flags)
    launch.check_adapter_memory(settings.adapter_memory)
    MemorySize.parse(settings.host_memory, "host memory")
    MemorySize.parse(settings.disk_budget, "a disk budget")
    launch.require_engine()
    with run_dir.owned(settings.run_dir) as owned:
        settings = replace(settings, port=plan.free_port(settings.host, settings.port))
        base = ServedBase.read(model, served_name)
        with session.catalog(settings) as catalog:
            _prepare(catalog, base)
            planned = plan.make(settings, owned, model, base.name, vllm_flags)
            screen = ServeScreen(base.name, settings.run_dir, lambda: base.register_late(catalog))
            try:
                return machine.run(planned, screen, owned.lock_fd)
            except StartFailed as failure:
                for line in failure.lines:
                    note(f"  {line}")
                raise


def _check_arguments(model: str, vllm_flags: list[str]) -> None:
    """What can be said before anything starts."""
    if vllm_flags and not vllm_flags[0].startswith("-"):
        raise InvalidSettings(
            f"unexpected argument '{vllm_flags[0]}'", "only vLLM's flags may follow MODEL, after `--`"
        )
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise NotFound(f"there is no folder {model}", "give a folder with config.json, or the id of a hub model")


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base model that is about to be served; `described` is None while it is neither a folder nor in the cache."""

    model: str
    name: str
    described: BaseModel | None

    @classmethod
    def read(cls, model: str, served_name: str | None) -> ServedBase:
        """Find its shapes, and the name under which it is served: the given one, else its own."""
        from manylora.registry.base_model import describe

        try:
            described = describe(model, name=served_name)
        except (NotFound, InvalidInput):
            return cls(model, served_name or model, None)
        return cls(model, described.name, described)

    def register(self, catalog: Catalog) -> None:
        """Make adapters for it publishable, if its shapes are known by now."""
        if self.described is not None:
            catalog.register_base_model(self.described, actor=actor())

    def register_late(self, catalog: Catalog) -> None:
        """A hub model that was not in the cache is there once the engine has started."""
        if self.described is None:
            from manylora.registry.base_model import describe

            try:
                catalog.register_base_model(describe(self.model, name=self.name), actor=actor())
            except ManyloraError as problem:
                warn(f"adapters for {self.name} cannot be checked, so none can be pushed: {problem}")


def _prepare(catalog: Catalog, base: ServedBase) -> None:
    """Everything that a first start needs in the registry."""
    base.register(catalog)
    ensure_default_tenant(catalog)
    known = catalog.keys()
    if not any(key.is_admin and key.revoked_at is None for key in known):
        key, info = catalog.create_key(DEFAULT_TENANT, label="first start", is_admin=True, actor=actor())
        say(f"admin key: {key}")
        note(f"key {info.key_id} of tenant {DEFAULT_TENANT}; keep it, it is not shown again")
