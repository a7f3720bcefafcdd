"""The base models that the registry knows, so that adapters can be checked without the model at hand."""

from __future__ import annotations

import json

from sqlalchemy import Connection, Row, insert, select, update

from manylora.adapter import shown
from manylora.errors import Conflict, NotFound
from manylora.registry import journal
from manylora.registry.base_model import BaseModel
from manylora.registry.database import utc_now
from manylora.registry.tables import base_models, versions


def register(connection: Connection, model: BaseModel, actor: str) -> None:
    """Add a base model, or bring its facts up to date; `Conflict` where its shapes changed under existing adapters."""
    known = connection.execute(select(base_models).where(base_models.c.name == model.name)).one_or_none()
    if known is None:
        connection.execute(insert(base_models).values(name=model.name, created_at=utc_now(), **_columns(model)))
        journal.record(connection, actor, "base_model.register", model.name, revision=model.revision)
        return
    if _model(known).modules != model.modules and _is_used(connection, model.name):
        raise Conflict(
            f"the base model '{shown(model.name)}' is registered with other layers or shapes",
            "serve the changed model under another name (--served-model-name)",
        )
    connection.execute(update(base_models).where(base_models.c.name == model.name).values(**_columns(model)))
    journal.record(connection, actor, "base_model.update", model.name, revision=model.revision)


def find(connection: Connection, name: str) -> BaseModel:
    """The base model called `name`, or `NotFound`."""
    row = connection.execute(select(base_models).where(base_models.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(
            f"the base model '{shown(name, 160)}' is not registered",
            "start it once with `manylora serve`, or see `manylora base list`",
        )
    return _model(row)


def every(connection: Connection) -> list[BaseModel]:
    """All base models, by name."""
    return [_model(row) for row in connection.execute(select(base_models).order_by(base_models.c.name))]


def _is_used(connection: Connection, name: str) -> bool:
    return connection.execute(select(versions.c.id).where(versions.c.base_model == name).limit(1)).first() is not None


def _columns(model: BaseModel) -> dict[str, object]:
    return {
        "config": json.dumps(dict(model.config)),
        "modules": json.dumps({path: list(shape) for path, shape in model.modules.items()}),
        "revision": model.revision,
        "vocab_size": model.vocab_size,
        "source": model.source,
        "aliases": json.dumps(list(model.aliases)),
    }


def _model(row: Row[tuple[object, ...]]) -> BaseModel:
    return BaseModel(
        name=row.name,
        config=json.loads(row.config),
        modules={path: (shape[0], shape[1]) for path, shape in json.loads(row.modules).items()},
        revision=row.revision,
        vocab_size=row.vocab_size,
        source=row.source,
        aliases=tuple(json.loads(row.aliases)),
    )
