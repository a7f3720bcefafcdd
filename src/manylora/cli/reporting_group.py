"""The root command: runs a command line, and turns whatever comes out of it into lines on stderr and an exit code."""

from __future__ import annotations

import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from manylora.cli.exit_codes import ExitCode, exit_code
from manylora.cli.output import complain, note
from manylora.cli.plain_parameters import take_plainly
from manylora.cli.session import Session
from manylora.errors import ManyloraError

LOG_NAME = "cli.log"


class ReportingGroup(TyperGroup):
    """A command group that never shows a traceback unless `--debug` asks for it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit the process with a documented code."""
        session = Session()
        take_plainly(self)
        kwargs["standalone_mode"] = False
        kwargs["prog_name"] = "manylora"  # also under `python -m`
        try:
            result = super().main(*args, obj=session, **kwargs)
        except BaseException as error:
            sys.exit(_report(error, session))
        sys.exit(result if isinstance(result, int) else ExitCode.OK)


def _report(error: BaseException, session: Session) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.UNEXPECTED
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return ExitCode.INTERRUPTED
    if session.debug:
        traceback.print_exception(error)
    if isinstance(error, ManyloraError):
        complain(error.message, error.hint)
        return exit_code(error)
    if hasattr(error, "format_message"):  # what Typer raises for a wrong command line
        return _report_usage(error)
    return _report_unexpected(error, session)


def _report_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        note(error.format_message())
        return ExitCode.USAGE
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "manylora"
    if type(error).__name__ == "NoSuchOption" and path.endswith(" serve"):
        complain(error.format_message(), f"flags of vLLM itself go after `--`: {path} MODEL -- {error.option_name} …")
    else:
        complain(error.format_message(), f"`{path} --help` shows how it is used")
    return ExitCode.USAGE


def _report_unexpected(error: BaseException, session: Session) -> int:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = "" if session.debug else f"the traceback is in {_log(error, session)}; --debug shows it"
    complain(f"unexpected: {what}", hint)
    return ExitCode.UNEXPECTED


def _log(error: BaseException, session: Session) -> Path:
    """Append the traceback to a log beside the others, or in the temporary folder where that cannot be written."""
    text = f"{datetime.now(UTC).isoformat()} {sys.argv[1:]}\n{''.join(traceback.format_exception(error))}\n"
    try:
        run_dir = session.settings().run_dir
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (run_dir / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ManyloraError):
        with tempfile.NamedTemporaryFile("w", prefix="manylora-", suffix=".log", delete=False) as spare:
            spare.write(text)
        return Path(spare.name)
    return run_dir / LOG_NAME
