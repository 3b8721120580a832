"""Our loggers speak through one handler; the root logger is the app's. Files may be moved away under them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from logging.config import dictConfig
from pathlib import Path

import pytest

from jumpstart.errors import ConfigError
from jumpstart_server.logs import OURS, LogModuleError, keep_enabled, reopen_logs, set_up_logging
from jumpstart_server.settings import LogConfig

NAMES = (*OURS, "uvicorn")
ROOT_TO_FILE = """
[loggers]
keys=root
[handlers]
keys=file
[formatters]
keys=plain
[logger_root]
level=INFO
handlers=file
[handler_file]
class=FileHandler
args=({path!r},)
formatter=plain
[formatter_plain]
format=%(name)s:%(message)s
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {}
    for name in ("", *NAMES):
        logger = logging.getLogger(name)
        before[name] = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = False


def test_each_line_says_when_who_and_how_grave_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    set_up_logging("info")
    logging.getLogger("jumpstart_server.worker").info("worker=%d ready", 3)
    logging.getLogger("jumpstart.boot").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith("[INFO] worker=3 ready")
    assert line.startswith("20") and "] [" in line


def test_the_apps_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    set_up_logging("debug")
    assert (root.handlers, root.level) == before
    assert all(not logging.getLogger(name).propagate for name in NAMES)


@pytest.mark.parametrize(("level", "expected"), [("debug", logging.WARNING), ("critical", logging.CRITICAL)])
def test_uvicorn_is_heard_when_it_warns(level: str, expected: int) -> None:
    set_up_logging(level)
    assert logging.getLogger("uvicorn").level == expected
    assert logging.getLogger("jumpstart_warmup").level == logging.getLevelName(level.upper())


def test_lines_go_to_standard_error_as_it_is_now() -> None:
    set_up_logging("info")
    (handler,) = logging.getLogger("jumpstart").handlers
    assert isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr


# ---------------------------------------------------------------------- a file


def test_a_file_takes_each_record_by_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", file=str(tmp_path / "error.log"))
    written: list[bytes] = []
    real = os.write

    def write(number: int, data: bytes) -> int:
        written.append(data)
        return real(number, data)

    monkeypatch.setattr(os, "write", write)
    try:
        raise ValueError("meant")
    except ValueError:
        logging.getLogger("jumpstart.boot").exception("sürprise \udc80")
    monkeypatch.undo()
    (record,) = written
    assert record.endswith(b"ValueError: meant\n") and "sürprise \\udc80\nTraceback".encode() in record
    assert (tmp_path / "error.log").read_bytes() == record
    assert capsys.readouterr() == ("", "")


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "error.log"
    set_up_logging("info", file=str(path))
    logger = logging.getLogger("jumpstart.boot")
    logger.info("one")
    path.rename(tmp_path / "error.log.1")
    logger.info("two")
    reopen_logs()
    logger.info("three")
    assert path.read_text().endswith("three\n") and path.read_text().count("\n") == 1
    assert (tmp_path / "error.log.1").read_text().count("\n") == 2


def test_a_file_that_cannot_be_made_anew_is_used_on_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    set_up_logging("info", file=str(folder / "error.log"))
    folder.rename(tmp_path / "moved")
    reopen_logs()
    text = (tmp_path / "moved" / "error.log").read_text()
    assert f"[ERROR] the log file {folder}/error.log cannot be opened anew: No such file or directory" in text


def test_a_full_disk_is_no_reason_to_raise(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", file="/dev/full")
    logging.getLogger("jumpstart.boot").error("lost")
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        set_up_logging("info", file=str(tmp_path / "absent" / "error.log"))
    assert str(caught.value).startswith(f"--error-logfile {tmp_path}/absent/error.log: cannot be opened: No such file")


def test_it_survives_an_app_that_configures_logging(tmp_path: Path) -> None:
    """dictConfig closes every handler that there is, and switches off loggers that it was not told of."""
    set_up_logging("info", file=str(tmp_path / "error.log"))
    dictConfig({"version": 1})
    keep_enabled()
    logging.getLogger("jumpstart.boot").info("still here")
    assert "still here" in (tmp_path / "error.log").read_text()


def test_output_of_the_app_is_captured_and_follows_the_file(tmp_path: Path) -> None:
    source = """if True:
        import os, subprocess, sys
        from pathlib import Path
        from jumpstart_server.logs import reopen_logs, set_up_logging
        path = Path(sys.argv[1])
        set_up_logging("info", file=str(path), capture_output=True)
        print("printed", flush=True)
        subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
        path.rename(f"{path}.1")
        reopen_logs()
        print("later", flush=True)
    """
    path = tmp_path / "error.log"
    done = subprocess.run([sys.executable, "-c", source, str(path)], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "error.log.1").read_text() == "printed\nof a child\n"
    assert path.read_text() == "later\n"


# ---------------------------------------------------------------------- --log-config


def test_an_ini_file_says_where_lines_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.log"
    bystander = logging.getLogger("bystander")
    set_up_logging("info", config=LogConfig(path="log.ini", ini=ROOT_TO_FILE.format(path=str(path))))
    logging.getLogger("jumpstart.boot").info("one")
    logging.getLogger("uvicorn.error").info("not grave enough")
    assert path.read_text() == "jumpstart.boot:one\n"
    assert not bystander.disabled
    assert capsys.readouterr().err == ""


def test_handlers_of_python_are_reopened_too(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    set_up_logging("info", config=LogConfig(path="log.ini", ini=ROOT_TO_FILE.format(path=str(path))))
    logger = logging.getLogger("jumpstart.boot")
    logger.info("one")
    path.rename(tmp_path / "all.log.1")
    reopen_logs()
    logger.info("two")
    assert path.read_text() == "jumpstart.boot:two\n"
    assert (tmp_path / "all.log.1").read_text() == "jumpstart.boot:one\n"


def test_a_document_may_name_our_loggers_and_silences_none(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "version": 1,
        "disable_existing_loggers": True,
        "handlers": {"own": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
        "loggers": {"jumpstart_server": {"level": "ERROR", "handlers": ["own"], "propagate": False}},
    }
    root = logging.getLogger()
    root.handlers[:], before = [], root.handlers[:]  # pytest's
    set_up_logging("info", config=LogConfig(path="log.json", document=document))
    root.handlers[:] = before
    logging.getLogger("jumpstart_server.worker").info("not grave enough")
    logging.getLogger("jumpstart_server.worker").error("bad")
    logging.getLogger("jumpstart.boot").info("nobody was named for this")
    out, err = capsys.readouterr()
    assert out == "bad\n"
    assert err.endswith("[INFO] nobody was named for this\n")
    assert document["version"] == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            LogConfig(path="x.json", document={}),
            "--log-config x.json: ValueError: dictionary doesn't specify a version",
        ),
        (LogConfig(path="x.ini", ini="[loggers]\n"), "--log-config x.ini: KeyError: 'formatters'"),
        (
            LogConfig(path="x.json", document={"version": 1, "handlers": {"a": {"class": "logging.Nothing"}}}),
            "--log-config x.json: ValueError: Unable to configure handler 'a': Cannot resolve 'logging.Nothing'",
        ),
    ],
)
def test_a_configuration_that_is_wrong_is_named(config: LogConfig, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_up_logging("info", config=config)
    assert str(caught.value).startswith(said)


def test_a_module_that_is_not_there_is_an_error_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor does not import the app, whose classes it may name."""
    document = {"version": 1, "handlers": {"a": {"class": "shop.logs.Handler"}}, "root": {"handlers": ["a"]}}
    root = logging.getLogger()
    root.handlers[:], before = [], root.handlers[:]
    with pytest.raises(LogModuleError, match="No module named 'shop'"):
        set_up_logging("info", config=LogConfig(path="x.json", document=document))
    root.handlers[:] = before
    logging.getLogger("jumpstart_server.supervisor").info("heard all the same")
    assert "heard all the same" in capsys.readouterr().err
