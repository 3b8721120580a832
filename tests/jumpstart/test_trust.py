"""Keys: made once, kept private, and the only way into a host."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from jumpstart.errors import ConfigError, ProfileRefusedError
from jumpstart.records import Reason
from jumpstart.trust import KeyRing, Signature, key_id


def refused(ring: KeyRing, message: bytes, signature: Signature) -> Reason:
    with pytest.raises(ProfileRefusedError) as caught:
        ring.verify(message, signature)
    return caught.value.reason


def test_a_host_trusts_what_it_signed_itself(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    signature = ring.sign(b"message")
    ring.verify(b"message", signature)
    assert stat.S_IMODE((tmp_path / "keys" / "own.pem").stat().st_mode) == 0o600
    assert [(key.id, key.own) for key in ring.list()] == [(signature.key, True)]
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["own.pem"]


def test_looking_makes_no_key(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    assert ring.trusted() == {} and not ring.list()
    assert not (tmp_path / "keys").exists()


def test_the_signed_bytes_have_a_domain_of_their_own(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    public = ring.own_key().public_key()
    import base64

    public.verify(base64.b64decode(ring.sign(b"m").signature), b"jumpstart-profile-v1\0m")


def test_another_hosts_key_is_unknown_until_it_is_trusted(tmp_path: Path) -> None:
    seeder, consumer = KeyRing(tmp_path / "seeder"), KeyRing(tmp_path / "consumer")
    signature = seeder.sign(b"m")
    assert refused(consumer, b"m", signature) is Reason.UNKNOWN_KEY
    key = consumer.trust(seeder.public_pem(), "seeder")
    assert key.id == signature.key == key_id(key.public)
    consumer.verify(b"m", signature)
    assert consumer.trust(seeder.public_pem(), "seeder") == key
    consumer.revoke(key.id)
    assert refused(consumer, b"m", signature) is Reason.REVOKED_KEY


def test_a_revoked_key_stays_revoked_when_it_is_put_among_the_trusted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a tool that writes the same list again, or where the folder of trusted keys cannot be written to."""
    seeder, consumer = KeyRing(tmp_path / "seeder"), KeyRing(tmp_path / "consumer")
    signature = seeder.sign(b"m")
    key = consumer.trust(seeder.public_pem(), "seeder")
    file = tmp_path / "consumer" / "trusted" / "seeder.pub"
    pem = file.read_bytes()

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, **more: read_only(path) if path == file else None)
        consumer.revoke(key.id)
    assert file.read_bytes() == pem
    assert refused(consumer, b"m", signature) is Reason.REVOKED_KEY
    assert consumer.list() == [] and consumer.revoked() == [key.id]
    with pytest.raises(ConfigError, match=r"was revoked here; .* remove .*/revoked/[0-9a-f]{16}\.pub"):
        consumer.trust(seeder.public_pem(), "again")
    (tmp_path / "consumer" / "revoked" / f"{key.id}.pub").unlink()
    consumer.verify(b"m", signature)


def test_nobody_is_trusted_when_it_cannot_be_told_who_was_revoked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(tmp_path / "keys")
    signature = ring.sign(b"m")
    (tmp_path / "keys" / "revoked").write_text("a file in the place of the folder")
    assert refused(ring, b"m", signature) is Reason.UNREADABLE
    assert ring.trusted() == {} and "no key is trusted" in caplog.text
    with pytest.raises(ConfigError, match="cannot read the revoked keys"):
        ring.revoked()


@pytest.mark.parametrize("signature", ["", "!!!", "AAAA", "é"])
def test_a_signature_that_does_not_fit_is_bad(tmp_path: Path, signature: str) -> None:
    ring = KeyRing(tmp_path / "keys")
    good = ring.sign(b"m")
    assert refused(ring, b"other", good) is Reason.BAD_SIGNATURE
    assert refused(ring, b"m", Signature("ed25519", good.key, signature)) is Reason.BAD_SIGNATURE
    assert refused(ring, b"m", Signature("none", good.key, good.signature)) is Reason.BAD_SIGNATURE


def test_a_new_key_leaves_the_old_one_trusted_until_it_is_revoked(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    old = ring.sign(b"m")
    key = ring.new()
    assert ring.sign(b"m").key == key.id != old.key
    ring.verify(b"m", old)
    with pytest.raises(ConfigError, match="signs with"):
        ring.revoke(key.id)
    ring.revoke(old.key)
    assert refused(ring, b"m", old) is Reason.REVOKED_KEY
    with pytest.raises(ConfigError, match="not trusted here"):
        ring.revoke(old.key)


def test_new_makes_the_first_key_too(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    assert ring.new().id == ring.sign(b"").key


def test_a_private_key_that_others_may_read_is_refused_and_its_files_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(tmp_path / "keys")
    signature = ring.sign(b"m")
    own = tmp_path / "keys" / "own.pem"
    own.chmod(0o644)
    with pytest.raises(ConfigError, match=r"own\.pem is open to others \(mode 0644\)"):
        ring.sign(b"m")
    with caplog.at_level(logging.WARNING):
        assert refused(ring, b"m", signature) is Reason.UNKNOWN_KEY
        ring.new()
    assert "own key is not trusted" in caplog.text
    assert refused(ring, b"m", signature) is Reason.UNKNOWN_KEY  # it may be known to others: not kept


def test_a_private_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(tmp_path / "keys")
    ring.own_key()
    if os.geteuid() == 0:
        os.chown(tmp_path / "keys" / "own.pem", 12345, -1)
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="belongs to user id"):
        ring.own_key()


def test_a_damaged_own_key_costs_one_clear_error(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    ring.own_key()
    own = tmp_path / "keys" / "own.pem"
    for damage in (b"", b"garbage", own.read_bytes()[:60], rsa_key(private=True)):
        own.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"own\.pem is (damaged|not an Ed25519 key): move it away"):
            ring.own_key()
    own.unlink()
    own.mkdir()
    with pytest.raises(ConfigError, match=r"cannot read private key .*own\.pem"):
        ring.own_key()


def test_damaged_and_unsafe_trusted_keys_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seeder, ring = KeyRing(tmp_path / "seeder"), KeyRing(tmp_path / "keys")
    ring.trust(seeder.public_pem(), "good")
    folder = tmp_path / "keys" / "trusted"
    (folder / "bad.pub").write_text("garbage")
    (folder / "rsa.pub").write_bytes(rsa_key(private=False))
    (folder / "open.pub").write_text(seeder.public_pem())
    (folder / "open.pub").chmod(0o666)
    os.mkfifo(folder / "fifo.pub")
    (folder / "notes.txt").write_text("not a key")
    with caplog.at_level(logging.WARNING):
        assert [key.name for key in ring.list()] == ["good"]
    assert all(name in caplog.text for name in ("bad.pub", "rsa.pub", "open.pub", "fifo.pub"))
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert ring.trusted() == {}
    assert "may be written by others (mode 0777)" in caplog.text


def test_trust_takes_public_keys_only_and_says_what_is_wrong(tmp_path: Path) -> None:
    seeder, ring = KeyRing(tmp_path / "seeder"), KeyRing(tmp_path / "keys")
    pem = tmp_path / "seeder.pub"
    pem.write_text(seeder.public_pem())
    ring.trust(pem, "seeder")
    with pytest.raises(ConfigError, match="exists and holds another key"):
        ring.trust(KeyRing(tmp_path / "third").public_pem(), "seeder")
    with pytest.raises(ConfigError, match="private key"):
        ring.trust(tmp_path / "seeder" / "own.pem", "x")
    with pytest.raises(ConfigError, match="cannot read"):
        ring.trust(tmp_path / "nosuch.pem", "x")
    with pytest.raises(ConfigError, match="not an Ed25519 public key"):
        ring.trust("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "x")
    for name in ("", "../x", "a/b", ".hidden", "x" * 65):
        with pytest.raises(ConfigError, match="key name"):
            ring.trust(pem, name)


def test_a_full_disk_costs_a_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write key file .*own\.pem: No space left"):
        KeyRing(tmp_path / "keys").own_key()
    assert not list((tmp_path / "keys").iterdir())


def test_a_folder_that_others_may_write_to_gets_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o777)
    with pytest.raises(ConfigError, match="cannot store keys"):
        KeyRing(tmp_path / "keys").own_key()


@pytest.mark.slow
def test_processes_that_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from jumpstart.trust import KeyRing\n"
        "sys.stdin.readline(); print(KeyRing(Path(sys.argv[1])).sign(b'').key)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "keys")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    keys = {process.communicate(timeout=30)[0].strip() for process in processes}
    assert len(keys) == 1 and keys != {""}


def rsa_key(*, private: bool) -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    if private:
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
