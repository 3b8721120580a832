"""
Logging of the server's own processes: one handler on our loggers, the root logger left to the app.

With ``--log-config`` that file says where lines go: our loggers hand theirs up to the root logger, and only what would
then be heard by nobody keeps our handler.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from pathlib import Path
from typing import Any

from jumpstart.errors import ConfigError
from jumpstart_server.logfile import STDERR, STDOUT, STREAM, LogFile, cannot_open, open_files
from jumpstart_server.settings import LogConfig

logger = logging.getLogger(__name__)

FORMAT = "%(asctime)s [%(process)d] [%(levelname)s] "  # the tenant and the message follow
OURS = ("jumpstart", "jumpstart_warmup", "jumpstart_server")
_HEARD = (*OURS, "uvicorn")  # of uvicorn only what is grave


class LogModuleError(ConfigError):
    """``--log-config`` names a module that cannot be imported in this process."""


_captured: list[LogFile] = []  # the error log that standard output and error lead to


class LogFileHandler(logging.Handler):
    """Writes each record by one call of the system, a traceback too. A record that cannot be written is lost."""

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
            self.file.write(line.encode("utf-8", "backslashreplace"))
        except OSError:
            pass  # a full disk: there is no better place to say it, and no request is to suffer
        except Exception:
            self.handleError(record)

    # close() leaves the file open: an app's logging.config.dictConfig closes all handlers, those that stay in use too.


def keep_enabled() -> None:
    """
    Undo what `logging.config.dictConfig` does to loggers that it was not told of: by default it switches them off.

    Called after the app's code has run.
    """
    for name, found in logging.root.manager.loggerDict.items():
        if isinstance(found, logging.Logger) and name.partition(".")[0] in _HEARD:
            found.disabled = False


def set_up_logging(
    level: str,
    *,
    file: str = STREAM,
    config: LogConfig | None = None,
    capture_output: bool = False,
    tenant: str = "",
) -> None:
    """
    Send our loggers, and uvicorn's warnings, to *file*, or where *config* says.

    Called once in each process that we start.

    Args:
        file: ``-`` is standard error.
        config: applied after ours is set up. Modules that it names must be importable.
        capture_output: let standard output and error lead to *file* too.
        tenant: named in each line of ours; "" for none. With *config* the formats are the file's.

    Raises:
        ConfigError: the file cannot be opened, or *config* is wrong. Modules that it names and that are not there are
            a `LogModuleError`.
    """
    handler = _handler(file, capture_output)
    label = f"tenant={tenant} ".replace("%", "%%") if tenant else ""
    handler.setFormatter(logging.Formatter(f"{FORMAT}{label}%(message)s", "%Y-%m-%d %H:%M:%S %z"))
    grave = max(logging.WARNING, logging.getLevelName(level.upper()))
    for name in _HEARD:
        found = logging.getLogger(name)
        found.handlers[:] = [] if config else [handler]
        found.setLevel(level.upper() if name in OURS else grave)
        found.propagate = config is not None
    if config is None:
        return
    try:
        _apply(config)
    finally:
        keep_enabled()
        for name in _HEARD:
            found = logging.getLogger(name)
            if not found.hasHandlers():
                found.handlers[:] = [handler]
                found.propagate = False


def _handler(file: str, capture_output: bool) -> logging.Handler:
    if file == STREAM:
        return logging.StreamHandler(sys.stderr)
    try:
        log_file = LogFile(file, STDERR)
    except (OSError, ValueError) as error:
        raise ConfigError(cannot_open("--error-logfile", file, error)) from None
    if capture_output:
        _captured[:] = [log_file]
        _capture()
    return LogFileHandler(log_file)


def _capture() -> None:
    for file in _captured:
        file.onto(STDOUT, STDERR)


def _apply(config: LogConfig) -> None:
    import configparser  # these cost as much as the rest of this file, and few need them
    import logging.config

    try:
        if config.ini:
            parser = configparser.ConfigParser()
            parser.read_file(io.StringIO(config.ini))
            logging.config.fileConfig(parser, disable_existing_loggers=False)
        else:
            logging.config.dictConfig(copy.deepcopy(config.document))  # which it changes
    except Exception as error:  # also what the classes raise that it names
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ImportError):
            cause = cause.__cause__ or cause.__context__
        kind = ConfigError if cause is None else LogModuleError
        because = f": {error.__cause__}" if error.__cause__ is not None else ""
        text = f"--log-config {config.path}: {type(error).__name__}: {error}{because}"
        raise kind(" ".join(text.split())) from error


# ---------------------------------------------------------------------- files that are moved away


def reopen_logs() -> None:
    """
    Open every log file of this process anew: ours, access logs too, and those of logging's own file handlers.

    One that cannot be opened is used on as it was, and that is logged. Never raises; may be called by a signal handler.
    """
    for file in open_files():
        try:
            file.reopen()
        except OSError as error:
            logger.error("the log file %s cannot be opened anew: %s; the old one is used on", file.path, error.strerror)
    _capture()
    for handler in _file_handlers():
        try:
            _reopen_handler(handler)
        except Exception as error:
            logger.error("the log file %s cannot be opened anew: %s", handler.baseFilename, error)


def _file_handlers() -> list[logging.FileHandler]:
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values())]
    handlers = {handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers}
    return [each for each in handlers if isinstance(each, logging.FileHandler)]


def _reopen_handler(handler: logging.FileHandler) -> None:
    # What truncates (mode w) is not for several processes, and is left alone; without a stream it opens when it writes.
    if not handler.mode.startswith("a") or handler.stream is None:
        return
    path = Path(handler.baseFilename)
    fresh: Any = path.open(handler.mode, encoding=handler.encoding, errors=handler.errors)
    old = handler.setStream(fresh)
    if old is not None:
        old.close()
