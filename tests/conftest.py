"""What holds for all tests: property tests have no time limit per example, for the machine may be busy with others."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from pathlib import Path

from hypothesis import settings

settings.register_profile("manylora", deadline=None)
settings.load_profile("manylora")

# Whoever runs the tests under nohup, or in the background of a script, hands down ignored signals; the processes that
# the tests start have to see the ones that a terminal would leave them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton's interpreter runs the kernels. Triton decides at its first import, for its own functions too,
# and tests of other folders import it; the engines that tests start must not see the variable.
if importlib.util.find_spec("triton") is not None and not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("manylora.kernels.paged_lora")
    del os.environ["TRITON_INTERPRET"]
