"""Raises while it is imported."""

raise RuntimeError("the database password is missing (raised on purpose)")
