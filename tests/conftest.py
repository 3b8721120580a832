"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# On a machine that others use too, an example may take its time; what hangs is caught by pytest's own limits.
settings.register_profile("jumpstart", deadline=None)
settings.load_profile("jumpstart")
