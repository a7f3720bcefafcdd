"""Texts and paths on the command line are taken as they are, without the data model that newer Typers build for them.

Since Typer 0.26 or so each parameter gets a Pydantic adapter on first use, and importing Pydantic takes 0.1 s of
processor time: a quarter of a whole `manylora adapter push`. A text needs no model to become a text. Numbers and
whatever else has something to check keep Typer's way, and so does every parameter of a Typer that works otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_PLAIN: dict[Any, Callable[[Any], Any]] = {
    bool: bool,  # a flag that was not given is None, or a bool already
    str: str,
    Path: Path,
    list[str]: list,
    list[Path]: lambda values: [Path(value) for value in values],
}


def take_plainly(command: Any) -> None:
    """Do so for all parameters of a command, and of its subcommands."""
    parameters_of = command.get_params

    def plain_parameters_of(ctx: Any) -> list[Any]:
        parameters: list[Any] = parameters_of(ctx)  # with the option for help, which is made when it is asked for
        for parameter in parameters:
            _take_plainly(parameter)
        return parameters

    command.get_params = plain_parameters_of
    for subcommand in getattr(command, "commands", {}).values():
        take_plainly(subcommand)


def _take_plainly(parameter: Any) -> None:
    read = _PLAIN.get(getattr(getattr(parameter, "type_descriptor", None), "annotation", None))
    if read is not None and hasattr(parameter, "get_runtime_param"):
        parameter.get_runtime_param = _PlainParameter(read).itself


class _PlainParameter:
    """Stands where Typer's coercion of a parameter does."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def itself(self) -> _PlainParameter:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as the command gets it; None and () are options that were not given."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        return self._read(value)
