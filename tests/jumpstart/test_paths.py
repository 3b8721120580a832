"""Where state lives, and that nobody else can write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jumpstart.errors import ProfileRefusedError
from jumpstart.paths import host_paths, private_folder
from jumpstart.records import Reason


def refusal(path: Path) -> ProfileRefusedError:
    with pytest.raises(ProfileRefusedError) as caught:
        private_folder(path)
    return caught.value


def test_jumpstart_home_holds_all_three_roots() -> None:
    paths = host_paths({"JUMPSTART_HOME": "/data/js", "XDG_CACHE_HOME": "/elsewhere"}, Path("/home/u"))
    assert (paths.cache, paths.state, paths.config) == (
        Path("/data/js/cache"),
        Path("/data/js/state"),
        Path("/data/js/config"),
    )
    assert paths.warm_start == Path("/data/js/cache/warm-start")
    assert paths.keys == Path("/data/js/config/keys")
    assert paths.run == Path("/data/js/state/run")
    assert paths.ledger == Path("/data/js/state/ledger")


def test_the_xdg_folders_are_used_otherwise_and_relative_ones_ignored() -> None:
    paths = host_paths({"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "relative", "XDG_CONFIG_HOME": ""}, Path("/home/u"))
    assert paths.cache == Path("/c/jumpstart")
    assert paths.state == Path("/home/u/.local/state/jumpstart")
    assert paths.config == Path("/home/u/.config/jumpstart")


def test_a_private_folder_and_its_missing_parents_are_made_for_this_user_only(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    assert private_folder(folder) == folder
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_to_is_refused_with_path_owner_and_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o770)
    error = refusal(folder)
    assert error.reason is Reason.UNSAFE_OWNER
    assert str(folder) in error.detail and f"user id {os.geteuid()}" in error.detail and "chmod" in error.detail


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder(tmp_path / "mine")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert refusal(folder).reason is Reason.UNSAFE_OWNER


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert refusal(tmp_path / "link").reason is Reason.UNSAFE_OWNER
    assert refusal(tmp_path / "dangling").reason is Reason.UNSAFE_OWNER


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file").reason is Reason.UNSAFE_OWNER
    assert refusal(tmp_path / "file" / "below").reason is Reason.UNREADABLE


def test_a_folder_that_cannot_be_made_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, mode: int = 0o777) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    error = refusal(tmp_path / "new")
    assert error.reason is Reason.UNREADABLE
    assert "Read-only file system" in error.detail and "JUMPSTART_HOME" in error.detail
