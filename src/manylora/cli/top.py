"""`manylora top`: which adapters are in which memory of this machine, and who uses them."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manylora.cli.output import Json, bytes_text, print_json
from manylora.cli.session import session_of
from manylora.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT_S = 10.0
LONGEST_TABLE = 40


def top(
    ctx: typer.Context,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.2, help="How often to look.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show which adapters are in memory on this machine, who uses them, and how full each memory is; until Ctrl-C.

    Asks the engine and the agent of the `manylora serve` that runs on this home.
    """
    run_dir = session_of(ctx).settings().run_dir
    report = look(run_dir)
    if as_json:
        print_json(report.as_json())
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        console.print(drawn(report))
        return
    with Live(drawn(report), console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(drawn(look(run_dir)), refresh=True)
        except KeyboardInterrupt:
            return


@dataclass(frozen=True, slots=True)
class Report:
    """What the engine and the agent tell; `host` is None where no agent answers."""

    device: dict[str, Any]
    host: dict[str, Any] | None

    def as_json(self) -> dict[str, object]:
        return {"device": self.device, "host": self.host}


def look(run_dir: Path) -> Report:
    """Ask both. Raises `Unavailable` where no engine answers."""
    try:
        device = _get(run_dir / "engine.sock", "/manylora/v1/residency")
    except (OSError, ValueError) as error:
        raise Unavailable(f"no engine answers on {run_dir}", "is `manylora serve` running on this --home?") from error
    try:
        host = _get(run_dir / "agent-http.sock", "/v1/residency")
    except (OSError, ValueError):
        host = None
    return Report(device, host)


def drawn(report: Report) -> RenderableType:
    """The report as a person reads it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title, justify in (("ADAPTER", "left"), ("WHERE", "left"), ("REQUESTS", "right"), ("SIZE", "right")):
        table.add_column(title, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    rows = _rows(report)
    for row in rows[:LONGEST_TABLE]:
        table.add_row(*map(Text, row))
    left_out = [Text(f"and {len(rows) - LONGEST_TABLE} more")] if len(rows) > LONGEST_TABLE else []
    return Group(*map(Text, _summary(report)), Text(), table, *left_out)


def _summary(report: Report) -> list[str]:
    budget, adapters = report.device["budget"], report.device["adapters"]
    lines = [
        f"adapter memory  {_fill(budget)}  {len(adapters)} adapters, {report.device.get('waiting', 0)} requests wait",
    ]
    if report.host is None:
        return [*lines, "host memory     no agent answers"]
    return [*lines, f"host memory     {_fill(report.host['budget'])}  {len(report.host['host'])} adapters"]


def _fill(budget: dict[str, Any]) -> str:
    share = budget["used_bytes"] / budget["bytes"] if budget["bytes"] else 0.0
    return f"{bytes_text(budget['used_bytes'])} of {bytes_text(budget['bytes'])} ({share:.0%})"


def _rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Those in use first; then what is in host memory only, by its digest: the agent knows no names."""
    on_host = {block["digest"]: block for block in report.host["host"]} if report.host else {}
    adapters = sorted(report.device["adapters"], key=lambda each: (-each["in_flight"], each["engine_name"]))
    rows = [
        (
            each["engine_name"],
            each["tier"] + (" + host" if each["digest"] in on_host else ""),
            str(each["in_flight"]),
            bytes_text(each["size_bytes"]),
        )
        for each in adapters
    ]
    in_memory = {each["digest"] for each in adapters}
    rest = [block for digest, block in sorted(on_host.items()) if digest not in in_memory]
    return rows + [(block["digest"][:16], "host", "-", bytes_text(block["size_bytes"])) for block in rest]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _get(path: Path, route: str) -> dict[str, Any]:
    connection = _UnixConnection(path)
    try:
        connection.request("GET", route)
        with connection.getresponse() as answer:
            body = answer.read()
            if answer.status != http.HTTPStatus.OK:
                raise ValueError(f"status {answer.status}")
        value = json.loads(body)
    except http.client.HTTPException as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value
