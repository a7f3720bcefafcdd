"""What holds for all tests: property tests have no time limit per example, for the machine may be busy with others."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("manylora", deadline=None)
settings.load_profile("manylora")

# Whoever runs the tests under nohup, or in the background of a script, hands down ignored signals; the processes that
# the tests start have to see the ones that a terminal would leave them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
