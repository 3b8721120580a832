"""
What ties the server to its host: the service manager, the pid file, and the log files of the app's user.

The supervisor says when something has happened; here is what the host is to know of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jumpstart.errors import ConfigError
from jumpstart_server.logfile import STREAM
from jumpstart_server.pidfile import PidFile
from jumpstart_server.privileges import Identity, give_file, identity_of
from jumpstart_server.settings import Settings
from jumpstart_server.systemd import Notifier


class Host:
    """
    For the thread of the supervisor's event loop. Nothing raises but what says so.

    Attributes:
        notifier: tells the service manager how we are; `Notifier.run` is to run for as long as the server does.
    """

    def __init__(self, settings: Iterable[Settings], environ: Mapping[str, str], pid: int) -> None:
        """
        Args:
            settings: of all tenants that are served.
            pid: of the supervisor.
        """
        self.notifier = Notifier(environ, pid)
        self._settings = list(settings)
        self._pid = pid
        server = self._settings[0].server
        self._pid_file = PidFile(server.pid) if server.pid else None
        self._identity: Identity | None = identity_of(server.user, server.group)

    def bound(self) -> None:
        """
        Call when all addresses are bound, before a process is told its role.

        Raises:
            ConfigError: the pid file names a living process, or a file cannot be made.
        """
        self._give_log_files()
        if self._pid_file is not None:
            self._pid_file.write(self._pid)

    def reopened(self) -> str | None:
        """Call when our own log files are opened anew, before the others are told; return what went wrong."""
        try:
            self._give_log_files()
        except ConfigError as error:
            return str(error)
        return None

    def ended(self) -> None:
        """Call at the very end, when all processes are gone."""
        if self._pid_file is not None:
            self._pid_file.remove()

    def _give_log_files(self) -> None:
        """The processes that run the app open them by their names, and may not make them in a folder of root's."""
        if self._identity is None:
            return
        for settings in self._settings:
            for option, path in (
                ("--error-logfile", settings.server.error_logfile),
                ("--access-logfile", settings.tenant.access_logfile),
            ):
                if path and path != STREAM:
                    try:
                        give_file(path, self._identity)
                    except ConfigError as error:
                        raise ConfigError(f"{option} {error}") from None
