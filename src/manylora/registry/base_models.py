"""The base models that the registry knows, so that adapters can be checked without the model at hand."""

from __future__ import annotations

import json

from manylora.adapter import AdapterName, shown
from manylora.errors import Conflict, NotFound
from manylora.registry import journal
from manylora.registry.base_model import BaseModel
from manylora.registry.connection import Connection, Row, utc_now

_BY_NAME = "SELECT * FROM base_models WHERE name = :name"


def register(connection: Connection, model: BaseModel, actor: str) -> None:
    """Add a base model, or bring its facts up to date; `Conflict` where its shapes changed under existing adapters."""
    known = connection.row(_BY_NAME, name=model.name)
    if known is None:
        _refuse_name_of_an_adapter(connection, model.name)
        connection.change(
            "INSERT INTO base_models (name, config, modules, revision, vocab_size, source, aliases, created_at)"
            " VALUES (:name, :config, :modules, :revision, :vocab_size, :source, :aliases, :created_at)",
            name=model.name,
            created_at=utc_now(),
            **_columns(model),
        )
        journal.record(connection, actor, "base_model.register", model.name, revision=model.revision)
        return
    if _model(known).modules != model.modules and _is_used(connection, model.name):
        raise Conflict(
            f"the base model '{shown(model.name)}' is registered with other layers or shapes",
            "serve the changed model under another name (--served-model-name)",
        )
    connection.change(
        "UPDATE base_models SET config = :config, modules = :modules, revision = :revision, vocab_size = :vocab_size,"
        " source = :source, aliases = :aliases WHERE name = :name",
        name=model.name,
        **_columns(model),
    )
    journal.record(connection, actor, "base_model.update", model.name, revision=model.revision)


def refuse_name(connection: Connection, name: AdapterName) -> None:
    """`Conflict` for an adapter that a request could not tell from a base model: the base model would answer."""
    taken = connection.row(
        "SELECT name FROM base_models WHERE name = :short OR name = :full", short=name.name, full=str(name)
    )
    if taken is not None:
        raise Conflict(
            f"the base model '{shown(taken.name)}' has the name of this adapter", "call the adapter otherwise"
        )


def _refuse_name_of_an_adapter(connection: Connection, name: str) -> None:
    tenant, _, rest = name.rpartition("/")
    taken = connection.row(
        "SELECT tenant, name FROM adapters WHERE removed_at IS NULL"
        " AND (name = :name OR (tenant = :tenant AND name = :rest))",
        name=name,
        tenant=tenant,
        rest=rest,
    )
    if taken is not None:
        raise Conflict(
            f"the adapter {taken.tenant}/{taken.name} has the name of this base model",
            "serve the base model under another name (--served-model-name)",
        )


def find(connection: Connection, name: str) -> BaseModel:
    """The base model called `name`, or `NotFound`."""
    row = connection.row(_BY_NAME, name=name)
    if row is None:
        raise NotFound(
            f"the base model '{shown(name, 160)}' is not registered",
            "start it once with `manylora serve`, or see `manylora base list`",
        )
    return _model(row)


def every(connection: Connection) -> list[BaseModel]:
    """All base models, by name."""
    return [_model(row) for row in connection.rows("SELECT * FROM base_models ORDER BY name")]


def _is_used(connection: Connection, name: str) -> bool:
    return connection.row("SELECT id FROM versions WHERE base_model = :name LIMIT 1", name=name) is not None


def _columns(model: BaseModel) -> dict[str, object]:
    return {
        "config": json.dumps(dict(model.config)),
        "modules": json.dumps({path: list(shape) for path, shape in model.modules.items()}),
        "revision": model.revision,
        "vocab_size": model.vocab_size,
        "source": model.source,
        "aliases": json.dumps(list(model.aliases)),
    }


def _model(row: Row) -> BaseModel:
    return BaseModel(
        name=row.name,
        config=json.loads(row.config),
        modules={path: (shape[0], shape[1]) for path, shape in json.loads(row.modules).items()},
        revision=row.revision,
        vocab_size=row.vocab_size,
        source=row.source,
        aliases=tuple(json.loads(row.aliases)),
    )
