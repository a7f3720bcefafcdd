"""A process that pushes one folder, and kills itself (SIGKILL) just before or after a named step of the push.

    push_process.py HOME DATABASE_URL FOLDER [STEP] [before|after]

Without a step it pushes and prints the version. The steps are the places where state changes; the product has no hooks
for this, so they are wrapped from outside.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manylora.adapter import AdapterName
from manylora.registry import adapters, aliases, blobs, journal, publishing
from manylora.registry.catalog import Catalog
from manylora.settings import Settings


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, moment: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == "before":
            die()
        result = real(*args, **kwargs)
        die()
        return result

    setattr(owner, name, wrapped)


def dying_chunks(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for chunk in real(*args, **kwargs):
            yield chunk
            die()

    return wrapped


def dying_write(real: Callable[[], Any], moment: str) -> Callable[[], Any]:
    @contextmanager
    def wrapped() -> Iterator[Any]:
        with real() as connection:
            yield connection
            if moment == "before":
                die()
        die()

    return wrapped


def arm(catalog: Catalog, step: str, moment: str) -> None:
    if step == "chunk":
        blobs._checked = dying_chunks(blobs._checked)
    elif step == "commit":
        catalog._database.write = dying_write(catalog._database.write, moment)  # type: ignore[method-assign]
    else:
        owner, name = {
            "put": (blobs.obstore, "put"),
            "visible": (publishing, "make_visible"),
            "version": (adapters, "add_version"),
            "alias": (aliases, "point"),
            "audit": (journal, "record"),
        }[step]
        wrap(owner, name, moment)


def main() -> None:
    home, database_url, folder, *rest = sys.argv[1:]
    env = {"MANYLORA_HOME": home, "MANYLORA_DATABASE_URL": database_url}
    with Catalog.open(Settings.from_env(env)) as catalog:
        if rest:
            arm(catalog, *rest)
        published = catalog.publish(
            Path(folder), AdapterName("acme", "support"), base_model="tiny-base", actor="process", promote=True
        )
        print(published.version.ref.number, published.created)


main()
