"""
Who may produce profiles for this host: an Ed25519 key of its own, and the public keys that the operator trusts.

The folder of a key ring holds ``own.pem`` (PKCS8, mode 0600), ``trusted/NAME.pub`` (SubjectPublicKeyInfo, PEM), and
``revoked/ID.pub``, which wins: a revoked key stays so when somebody puts it among the trusted ones again.
A key's id is the first 16 hex digits of the SHA-256 of its 32 raw public bytes. `DOMAIN` is put before every message,
so that a signature over a manifest can never be taken for one over something else.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jumpstart import files
from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.paths import OTHERS_MAY_WRITE, private_folder
from jumpstart.records import Reason

if TYPE_CHECKING:
    # Importing cryptography costs tens of milliseconds; a boot without a profile does not need it.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

logger = logging.getLogger(__name__)

DOMAIN = b"jumpstart-profile-v1\0"
ALGORITHM = "ed25519"
MAX_KEY_BYTES = 16 * 1024  # an Ed25519 PEM file has some 120 bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Signature(msgspec.Struct, frozen=True):
    """
    The content of ``manifest.sig``.

    Attributes:
        algorithm: ``ed25519``.
        key: id of the key.
        signature: base64 of the 64 bytes.
    """

    algorithm: str
    key: str
    signature: str


@dataclass(frozen=True)
class TrustedKey:
    """
    A public key that this host accepts profiles from.

    Attributes:
        public: its 32 raw bytes.
        own: this host signs with it.
    """

    id: str
    name: str
    public: bytes
    own: bool = False


def key_id(public: bytes) -> str:
    """Return the id of the key with these raw public bytes."""
    return hashlib.sha256(public).hexdigest()[:16]


class KeyRing:
    """
    The keys in *folder*, which need not exist. Reads the files at each call and holds nothing; any thread may use it.

    Looking (`trusted`, `list`, `verify`) writes nothing, so that keys may come from a read-only volume.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = folder / "own.pem"
        self._trusted = folder / "trusted"
        self._revoked = folder / "revoked"

    def own_key(self) -> Ed25519PrivateKey:
        """
        Return this host's private key, made on first use. Processes that start at once agree on one.

        Raises:
            ConfigError: the key cannot be made, is damaged, or others may read it.
        """
        if not self._own.exists():
            self._make_own(replace=False)
        return self._load_own()

    def public_pem(self) -> str:
        """Return this host's public key as PEM text for other hosts to trust; makes the key on first use."""
        return _public_pem(_raw(self.own_key().public_key()))

    def new(self) -> TrustedKey:
        """
        Give this host a new key and return it; profiles signed with the old one stay trusted.

        An old key that is damaged or that others could read is replaced too, and not trusted any more.

        Raises:
            ConfigError: a file cannot be written. The old key is then still in place.
        """
        if self._own.exists():
            try:
                old = _raw(self._load_own().public_key())
            except ConfigError as error:
                logger.warning("the old key is not trusted any more: %s", error)
            else:
                self._write_public(f"retired-{key_id(old)}", old)
            self._make_own(replace=True)
        else:
            self._make_own(replace=False)
        public = _raw(self._load_own().public_key())
        return TrustedKey(key_id(public), "own", public, own=True)

    def trust(self, path_or_pem: Path | str, name: str) -> TrustedKey:
        """
        Trust a public key, given as a PEM file or as PEM text, under *name*.

        Raises:
            ConfigError: *name* is odd or names another key; there is no Ed25519 public key; a file cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"key name {name!r}: use up to 64 letters, digits, dots, hyphens and underscores")
        if isinstance(path_or_pem, str) and path_or_pem.lstrip().startswith("-----BEGIN"):
            source, pem = "the given text", path_or_pem.encode()
        else:
            source = str(path_or_pem)
            try:
                pem = _read_small(Path(path_or_pem))
            except OSError as error:
                raise ConfigError(f"cannot read key file {source}: {error.strerror}") from error
        if b"PRIVATE KEY" in pem:
            raise ConfigError(f"{source} holds a private key; give the public one, and keep the private one at home")
        try:
            public = _load_public(pem)
        except ValueError as error:
            raise ConfigError(f"{source} is not an Ed25519 public key in PEM form: {error}") from error
        if key_id(public) in self._revoked_ids():
            place = self._revoked / f"{key_id(public)}.pub"
            raise ConfigError(f"key {key_id(public)} was revoked here; if it is to be trusted again, remove {place}")
        self._write_public(name, public)
        return TrustedKey(key_id(public), name, public)

    def revoke(self, key: str) -> TrustedKey:
        """
        Stop trusting the key with this id for good, and return it. Whoever verifies after this does not trust it.

        Raises:
            ConfigError: it is not trusted, is the one this host signs with, or a file cannot be written.
        """
        known = self.trusted().get(key)
        if known is None:
            raise ConfigError(f"key {key} is not trusted here; trusted: {', '.join(sorted(self.trusted())) or 'none'}")
        if known.own:
            raise ConfigError(f"key {key} is the one this host signs with; make a new one first (jumpstart keys new)")
        self._publish(self._revoked / f"{key}.pub", _public_pem(known.public).encode(), mode=0o644, replace=True)
        for path in self._public_files():
            found = self._read_public(path)
            if found is not None and found.id == key:
                try:
                    path.unlink(missing_ok=True)
                    files.sync_folder(path.parent)
                except OSError as error:  # a read-only volume, say; it is revoked all the same
                    logger.warning("key file %s of a revoked key is still there: %s", path, error.strerror)
        return known

    def _revoked_ids(self) -> frozenset[str]:
        """
        Raises:
            ConfigError: they cannot be read, so that nobody can tell who is trusted.
        """
        try:
            return frozenset(path.stem for path in self._revoked.iterdir() if path.suffix == ".pub")
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise ConfigError(f"cannot read the revoked keys in {self._revoked}: {error.strerror}") from error

    def trusted(self) -> dict[str, TrustedKey]:
        """
        Return all trusted keys by id, this host's own among them if it has one.

        A damaged or unsafe file is left out with a warning that names it; all are, when those that were revoked cannot
        be read.
        """
        try:
            revoked = self._revoked_ids()
        except ConfigError as error:
            logger.warning("no key is trusted: %s", error)
            return {}
        keys = {}
        for path in self._public_files():
            found = self._read_public(path)
            if found is not None:
                keys[found.id] = found
        if self._own.exists():
            try:
                public = _raw(self._load_own().public_key())
            except ConfigError as error:
                logger.warning("own key is not trusted: %s", error)
            else:
                keys[key_id(public)] = TrustedKey(key_id(public), "own", public, own=True)
        return {key: found for key, found in keys.items() if key not in revoked}

    def sign(self, message: bytes) -> Signature:
        """Sign with this host's own key, made on first use; raises ConfigError as `own_key` does."""
        private = self.own_key()
        signature = private.sign(DOMAIN + message)
        return Signature(ALGORITHM, key_id(_raw(private.public_key())), base64.b64encode(signature).decode())

    def verify(self, message: bytes, signature: Signature) -> None:
        """
        Return if a trusted key has signed *message*.

        Raises:
            ProfileRefusedError: `Reason.UNKNOWN_KEY`, `Reason.REVOKED_KEY`, `Reason.BAD_SIGNATURE`, or
                `Reason.UNREADABLE` when it cannot be told whose keys were revoked.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if signature.algorithm != ALGORITHM:
            raise ProfileRefusedError(Reason.BAD_SIGNATURE, f"algorithm {signature.algorithm!r} is not {ALGORITHM}")
        try:
            is_revoked = signature.key in self._revoked_ids()
        except ConfigError as error:
            raise ProfileRefusedError(Reason.UNREADABLE, str(error)) from error
        if is_revoked:
            raise ProfileRefusedError(Reason.REVOKED_KEY, f"signed by key {signature.key!r}, which was revoked here")
        key = self.trusted().get(signature.key)
        if key is None:
            raise ProfileRefusedError(
                Reason.UNKNOWN_KEY,
                f"signed by key {signature.key!r}, which is not trusted here; if it should be, run "
                "`jumpstart keys show > FILE` where the profile was made and `jumpstart keys trust FILE` here",
            )
        try:
            raw = base64.b64decode(signature.signature, validate=True)
            Ed25519PublicKey.from_public_bytes(key.public).verify(raw, DOMAIN + message)
        except (InvalidSignature, binascii.Error, ValueError) as error:
            raise ProfileRefusedError(
                Reason.BAD_SIGNATURE, f"the signature of key {key.id} ({key.name}) does not fit the manifest"
            ) from error

    # -- files --

    def _make_own(self, *, replace: bool) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._publish(self._own, pem, mode=0o600, replace=replace)

    def _load_own(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        path = self._own
        try:
            with _open_regular(path) as descriptor:
                found = os.fstat(descriptor)
                if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise ConfigError(
                        f"private key {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}): "
                        "chmod it to 0600, or, if they may have read it, make a new one (jumpstart keys new)"
                    )
                if found.st_uid not in (0, os.geteuid()):
                    raise ConfigError(
                        f"private key {path} belongs to user id {found.st_uid}, this process runs as {os.geteuid()}"
                    )
                pem = os.read(descriptor, MAX_KEY_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read private key {path}: {error.strerror}") from error
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (
            Exception
        ) as error:  # the library documents ValueError, TypeError and UnsupportedAlgorithm, and adds to them
            raise ConfigError(f"private key {path} is damaged: move it away, and a new one is made") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"private key {path} is not an Ed25519 key: move it away, and a new one is made")
        return key

    def _write_public(self, name: str, public: bytes) -> None:
        path = self._trusted / f"{name}.pub"
        if path.exists():
            known = self._read_public(path)
            if known is None or known.id != key_id(public):
                raise ConfigError(f"{path} exists and holds another key: choose another name, or revoke that one")
            return
        self._publish(path, _public_pem(public).encode(), mode=0o644, replace=False)

    def _publish(self, path: Path, data: bytes, *, mode: int, replace: bool) -> None:
        """Write a file whole or not at all; without *replace* the first of several writers wins."""
        try:
            private_folder(path.parent)
        except ProfileRefusedError as error:
            raise ConfigError(f"cannot store keys: {error.detail}") from error
        try:
            files.sweep(path.parent)
            if replace:
                files.replace(path, data, mode)
            else:
                files.write_new(path, data, mode)
        except OSError as error:
            raise ConfigError(f"cannot write key file {path}: {error.strerror}") from error

    def _public_files(self) -> Sequence[Path]:
        try:
            problem = _unsafe(self._trusted)
            if problem is None:
                return sorted(path for path in self._trusted.iterdir() if path.suffix == ".pub")
        except FileNotFoundError:
            return ()
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        logger.warning("trusted keys are left out: %s %s", self._trusted, problem)
        return ()

    def _read_public(self, path: Path) -> TrustedKey | None:
        try:
            problem = _unsafe(path)
            if problem is None:
                public = _load_public(_read_small(path))
                return TrustedKey(key_id(public), path.stem, public)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except ValueError as error:
            problem = f"is not an Ed25519 public key: {error}"
        logger.warning("trusted key is left out: %s %s", path, problem)
        return None

    def revoked(self) -> Sequence[str]:
        """Return the ids of the revoked keys; raises ConfigError when they cannot be read."""
        return sorted(self._revoked_ids())

    def list(self) -> Sequence[TrustedKey]:
        """Return the trusted keys, own key first, then by name."""
        return sorted(self.trusted().values(), key=lambda key: (not key.own, key.name, key.id))


def _raw(public: Ed25519PublicKey) -> bytes:
    return public.public_bytes_raw()


def _public_pem(public: bytes) -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return (
        Ed25519PublicKey.from_public_bytes(public)
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def _load_public(pem: bytes) -> bytes:
    """Return the raw bytes; raises ValueError for anything but an Ed25519 public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(pem)
    except Exception as error:  # as in _load_own
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"it is a {type(key).__name__}")
    return _raw(key)


@contextlib.contextmanager
def _open_regular(path: Path) -> Iterator[int]:
    """Open for reading; raises OSError for anything but a regular file, and never waits for a FIFO's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _read_small(path: Path) -> bytes:
    with _open_regular(path) as descriptor:
        return os.read(descriptor, MAX_KEY_BYTES)


def _unsafe(path: Path) -> str | None:
    """Say who else could have put a trusted key there, or None."""
    found = path.stat()
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return None  # a mounted config map or secret shows mode 0777, and nobody here can write to it
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user id {found.st_uid}, neither root nor this process's {os.geteuid()}"
    if found.st_mode & OTHERS_MAY_WRITE:
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):04o}); chmod go-w"
    return None
