"""Where the pages are."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("", views.home, name="home"),
    path("notes/<int:id>/", views.note, name="note"),
    path("lazy/", views.lazy),
    path("language/", views.language),
    path("async/", views.on_loop),
    path("stream/<int:count>/", views.stream),
    path("crash/", views.crash),
]
