"""
Make the database of the Django app: ``python prepare.py PATH``.

Tests run it as a command, so that Django is set up in a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

USER, PASSWORD = "admin", "admin"


def prepare(db_path: Path) -> None:
    """Migrate a fresh sqlite file and put an administrator (admin/admin) and three notes into it."""
    os.environ["DJANGO_DB"] = str(db_path)
    os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
    sys.path.insert(0, str(Path(__file__).parent))

    import django
    from django.contrib.auth.hashers import make_password
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0, interactive=False)

    from django.apps import apps
    from django.contrib.auth import get_user_model

    password = make_password(PASSWORD)
    get_user_model().objects.update_or_create(
        username=USER, defaults={"is_staff": True, "is_superuser": True, "password": password}
    )
    note = apps.get_model("pages", "Note")
    for title in ("apples", "pears", "plums"):
        note.objects.get_or_create(title=title, defaults={"body": f"All about {title}.\n\nThe end."})


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
