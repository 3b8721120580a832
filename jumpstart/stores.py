"""
Where profiles are shipped to and fetched from: a folder, a bucket, or a web server that shows such a folder.

    APP/TENANT/BUILD/ID.jumpstart          a profile; BUILD is ``latest`` for those that were promoted
    APP/TENANT/BUILD/ID.votes/HOST.VERDICT what a consumer said of it, an empty object
    APP/TENANT/BUILD/ID.votes/HOST.trial   a consumer asked to try it before anybody was well with it
    index.json                             what there is, for readers that cannot list (HTTP)

A profile is never changed after it was published, so an object is there whole or not at all: a folder gives it its name
when it is on disk, a bucket takes it in one PUT. Whatever a store holds, nothing is used or counted before its
signature and hashes were checked; names that are not of the form above are not looked at.

A boot does not come here by itself, but through `fetching.py`. fsspec is imported here, for URLs other than folders and
HTTP, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote, unquote, urlsplit

import msgspec

from jumpstart import files
from jumpstart.archive import DEFAULT, MIB
from jumpstart.choice import Ballot, Votes
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.profile import AppInfo, Profile, Trust, Verify, parse_profile, read_bytes
from jumpstart.records import Reason
from jumpstart.trust import KeyRing

SUFFIX = ".jumpstart"
LATEST = "latest"
INDEX = "index.json"

MAX_OBJECTS = 20_000  # of a listing; the rest is not looked at
MAX_INDEX_BYTES = 8 * MIB
REQUEST_TIMEOUT_S = 30.0  # of a command; a boot has its own deadline
LOCK_TIMEOUT_S = 5.0
HALF_WRITTEN_AFTER = timedelta(hours=1)  # what is still not whole then never will be

Verdict = Literal["healthy", "crashed", "trial"]

_WORD = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,199}")
_ID = re.compile(r"[0-9a-f]{32}")
_VOTE = re.compile(r"([0-9a-f]{16})\.(healthy|crashed|trial)")
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


# -- names --


def encode_name(text: str) -> str:
    """
    Return *text* as one part of a path that every store takes: other characters become ``~`` and two hex digits.

    A long one is cut, and ends with a digest of all of it.
    """
    words = "".join(
        char if char in _PLAIN else "".join(f"~{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))
        for char in text
    )
    if words.startswith(".") or not words:
        words = "~2E" + words[1:] if words else "~"
    if len(words) > 160:
        words = f"{words[:120]}~~{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"
    return words


def decode_name(word: str) -> str:
    """The text of `encode_name`, for people; a long one stays cut."""
    if word == "~":
        return ""
    return unquote(re.sub(r"~([0-9A-F]{2})", r"%\1", word.replace("%", "%25")), errors="replace")


def build_of(app: AppInfo) -> str:
    """The build of an app: the operator's id for it, else the beginning of its sources' digest."""
    return app.build or app.sources.rpartition(":")[2][:16] or "unknown"


def encode_build(build: str) -> str:
    """As `encode_name`; a build that is called ``latest`` is not taken for `LATEST`."""
    word = encode_name(build)
    return "~6Catest" if word == LATEST else word


@dataclass(frozen=True, order=True)
class Place:
    """
    Where a profile is in a store.

    Attributes:
        app, tenant, build: as `encode_name` writes them; *build* may be `LATEST`.
    """

    app: str
    tenant: str
    build: str
    id: str

    @classmethod
    def of(cls, app: str, tenant: str, build: str, id: str) -> Place:
        """The place for names as people write them."""
        return cls(encode_name(app), encode_name(tenant), encode_build(build), id)

    @property
    def is_latest(self) -> bool:
        return self.build == LATEST

    @property
    def folder(self) -> str:
        return f"{self.app}/{self.tenant}/{self.build}"

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.id}{SUFFIX}"

    def vote_path(self, voter: str, verdict: Verdict) -> str:
        """Of the vote of a host; *voter* is its 16 hex digits."""
        return f"{self.folder}/{self.id}.votes/{voter}.{verdict}"


def parse_path(path: str) -> tuple[Place, str, str] | None:
    """Return place, voter and verdict (both empty for a profile) of an object of ours; None for any other name."""
    parts = path.split("/")
    if len(parts) not in (4, 5) or not all(_WORD.fullmatch(part) for part in parts):
        return None
    name, _, ending = parts[3].rpartition(".")
    if not _ID.fullmatch(name):
        return None
    place = Place(parts[0], parts[1], parts[2], name)
    if len(parts) == 4:
        return (place, "", "") if ending == SUFFIX[1:] else None
    vote = _VOTE.fullmatch(parts[4])
    return (place, vote[1], vote[2]) if vote is not None and ending == "votes" else None


def is_store(text: str) -> bool:
    """
    Whether what ``--profile`` names is a store, and not one file: a URL, a folder, or a path that is not there and has
    no ending.
    """
    if "://" in text:
        path = _path_of_file_url(text)
        return path is None or is_store(str(path))
    path = Path(text)
    if path.suffix == SUFFIX:
        return False
    try:
        return path.is_dir() or (not path.exists() and not path.suffix)
    except (OSError, ValueError):
        return False


def profile_file(text: str) -> Path:
    """The file that ``--profile`` names, where it is not a store."""
    return _path_of_file_url(text) or Path(text)


def _path_of_file_url(text: str) -> Path | None:
    if not text.startswith("file://"):
        return None
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{text!r}: a file URL has three slashes: file:///srv/profiles")
    return Path(unquote(parts.path))


# -- what holds the objects --


@dataclass(frozen=True)
class StoredObject:
    """A path below the store's root, with its size in bytes."""

    path: str
    size: int
    modified: datetime


class Backend(Protocol):
    """
    A kind of store. Every method raises ProfileRefusedError: `STORE_UNREACHABLE`, `ABSENT` (it has vanished),
    `UNREADABLE` (not allowed), `TOO_LARGE`; those that write raise ConfigError.
    """

    url: str

    def find(self, prefix: str) -> list[StoredObject]:
        """All objects below the folder *prefix* (everything, where it is empty)."""

    def read(self, path: str, limit: int) -> bytes:
        """The bytes of an object of at most *limit* bytes."""

    def create(self, path: str, data: bytes) -> None:
        """Write an object whole or not at all; one that is there is the same one."""

    def replace(self, path: str, data: bytes) -> None:
        """Write an object in the place of the one that may be there."""

    def remove(self, path: str) -> None:
        """Remove an object; one that is gone already is none the worse."""

    def tidy(self) -> None:
        """Remove what killed writers left behind."""


class FolderBackend:
    """A folder of this host, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def find(self, prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        begin = self.root / prefix

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        try:
            if not self.root.is_dir():
                raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"the store {self.root} is not a folder")
            for folder, folders, names in os.walk(begin, onerror=fail, followlinks=True):
                depth = len(Path(folder).relative_to(self.root).parts)
                folders[:] = sorted(each for each in folders if depth < 4 and not each.startswith("."))
                for name in sorted(names):
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        state = Path(folder, name).stat()
                        path = Path(folder, name).relative_to(self.root).as_posix()
                        found.append(StoredObject(path, state.st_size, _time(state.st_mtime)))
                if len(found) >= MAX_OBJECTS:
                    break
        except OSError as error:
            raise ProfileRefusedError(
                Reason.STORE_UNREACHABLE, f"cannot list the store {self.root}: {error}"
            ) from error
        return found

    def read(self, path: str, limit: int) -> bytes:
        return read_bytes(self.root / path, limit)

    def create(self, path: str, data: bytes) -> None:
        self._write(path, lambda: files.write_new(self.root / path, data))

    def replace(self, path: str, data: bytes) -> None:
        self._write(path, lambda: files.replace(self.root / path, data))

    def remove(self, path: str) -> None:
        target = self.root / path
        with self._writing(path):
            target.unlink(missing_ok=True)
        for folder in target.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except OSError:
                break  # others are in it

    def tidy(self) -> None:
        # glob passes over folders that vanish meanwhile; pathlib's does not before Python 3.13.
        left = (
            path
            for depth in ("*/*/*/", "*/*/*/*/")
            for path in glob.iglob(f"{depth}.jumpstart-*.tmp", root_dir=self.root)  # noqa: PTH207
        )
        for folder in {self.root, *(Path(self.root, path).parent for path in left)}:
            files.sweep(folder)

    def _write(self, path: str, write: Callable[[], object]) -> None:
        with self._writing(path):
            for attempt in range(10):
                try:
                    self._make_folder((self.root / path).parent)
                    write()
                    return
                except FileNotFoundError:
                    if attempt == 9:  # else somebody has removed the last one in this folder, and the folder with it
                        raise

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if folder.exists() and not folder.is_dir():
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder)) from None  # gone meanwhile

    @contextlib.contextmanager
    def _writing(self, path: str) -> Any:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write {path} in the store {self.root}: {error.strerror}; make room, or make it writable for "
                f"user id {os.geteuid()}"
            ) from error


class HttpBackend:
    """A web server that shows a store's folder. It cannot be listed: `INDEX` says what there is."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def find(self, prefix: str) -> list[StoredObject]:
        try:
            data = self.read(INDEX, MAX_INDEX_BYTES)
        except ProfileRefusedError as error:
            if error.reason is not Reason.ABSENT:
                raise
            detail = f"{self.url}/{INDEX} is not there: `jumpstart profile publish` writes it into the folder"
            raise ProfileRefusedError(Reason.STORE_UNREACHABLE, detail) from error
        return [each for each in parse_index(data) if not prefix or each.path.startswith(f"{prefix}/")]

    def read(self, path: str, limit: int) -> bytes:
        import httpx

        url = f"{self.url}/{quote(path, safe='/~')}"
        give_up = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            with httpx.stream("GET", url, timeout=REQUEST_TIMEOUT_S) as response:
                if response.status_code in (404, 410):
                    raise ProfileRefusedError(Reason.ABSENT, f"{url} is not there (any more)")
                if response.status_code in (401, 403):
                    raise ProfileRefusedError(Reason.UNREADABLE, f"{url}: status {response.status_code}")
                if response.status_code != 200:
                    raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{url}: status {response.status_code}")
                buffer = io.BytesIO()
                for chunk in response.iter_bytes():
                    buffer.write(chunk)
                    if buffer.tell() > limit:
                        raise ProfileRefusedError(Reason.TOO_LARGE, f"{url} has over {limit} bytes")
                    if time.monotonic() > give_up:
                        raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{url} took over {REQUEST_TIMEOUT_S:g} s")
                return buffer.getvalue()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{url}: {error or type(error).__name__}") from error

    def create(self, path: str, data: bytes) -> None:
        raise self._read_only()

    replace = create

    def remove(self, path: str) -> None:
        raise self._read_only()

    def tidy(self) -> None:
        """Nothing is written here."""

    def _read_only(self) -> ConfigError:
        return ConfigError(f"{self.url}: stores are read-only over HTTP; name the folder or bucket behind it")


class FsspecBackend:
    """Whatever fsspec has a driver for, S3 above all."""

    WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"})
    """Protocols where an object is there when all of it is; elsewhere it is written under another name and moved."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._protocol = url.partition("://")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._protocol in ("s3", "s3a"):
            options["config_kwargs"] = {
                "connect_timeout": 5,
                "read_timeout": REQUEST_TIMEOUT_S,
                "retries": {"max_attempts": 2},
            }
        if self._protocol == "memory":
            options = {}
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(self.url, **options)
        except ImportError as error:
            extra = "jumpstart-server[s3]" if self._protocol in ("s3", "s3a") else f"fsspec's driver for {url}"
            raise ConfigError(f"{url}: {error}; install {extra}") from error
        except Exception as error:  # drivers raise what they like
            raise ConfigError(f"{url}: {error}") from error
        self._root = str(self._root).rstrip("/")

    def find(self, prefix: str) -> list[StoredObject]:
        begin = f"{self._root}/{prefix}" if prefix else self._root
        try:
            found = self._fs.find(begin, detail=True)
        except FileNotFoundError as error:
            if self._protocol in self.WHOLE_OBJECTS:
                raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{self.url}: {words_of(error)}") from error
            return []
        except Exception as error:
            raise self._failed(error, begin) from error
        objects = []
        for path, info in list(found.items())[:MAX_OBJECTS]:
            modified = info.get("LastModified") or info.get("mtime") or info.get("created")
            if not isinstance(modified, datetime):
                modified = _time(modified if isinstance(modified, (int, float)) else 0)
            objects.append(StoredObject(path[len(self._root) + 1 :], int(info.get("size") or 0), _aware(modified)))
        return objects

    def read(self, path: str, limit: int) -> bytes:
        full = f"{self._root}/{path}"
        try:
            size = int(self._fs.info(full)["size"])
            if size > limit:
                raise ProfileRefusedError(Reason.TOO_LARGE, f"{path} has {size} bytes, {limit} are allowed")
            data: bytes = self._fs.cat_file(full) if size else b""
        except ProfileRefusedError:
            raise
        except Exception as error:
            raise self._failed(error, path) from error
        return data

    def create(self, path: str, data: bytes) -> None:
        self.replace(path, data)

    def replace(self, path: str, data: bytes) -> None:
        full = f"{self._root}/{path}"
        # In parts, S3 would keep those of a writer that was killed, unseen and paid for.
        in_one = {"chunksize": 2 * DEFAULT.file_bytes} if self._protocol in ("s3", "s3a") else {}
        try:
            if self._protocol in self.WHOLE_OBJECTS:
                self._fs.pipe_file(full, data, **in_one)
                return
            folder = full.rpartition("/")[0]
            self._fs.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{files.temporary_name()}"
            try:
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, full)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(temporary)
                raise
        except Exception as error:
            raise ConfigError(f"cannot write {path} in the store {self.url}: {words_of(error)}") from error

    def remove(self, path: str) -> None:
        try:
            self._fs.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            pass
        except Exception as error:
            raise ConfigError(f"cannot remove {path} in the store {self.url}: {words_of(error)}") from error

    def tidy(self) -> None:
        """Objects are whole; what drivers for other file systems leave has our name for it and is not looked at."""

    def _failed(self, error: Exception, path: str) -> ProfileRefusedError:
        if isinstance(error, FileNotFoundError):
            return ProfileRefusedError(Reason.ABSENT, f"{path} is not there (any more)")
        if isinstance(error, PermissionError):
            return ProfileRefusedError(Reason.UNREADABLE, f"{path} in {self.url}: {words_of(error)}")
        return ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{self.url}: {words_of(error)}")


def words_of(error: BaseException) -> str:
    """An exception of a driver, for a log line."""
    return f"{type(error).__name__}: {error}".rstrip(": ")[:500]


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _aware(moment: datetime) -> datetime:
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)


def open_backend(url: str) -> Backend:
    """
    Return what holds the store at *url*, a folder or a URL. Connects to nothing.

    Raises:
        ConfigError: there is no driver for it.
    """
    folder = _path_of_file_url(url)
    if folder is not None or "://" not in url:
        return FolderBackend(folder or Path(url))
    if url.startswith(("http://", "https://")):
        return HttpBackend(url)
    return FsspecBackend(url)


# -- the index --


class _Index(msgspec.Struct, frozen=True):
    format: int
    objects: list[tuple[str, int, datetime]]


def parse_index(data: bytes) -> list[StoredObject]:
    """Return what an `INDEX` lists; raises ProfileRefusedError (`STORE_UNREACHABLE`) for one that is not whole."""
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProfileRefusedError(Reason.STORE_UNREACHABLE, f"{INDEX} of the store is damaged: {error}") from error
    return [StoredObject(path, size, _aware(modified)) for path, size, modified in index.objects[:MAX_OBJECTS]]


# -- the store --


@dataclass(frozen=True)
class Entry:
    """A profile that a store lists; nothing says yet that it is one."""

    place: Place
    size: int
    modified: datetime


@dataclass(frozen=True)
class Listing:
    """
    What a store says it holds.

    Attributes:
        votes: by id, each host once, wherever the profile was when it was cast.
        ballots: by id, with the names of the hosts, and who asked to try it.
    """

    entries: list[Entry] = field(default_factory=list)
    votes: dict[str, Votes] = field(default_factory=dict)
    ballots: dict[str, Ballot] = field(default_factory=dict)
    vote_paths: dict[Place, list[str]] = field(default_factory=dict)


class Store:
    """The profiles behind a backend. Raises what `Backend` raises."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @property
    def url(self) -> str:
        return self.backend.url

    def listing(self, app: str | None = None, tenant: str | None = None) -> Listing:
        """What there is of an app, a tenant, or all of them."""
        prefix = encode_name(app) if app is not None else ""
        if app is not None and tenant is not None:
            prefix += f"/{encode_name(tenant)}"
        entries: list[Entry] = []
        voters: dict[str, dict[str, dict[str, float]]] = {}
        vote_paths: dict[Place, list[str]] = {}
        for each in self.backend.find(prefix):
            found = parse_path(each.path)
            if found is None or (tenant is not None and found[0].tenant != encode_name(tenant)):
                continue
            place, voter, verdict = found
            if verdict:
                cast = voters.setdefault(place.id, {}).setdefault(verdict, {})
                cast[voter] = min(cast.get(voter, math.inf), each.modified.timestamp())
                vote_paths.setdefault(place, []).append(each.path)
            else:
                entries.append(Entry(place, each.size, each.modified))
        ballots = {
            id: Ballot(frozenset(cast.get("healthy", ())), frozenset(cast.get("crashed", ())), cast.get("trial", {}))
            for id, cast in voters.items()
        }
        votes = {id: ballot.votes() for id, ballot in ballots.items()}
        return Listing(sorted(entries, key=lambda entry: entry.place), votes, ballots, vote_paths)

    def read(self, place: Place, parse: Callable[[bytes], Profile]) -> tuple[bytes, Profile]:
        """Return the bytes of a profile, and it, checked; raises ProfileRefusedError."""
        data = self.backend.read(place.path, DEFAULT.file_bytes)
        profile = parse(data)
        if profile.manifest.id != place.id:
            raise ProfileRefusedError(Reason.DAMAGED, f"{place.path} holds the profile {profile.manifest.id}")
        if encode_name(profile.manifest.tenant) != place.tenant:
            raise ProfileRefusedError(
                Reason.DAMAGED, f"{place.path} holds a profile of the tenant {profile.manifest.tenant!r}"
            )
        return data, profile

    def publish(self, place: Place, data: bytes) -> None:
        """Put a profile; it is seen whole or not at all. Then the index is written."""
        self.backend.tidy()
        self.backend.create(place.path, data)
        self.write_index()

    def vote(self, place: Place, voter: str, verdict: Verdict) -> None:
        """Say how a host has fared with a profile."""
        self.backend.create(place.vote_path(voter, verdict), b"")

    def promote(self, places: Iterable[Place], listing: Listing) -> list[Place]:
        """Make *places*, of one app and tenant, its ``latest``, in the place of what was there; return the new ones."""
        self.backend.tidy()
        wanted = [Place(each.app, each.tenant, LATEST, each.id) for each in places]
        for source, target in zip(places, wanted, strict=True):
            self.backend.create(target.path, self.backend.read(source.path, DEFAULT.file_bytes))
        for entry in listing.entries:  # afterwards, so that there is something at any time
            if entry.place.is_latest and entry.place not in wanted:
                self.remove(entry.place, listing, index=False)
        self.write_index()
        return wanted

    def remove(self, place: Place, listing: Listing, *, index: bool = True) -> None:
        """Remove a profile, and then its votes."""
        self.backend.remove(place.path)
        for path in listing.vote_paths.get(place, ()):
            self.backend.remove(path)
        if index:
            self.write_index()

    def prune(self, places: Iterable[Place], listing: Listing) -> None:
        """Remove *places*, the votes on profiles that are gone, and what killed writers left; then write the index."""
        for place in places:
            self.remove(place, listing, index=False)
        there = {entry.place for entry in listing.entries}
        for place, paths in listing.vote_paths.items():
            for path in paths if place not in there else ():
                self.backend.remove(path)
        self.backend.tidy()
        self.write_index()

    def write_index(self) -> None:
        """
        Write what there is for readers over HTTP.

        Written again while another publisher changes it: whoever writes last has seen everything.
        """
        seen: list[StoredObject] | None = None
        for _ in range(5):
            found = [each for each in self.backend.find("") if parse_path(each.path) is not None]
            if found == seen:
                return
            seen = found
            index = _Index(1, [(each.path, each.size, each.modified) for each in found])
            self.backend.replace(INDEX, msgspec.json.encode(index))


def reader(keys: Path, trust: Trust, max_age_s: float | None) -> Callable[[bytes], Profile]:
    """Return what checks the bytes of a profile, for this host and now."""
    verify: Verify = KeyRing(keys).verify
    max_age = None if max_age_s is None else timedelta(seconds=max_age_s)

    def parse(data: bytes) -> Profile:
        return parse_profile(data, trust=trust, verify=verify, now=datetime.now(UTC), max_age=max_age)

    return parse


def open_store(url: str) -> Store:
    """The store at *url*; raises ConfigError when there is no driver for it."""
    return Store(open_backend(url))


@dataclass(frozen=True)
class Dated:
    """A valid profile, as the rules of retention see it."""

    place: Place
    created: datetime


def choose_removals(valid: Sequence[Dated], keep: int, builds: int) -> list[Place]:
    """
    Choose what `prune` removes: of each app and tenant all but the newest *builds* builds, of each build (and of
    ``latest``) all but the newest *keep* profiles. Pure.

    ``latest`` is not counted as a build and never goes as a whole.
    """
    by_build: dict[tuple[str, str, str], list[Dated]] = {}
    for each in valid:
        by_build.setdefault((each.place.app, each.place.tenant, each.place.build), []).append(each)
    removed: list[Place] = []
    newest: dict[tuple[str, str], list[tuple[datetime, str]]] = {}
    for (app, tenant, build), found in by_build.items():
        found.sort(key=lambda each: (each.created, each.place.id), reverse=True)
        removed += [each.place for each in found[keep:]]
        if build != LATEST:
            newest.setdefault((app, tenant), []).append((found[0].created, build))
    for (app, tenant), dates in newest.items():
        for _, build in sorted(dates, reverse=True)[builds:]:
            removed += [each.place for each in by_build[app, tenant, build][:keep]]
    return sorted(removed)
