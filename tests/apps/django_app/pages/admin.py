"""Notes can be edited in the admin."""

from __future__ import annotations

from django.contrib import admin

from .models import Note

admin.site.register(Note, list_display=("title",), search_fields=("title",))
