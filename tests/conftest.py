"""What holds for all tests: property tests have no time limit per example, for the machine may be busy with others."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("manylora", deadline=None)
settings.load_profile("manylora")
