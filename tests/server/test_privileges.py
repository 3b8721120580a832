"""``--user`` and ``--group``: who is meant, what is given away, and that there is no way back."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.config import load_settings
from jumpstart_server.privileges import Identity, give_file, identity_of, unreachable

ROOT = Path(__file__).parents[2]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
NOBODY = pwd.getpwnam("nobody")
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "server", "warmup"))}


def test_nothing_asked_for_or_asked_for_what_we_are_changes_nothing() -> None:
    assert identity_of("", "") is None
    assert identity_of(str(os.geteuid()), str(os.getegid())) is None


@AS_ROOT
def test_names_and_numbers_are_understood() -> None:
    nobody = Identity(NOBODY.pw_uid, NOBODY.pw_gid, "nobody", NOBODY.pw_dir)
    assert identity_of("nobody", "") == identity_of(str(NOBODY.pw_uid), "") == nobody
    daemon = grp.getgrnam("daemon").gr_gid
    assert identity_of("nobody", "daemon") == Identity(NOBODY.pw_uid, daemon, "nobody", NOBODY.pw_dir)
    assert identity_of("", "daemon") == Identity(0, daemon)
    assert identity_of("54321", "54322") == Identity(54321, 54322)
    assert nobody.variables == {"HOME": NOBODY.pw_dir, "USER": "nobody", "LOGNAME": "nobody"}
    assert Identity(54321, 54322).variables == {}
    assert (str(nobody), str(Identity(54321, 1))) == ("nobody", "user id 54321")


@pytest.mark.parametrize(
    ("user", "group", "error"),
    [
        ("no-such-user", "", "--user no-such-user: there is no such user"),
        ("54321", "", "--user 54321: no user has this number; name its group too, with --group"),
        ("nobody", "no-such-group", "--group no-such-group: there is no such group"),
        ("²", "", "--user ²: there is no such user"),
    ],
)
def test_who_does_not_exist_is_an_error_before_anything_starts(
    tmp_path: Path, user: str, group: str, error: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"server.user": user, "server.group": group}, {}, cwd=tmp_path)
    assert str(caught.value) == error


@AS_ROOT
@pytest.mark.parametrize("identity", [Identity(NOBODY.pw_uid, NOBODY.pw_gid, "nobody"), Identity(54321, 54322)])
def test_there_is_no_way_back(identity: Identity) -> None:
    source = f"""
import os
from jumpstart_server.privileges import Identity, drop
drop(Identity({identity.uid}, {identity.gid}, {identity.user!r}))
for way in (lambda: os.seteuid(0), lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):
    try:
        way()
    except PermissionError:
        continue
    print("there is a way back")
print(*os.getresuid(), *os.getresgid(), 0 in os.getgroups())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=ENVIRON, timeout=60)
    assert done.stdout.split() == [*[str(identity.uid)] * 3, *[str(identity.gid)] * 3, "False"], done.stderr


@AS_ROOT
def test_files_are_made_and_given_but_never_through_a_link(tmp_path: Path) -> None:
    nobody = Identity(NOBODY.pw_uid, NOBODY.pw_gid)
    made, precious = tmp_path / "made.log", tmp_path / "precious"
    give_file(str(made), nobody)
    assert (made.stat().st_uid, made.stat().st_gid, made.stat().st_mode & 0o777) == (nobody.uid, nobody.gid, 0o640)
    made.write_text("a line\n")
    give_file(str(made), nobody)
    assert made.read_text() == "a line\n"

    precious.write_text("root's")
    soft, hard, pipe = tmp_path / "soft", tmp_path / "hard", tmp_path / "pipe"
    soft.symlink_to(precious)
    hard.hardlink_to(precious)
    os.mkfifo(pipe)
    strangers = tmp_path / "strangers"
    strangers.touch()
    os.chown(strangers, 54321, 54321)
    for path in (soft, hard, pipe, strangers):
        give_file(str(path), nobody)
        assert path.stat().st_uid != nobody.uid
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/no/x.log: cannot be made: No such file"):
        give_file(f"{tmp_path}/no/x.log", nobody)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    identity = Identity(1, 1, "www")
    assert unreachable({"--app-dir": str(tmp_path), "--warmup": ""}, identity) is None
    problem = unreachable({"--app-dir": str(tmp_path), "--warmup": f"{tmp_path}/no"}, identity)
    assert (
        problem == f"--warmup {tmp_path}/no: www may not read it; let that user or its group in, also into its folders"
    )
