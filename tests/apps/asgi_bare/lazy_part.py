"""Imported by the /lazy handler only."""

VALUE = "lazily imported"
