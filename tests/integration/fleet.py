"""
A fleet on one machine: three seeders that publish into one store, and many consumers that boot from it at once.

One seeder is good. One is bad: its profile is proven where it was made and kills the mold of everybody else. One is
drained: hardly any traffic comes to it. Each consumer is a host of its own, with its own ledger and its own vote.

    scripts/fleet --consumers 30 --store folder s3      # prints the figures; some minutes
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from jumpstart.trust import KeyRing
from tests.integration.server import LISTENING, Server, connects, free_port, run_command, wait_until, write_app

TARGET = "js_fleet_app:app"
BUILD = ("--build-id", "v1")
ENOUGH = 12  # real requests, after which a seeder makes a profile
APP = """
def app(environ, start_response):
    import js_fleet_lazy
    if environ["PATH_INFO"] == "/bad":
        import js_fleet_bad
    start_response("200 OK", [("Content-Length", "4")])
    return [b"done"]
"""
LAZY = "import decimal, xml.dom.minidom, email.mime.multipart\n"
BAD = """
import os, signal

if "SEEDING" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
"""
FAILED = "booting warm failed"


@dataclass
class Wave:
    """
    What became of consumers that booted at once.

    Attributes:
        ready_s: of each, from the start of the first to when it listened.
        tried_bad: how many had a boot that the bad profile killed, and how many such boots there were.
        sources: profile (the first digits) or reason → how many consumers.
    """

    ready_s: list[float] = field(default_factory=list)
    tried_bad: int = 0
    bad_boots: int = 0
    served: int = 0
    sources: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        times = sorted(self.ready_s)
        sources = ", ".join(f"{name}: {count}" for name, count in sorted(self.sources.items()))
        return (
            f"{self.served} of {len(times)} serve · {self.tried_bad} tried the bad one ({self.bad_boots} boots) · "
            f"ready after {times[0]:.1f} s the first, {times[len(times) // 2]:.1f} s the median, "
            f"{times[-1]:.1f} s the last · booted from {sources}"
        )


class Fleet:
    """The app, the store and the hosts, below *root*."""

    def __init__(self, root: Path, store: str, env: dict[str, str] | None = None) -> None:
        self.root = root
        self.store = store
        self.env = env or {}
        self.app_dir = write_app(root / "app", "js_fleet_app", APP)
        write_app(self.app_dir, "js_fleet_lazy", LAZY)
        write_app(self.app_dir, "js_fleet_bad", BAD)
        self.good = self.bad = ""
        self._numbers = itertools.count(1)
        self.seeders: list[Path] = []

    def server(self, home: Path, *options: str, **env: str) -> Server:
        words = ("-w", "1", "--no-warm-start", *BUILD, *options)
        log = self.root / f"stderr-{next(self._numbers)}.log"
        both = {**self.env, **env}
        return Server(TARGET, *words, app_dir=self.app_dir, home=home, log=log, env=both, wait=False)

    # -- seeders --

    def seed(self, name: str, *paths: str, asks: bool = True, **env: str) -> str:
        """
        Run a seeder with real requests for *paths*; return the id of what it published, or "" where it was drained.

        Args:
            asks: have a drained one captured and proven by command as well.
        """
        home = self.root / f"seeder-{name}"
        self.seeders.append(home)
        options = ("--seed", "--seed-requests", str(ENOUGH), "--seed-after", "0", "--prove-requests", str(ENOUGH))
        with self.server(home, *options, "--publish", self.store, **env) as server:
            server.wait_ready()
            for path in paths:
                assert server.get(path).status_code == 200
            if len(paths) < ENOUGH:
                wait_until(lambda: server.status(len(paths))["uptime_s"] > 2, why="it has looked a few times")
                assert server.status()["seeding"]["last"] == ""
                if not asks:
                    return ""
                file = self.root / f"{name}.jumpstart"
                words = ("--prove", "--app-dir", str(self.app_dir), "--prove-requests", str(ENOUGH))
                asked = run_command("profile", "capture", "-o", str(file), *words, home=home, env=env)
                assert asked.returncode == 1 and "drained" in asked.stderr and not file.exists(), asked.stderr
                return ""
            seeding = wait_until(lambda: (s := server.status()["seeding"])["last"] and s, 120, "a profile is seeded")
        assert seeding["last"] == "published", seeding
        id: str = Path(seeding["place"]).stem
        return id

    def build(self, name: str, *paths: str, **env: str) -> str:
        """A profile that is built off line and published as it is, which takes a tenth of the time."""
        home = self.root / f"seeder-{name}"
        home.mkdir()
        self.seeders.append(home)
        file, requests = self.root / f"{name}.jumpstart", self.root / f"{name}.toml"
        requests.write_text("".join(f'[[request]]\npath = "{path}"\n' for path in paths))
        app = (TARGET, "--app-dir", str(self.app_dir), "--requests", str(requests), *BUILD)
        for words in (("build", *app, "-o", str(file)), ("profile", "publish", str(file), self.store)):
            done = run_command(*words, home=home, env={**self.env, **env})
            assert done.returncode == 0, done.stderr
        return done.stdout.partition(".jumpstart")[0].rpartition("/")[2]

    def seed_all(self) -> None:
        """The good, the bad and the drained; also without seeding, the drained one's capture is not proven."""
        self.good = self.seed("good", *["/", "/about"] * (ENOUGH // 2))
        self.bad = self.seed("bad", *["/", "/bad"] * (ENOUGH // 2), SEEDING="1")
        assert self.seed("drained", "/", "/about") == ""
        assert set(self.votes()) == {self.good, self.bad}, "the drained one is not in the store"

    def votes(self) -> dict[str, tuple[int, int]]:
        """Of each profile in the store, how many hosts are well with it, and how many crashed."""
        done = run_command("profile", "list", self.store, home=self.seeders[0], env=self.env)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"/(\w{32})\.jumpstart: .* (\d+) healthy, (\d+) crashed", done.stdout)
        return {id: (int(healthy), int(crashed)) for id, healthy, crashed in found}

    # -- consumers --

    def consume(self, count: int, *options: str, until: float = 240, votes: bool = True) -> Wave:
        """Have *count* new hosts boot from the store at once, each answer a request, and stay until all have voted."""
        wave = Wave()
        before = sum(healthy for healthy, _ in self.votes().values())
        with contextlib.ExitStack() as stack:
            consumers = [self._consumer(*options) for _ in range(count)]
            began = time.monotonic()
            for each in consumers:
                stack.enter_context(each)
            waiting = list(consumers)

            def all_listen() -> bool:
                for each in list(waiting):
                    if LISTENING.search(each.stderr) or each.process.poll() is not None:
                        wave.ready_s.append(time.monotonic() - began)
                        waiting.remove(each)
                return not waiting

            wait_until(all_listen, until, "all consumers are ready")
            for each in consumers:
                each.wait_ready()
                wave.served += each.get("/").text == "done"
                boots = each.stderr.count(FAILED)
                wave.bad_boots += boots
                wave.tried_bad += boots > 0
                status = each.status()
                named = [source.split()[1] for source in status["sources"]]
                wave.sources.update(named or sorted({refusal["reason"] for refusal in status["refusals"]}))
            if not votes:
                return wave
            warm = sum(len(name) == 12 for name in wave.sources.elements())

            def all_have_voted() -> bool:
                return all(not each.status()["boot_ledger"]["loading"] for each in consumers)

            wait_until(all_have_voted, 60, "all are well, which takes them ten seconds")
            # Each votes in a process of its own that has ten seconds, which may not do for thirty of them on two cores.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: sum(healthy for healthy, _ in self.votes().values()) >= before + warm, 30)
        return wave

    def _consumer(self, *options: str) -> Server:
        home = self.root / f"host-{next(self._numbers)}"
        home.mkdir()
        for seeder in self.seeders:
            ring = KeyRing(home / "config" / "keys")
            ring.trust(KeyRing(seeder / "config" / "keys").public_pem(), seeder.name)
        return self.server(home, "--profile", self.store, *options)


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server that speaks S3, in a process of its own, with an empty bucket ``fleet``; as environment variables."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "s3.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: connects(port) or process.poll() is not None, 60)
            assert process.poll() is None, (folder / "s3.log").read_text()
            url = f"http://127.0.0.1:{port}"
            assert httpx.put(f"{url}/fleet", timeout=30).status_code == 200
            keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
            yield {"AWS_ENDPOINT_URL": url, **keys}
        finally:
            process.send_signal(signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="A bad and a drained seeder, and consumers that boot all at once.")
    parser.add_argument("--consumers", type=int, default=30, metavar="N", help="that boot at once (%(default)s)")
    parser.add_argument("--later", type=int, default=10, metavar="N", help="that boot afterwards (%(default)s)")
    parser.add_argument("--store", nargs="+", choices=("folder", "s3"), default=("folder", "s3"))
    options = parser.parse_args()
    for kind in options.store:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            root = Path(name)
            (root / "store").mkdir()
            env = stack.enter_context(s3_server(root)) if kind == "s3" else {}
            fleet = Fleet(root, "s3://fleet/profiles" if kind == "s3" else str(root / "store"), env)
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
                fleet.seed_all()
                # All of them share this machine: what a store takes here is the machine's, not the store's.
                patience = ("--profile-fetch-timeout", "180", "--startup-timeout", "240")
                waves = [fleet.consume(options.consumers, *patience), fleet.consume(options.later, *patience)]
                votes = fleet.votes()
            print(f"{kind}: good {fleet.good[:12]}, bad {fleet.bad[:12]}; the drained seeder published nothing")
            for title, wave in zip(("at once", "later"), waves):
                print(f"{kind}, {title}: {wave}")
            print(f"{kind}: votes (healthy, crashed): good {votes[fleet.good]}, bad {votes[fleet.bad]}", flush=True)


if __name__ == "__main__":
    main()
