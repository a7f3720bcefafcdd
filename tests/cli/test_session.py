"""What commands share."""

from __future__ import annotations

import os
import subprocess
import sys


def test_giving_way_twice_is_giving_way_once() -> None:
    code = (
        "import os; from manylora.cli.session import give_way as g; g(); g(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == max(5, os.getpriority(os.PRIO_PROCESS, 0))
