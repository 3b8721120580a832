"""The file of ``--pid``: one living owner, whole or not there, and gone with its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.pidfile import PidFile


@pytest.fixture
def dead() -> int:
    """A pid that nobody has: of a child that was collected."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    return child.pid


def test_it_is_written_whole_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.pid"
    file = PidFile(str(path))
    file.write(os.getpid())
    assert path.read_text() == f"{os.getpid()}\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["x.pid"], "nothing of a temporary kind is left"
    file.write(os.getpid())
    file.remove()
    assert not path.exists()
    file.remove()


def test_one_of_a_dead_process_and_an_empty_one_are_replaced(tmp_path: Path, dead: int) -> None:
    path = tmp_path / "x.pid"
    for text in (f"{dead}\n", ""):
        path.write_text(text)
        PidFile(str(path)).write(os.getpid())
        assert path.read_text() == f"{os.getpid()}\n"


def test_one_of_a_living_process_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "x.pid"
    path.write_text(f"{os.getppid()}\n")
    file = PidFile(str(path))
    with pytest.raises(ConfigError, match=rf"^--pid {path}: process {os.getppid()} is running; stop it"):
        file.write(os.getpid())
    file.remove()
    assert path.read_text() == f"{os.getppid()}\n"


def test_what_another_has_put_there_meanwhile_stays(tmp_path: Path, dead: int) -> None:
    path = tmp_path / "x.pid"
    file = PidFile(str(path))
    file.write(os.getpid())
    path.write_text(f"{dead}\n")
    file.remove()
    assert path.read_text() == f"{dead}\n"


@pytest.mark.parametrize("text", ["precious", "-1", "0", "1 2", "9" * 40])
def test_what_is_no_pid_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.pid"
    path.write_text(text)
    with pytest.raises(ConfigError, match="something that is not a pid"):
        PidFile(str(path)).write(os.getpid())
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--pid {tmp_path}/no/x.pid: cannot be written: No such file"):
        PidFile(f"{tmp_path}/no/x.pid").write(os.getpid())
    with pytest.raises(ConfigError, match="something that is not a file lies there"):
        PidFile(str(tmp_path)).write(os.getpid())
