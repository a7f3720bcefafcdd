"""`manylora` and `python -m manylora`: the command line, and what must be decided before it is imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that `sys.argv` names.

    A push gives way to engines on this machine from its first import on, as those are half of what it costs.
    """
    if "push" in sys.argv[1:]:
        from manylora.cli.giving_way import give_way

        give_way()
    from manylora.cli.main import app

    app()


if __name__ == "__main__":
    main()
