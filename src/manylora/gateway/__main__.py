"""`python -m manylora.gateway`: one gateway process. Owns its command line; knows nothing of what serves requests.

Exit codes: 0 after a clean stop, 1 when the registry cannot be opened or the address not bound, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from manylora.errors import InvalidSettings, ManyloraError
from manylora.gateway.server import serve
from manylora.settings import Settings
from manylora.telemetry import configure_logging

SWITCH_INTERVAL_S = 0.0002


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags; everything else comes from `Settings`."""
    parser = argparse.ArgumentParser(prog="python -m manylora.gateway", description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--engine-socket", type=Path, required=True, help="Unix socket on which the engine listens")
    parser.add_argument(
        "--base-model", required=True, help="name under which the engine and the registry know the base"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until SIGTERM or SIGINT; the exit code is the process's."""
    args = parse_args(argv)
    try:
        settings = Settings.from_env()
    except InvalidSettings as error:
        print(f"manylora gateway: {error}", file=sys.stderr)
        return 2
    configure_logging("gateway")
    # Threads that fetch give the interpreter back to the event loop within this time, which streams wait for.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return serve(settings, engine_socket=args.engine_socket, base_model_name=args.base_model)
    except ManyloraError as error:
        logging.getLogger("manylora.gateway").error("%s", error)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # A fetch or a publication may still run in a thread; either may be cut off at any moment, and must not delay us.
    os._exit(code)
