"""The app's name for Django."""

from __future__ import annotations

from django.apps import AppConfig


class PagesConfig(AppConfig):  # type: ignore[misc]  # Django has no types here
    name = "pages"
