"""One table."""

from __future__ import annotations

from django.db import models


class Note(models.Model):  # type: ignore[misc]  # Django has no types here
    title = models.CharField(max_length=80)
    body = models.TextField(blank=True)

    class Meta:
        ordering = ("title",)

    def __str__(self) -> str:
        return str(self.title)
