"""Options are declared once, and everything that is made from them can be."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from jumpstart.boot import BootSettings
from jumpstart_server.settings import (
    SECTIONS,
    AppSettings,
    HostSettings,
    Option,
    ProfileSettings,
    Settings,
    TenantSettings,
    annotated_type,
    boot_settings,
    declared_options,
)

OPTIONS = declared_options()
IDS = [f"{option.section}.{option.key}" for option in OPTIONS]


def settings(
    app: AppSettings | None = None, tenant: TenantSettings | None = None, profile: ProfileSettings | None = None
) -> Settings:
    return Settings(
        app=app or AppSettings(),
        tenant=tenant or TenantSettings(),
        profile=profile or ProfileSettings(),
        server=HostSettings(),
        home_cache="/c",
        home_config="/k",
        home_state="/s",
    )


def test_every_field_of_every_section_is_an_option() -> None:
    fields = [f"{name}.{field.name}" for name, struct in SECTIONS.items() for field in msgspec.structs.fields(struct)]
    assert fields == IDS


def test_no_flag_means_two_things() -> None:
    flags = Counter(flag for option in OPTIONS for flag in option.flags)
    negations = Counter(f"--no-{option.flags[0][2:]}" for option in OPTIONS if option.is_flag)
    taken = Counter(["-c", "--config", "--tenant", "-h", "--help", "--version"])
    assert [flag for flag, count in (flags + negations + taken).items() if count > 1] == []


def test_no_environment_variable_means_two_things() -> None:
    """Only the app, which a tenant may have for itself, is one word for two keys."""
    names: dict[str, list[str]] = {}
    for option in OPTIONS:
        for name in (option.env, *option.other_env):
            names.setdefault(name, []).append(f"{option.section}.{option.key}")
    assert {name: keys for name, keys in names.items() if len(keys) > 1} == {
        "JUMPSTART_TARGET": ["app.target", "tenant.target"]
    }


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_an_option_says_all_that_its_users_need(option: Option) -> None:
    assert option.help.endswith(".")
    assert option.help[0].isupper() or option.help.startswith("functools.")
    assert "\n" not in option.help
    assert re.fullmatch(r"JUMPSTART_[A-Z0-9_]+", option.env)
    assert all(re.fullmatch(r"-[a-z]|--[a-z][a-z0-9_-]+", flag) for flag in option.flags)
    assert option.unit in ("", "s", "bytes")
    if option.is_flag:
        assert option.flags[0].startswith("--"), "its negation is made from the first spelling"
    if option.choices:
        assert option.default in option.choices
    if option.path:
        assert option.default in ("", "-", ())


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_a_default_is_a_value_that_the_option_allows(option: Option) -> None:
    assert msgspec.convert(option.default, annotated_type(option)) == option.default


def test_settings_cannot_be_changed() -> None:
    made = settings()
    for part in (made, made.app, made.tenant, made.profile, made.server):
        with pytest.raises(AttributeError):
            setattr(part, part.__struct_fields__[0], "x")


def test_the_tenants_own_app_comes_before_the_common_one() -> None:
    app = AppSettings(target="shop.web:app")
    assert settings(app).target == "shop.web:app"
    assert settings(app, TenantSettings(target="shop.chat:app")).target == "shop.chat:app"


@pytest.mark.parametrize(
    ("word", "interface"), [("auto", None), ("asgi", "asgi"), ("asgi3", "asgi"), ("asgi2", "asgi2"), ("wsgi", "wsgi")]
)
def test_interfaces_go_by_the_names_of_uvicorn(
    word: Literal["auto", "asgi", "asgi3", "asgi2", "wsgi"], interface: str | None
) -> None:
    assert settings(AppSettings(interface=word)).interface == interface


def test_boot_settings_carry_everything_down() -> None:
    profile = ProfileSettings(
        trust="data-only", max_age=5, require_warm=True, restore_timeout=7, lru_cache=("a:b",), disable=("regex",)
    )
    app = AppSettings(target="a:b", app_dir="/app", factory=True, interface="wsgi", name="shop")
    made = boot_settings(settings(app, TenantSettings(profile="/p/x.jumpstart"), profile))
    assert isinstance(made, BootSettings)
    assert (made.target, made.app_dir, made.factory, made.interface, made.name) == ("a:b", "/app", True, "wsgi", "shop")
    assert (made.profile, made.trust, made.max_age_s, made.require_warm) == ("/p/x.jumpstart", "data-only", 5, True)
    assert (made.restore_timeout_s, made.warm.lru_cache, made.warm.disabled) == (7, ("a:b",), ("regex",))
    assert Path(made.warm_start).is_relative_to("/c") and Path(made.keys).is_relative_to("/k")


def test_a_cold_boot_looks_at_nothing_and_requires_nothing() -> None:
    profile = ProfileSettings(require_warm=True)
    made = boot_settings(settings(tenant=TenantSettings(profile="/p/x.jumpstart"), profile=profile), cold=True)
    assert (made.profile, made.warm_start, made.require_warm) == ("", "", False)


def test_no_warm_start_means_no_cache() -> None:
    assert boot_settings(settings(profile=ProfileSettings(warm_start=False))).warm_start == ""
