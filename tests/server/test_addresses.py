"""Addresses as users write them, and sockets that are bound and do not listen."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jumpstart.errors import AddressInUseError, ConfigError, JumpstartError
from jumpstart_server.addresses import (
    SUN_PATH_LIMIT,
    Address,
    addresses_of,
    bind,
    describe,
    identify,
    listen,
    parse_address,
    parse_permissions,
    remove_dead_socket,
    remove_socket_file,
    socket_permissions,
)
from jumpstart_server.privileges import Identity
from jumpstart_server.settings import TenantSettings


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as name:
        yield Path(name)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# -- as written --


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9000", Address(host="127.0.0.1", port=9000)),
        ("localhost", Address(host="localhost", port=8000)),
        (":9000", Address(host="0.0.0.0", port=9000)),
        ("", Address(host="0.0.0.0", port=8000)),
        ("example.org:0", Address(host="example.org", port=0)),
        ("[::1]:9000", Address(host="::1", port=9000)),
        ("[::1]", Address(host="::1", port=8000)),
        ("::1", Address(host="::1", port=8000)),
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
        ("unix:///run/x.sock", Address(path="/run/x.sock")),
        ("unix:x.sock", Address(path="x.sock")),
        ("fd://3", Address(fd=3)),
    ],
)
def test_every_form_is_understood(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "h:http",
        "h:-1",
        "h:",
        "[::1",
        "[::1]:",
        "[::1]9000",
        "[::1]:x",
        "unix:",
        "unix://",
        "fd://",
        "fd://-1",
        "fd://x",
        "http://h:80",
        "/run/x.sock",
        "fd://" + "9" * 5000,
        "h:８０",
    ],
)
def test_anything_else_is_an_error_that_lists_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write HOST:PORT, \[IPV6\]:PORT, unix:PATH or fd://NUMBER$"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("18010", "18010 is read as a host; write :18010, or HOST:18010"),
        ("99999", "99999 is read as a host; a port is at most 65535"),
        ("127.0.0.1:80000", "a port is at most 65535"),
        ("[::1]:80000", "a port is at most 65535"),
        ("h:65536", "a port is at most 65535"),
        ("h:" + "9" * 5000, "a port is at most 65535"),
    ],
)
def test_a_port_in_the_wrong_place_or_too_high_is_said_so(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, option="-b")
    assert str(caught.value) == f"-b {text}: {words}"


pieces = st.lists(st.sampled_from(["[", "]", ":", "::", "unix:", "fd://", "/", "8000", "٣", "²", "a", ".", "\0", "-"]))


@given(st.text(max_size=20) | pieces.map("".join))
@example("h:²")
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert [bool(address.host), bool(address.path), address.fd >= 0].count(True) == 1
    assert 0 <= address.port <= 65535


@given(st.ip_addresses(), st.integers(0, 65535))
def test_an_address_is_printed_as_it_can_be_written(ip: object, port: int) -> None:
    address = Address(host=str(ip), port=port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["unix:/run/x.sock", "fd://3"])
def test_other_addresses_are_printed_as_they_can_be_written(text: str) -> None:
    assert str(parse_address(text)) == text


def test_the_settings_name_the_addresses() -> None:
    assert addresses_of(TenantSettings()) == [Address(host="127.0.0.1", port=8000)]
    assert addresses_of(TenantSettings(port=0)) == [Address(host="127.0.0.1", port=0)]
    assert addresses_of(TenantSettings(host="::")) == [Address(host="::", port=8000)]
    assert addresses_of(TenantSettings(uds="/x")) == [Address(path="/x")]
    assert addresses_of(TenantSettings(fd=0)) == [Address(fd=0)]
    assert addresses_of(TenantSettings(bind=("a:1", "unix:/x"))) == [Address(host="a", port=1), Address(path="/x")]


# -- internet sockets --


def test_a_bound_socket_refuses_until_it_listens() -> None:
    with bind(Address(host="127.0.0.1", port=0)) as bound:
        assert not bound.getblocking()
        assert not bound.get_inheritable(), "it travels to workers as a message; the app's subprocesses get none"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), timeout=5)
        bound.listen()
        socket.create_connection(bound.getsockname(), timeout=5).close()


def test_an_address_in_use_is_its_own_kind_of_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"^127.0.0.1:{port} is in use by another process$"):
            bind(Address(host="127.0.0.1", port=port))


def test_a_port_whose_last_owner_just_ended_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = server.getsockname()
        with socket.create_connection(name, timeout=5), server.accept()[0]:
            pass  # our side closes too: one of the two is in TIME_WAIT now
    bind(Address(host=name[0], port=name[1])).close()


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "256.1.1.1", "a..b", "x" * 300, "a\0b", "192.0.2.1", "\udcff"]
)
def test_a_host_that_cannot_be_bound_is_the_operators_to_mend(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot serve on "):
        bind(Address(host=host, port=0))


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6_is_bound_and_described_in_brackets() -> None:
    with bind(Address(host="::1", port=0)) as bound:
        assert describe(bound) == f"http://[::1]:{bound.getsockname()[1]}"
    with bind(Address(host="::", port=0)) as bound:
        bound.listen()
        socket.create_connection(("127.0.0.1", bound.getsockname()[1]), timeout=5).close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("text", ["[::]:0", "[::0]:0", "[0:0:0:0:0:0:0:0]:0"])
def test_175_all_addresses_are_those_of_both_families(text: str) -> None:
    with bind(parse_address(text)) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        assert not bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose kernel was told ipv6.disable=1."""
    real = socket.socket

    def make(family: int = -1, *arguments: int, **more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *arguments, **more)

    monkeypatch.setattr("jumpstart_server.addresses.socket.socket", make)


@pytest.mark.usefixtures("without_ipv6")
def test_175_without_ipv6_all_addresses_are_those_of_ipv4(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), bind(Address(host="::", port=0)) as bound:
        assert describe(bound) == f"http://0.0.0.0:{bound.getsockname()[1]}"
    assert caplog.messages == ["there is no IPv6 here: 0.0.0.0:0 in place of [::]:0"]


@pytest.mark.usefixtures("without_ipv6")
def test_175_without_ipv6_another_address_of_it_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^cannot serve on \[::1\]:0: no such address here, perhaps no IPv6 at all$"):
        bind(Address(host="::1", port=0))


def test_a_socket_is_described_with_its_real_port(folder: Path) -> None:
    with bind(Address(host="127.0.0.1", port=0)) as bound:
        port = bound.getsockname()[1]
        assert port
        assert describe(bound) == f"http://127.0.0.1:{port}"
        assert describe(bound, tls=True) == f"https://127.0.0.1:{port}"
    with bind(Address(path=f"{folder}/x.sock")) as bound:
        assert describe(bound) == f"unix:{folder}/x.sock"


# -- sockets with a path --


def test_a_path_is_bound_and_a_dead_one_is_bound_again(folder: Path) -> None:
    address = Address(path=str(folder / "x.sock"))
    bind(address).close()
    assert stat.S_ISSOCK((folder / "x.sock").stat().st_mode)
    with bind(address) as bound:
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.path)


def test_a_path_that_somebody_serves_is_in_use_and_stays(folder: Path) -> None:
    path = folder / "x.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(AddressInUseError, match=rf"^unix:{path} is in use by process {os.getpid()}$"):
            bind(Address(path=str(path)))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_of_two_that_hold_a_path_the_first_to_listen_has_it(folder: Path) -> None:
    """As with a port: a server that boots does not listen yet, and looks like a dead one to the next."""
    address = Address(path=str(folder / "x.sock"))
    with bind(address) as slow:
        slow_file = identify(address)
        with bind(address) as quick:
            quick_file = identify(address)
            listen(quick, address, quick_file, 5)
            with pytest.raises(OSError, match="another server has put its socket there") as caught:
                listen(slow, address, slow_file, 5)
            assert caught.value.errno == errno.EADDRINUSE
            remove_socket_file(address, slow_file)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address.path)


def test_a_connection_that_is_inherited_is_no_place_to_serve_on() -> None:
    """As systemd passes it with Accept=yes."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConfigError, match=r"a connection, not a socket that listens; .* Accept=no"):
        bind(Address(fd=ours.fileno()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_file_can_be_given_to_another_user(folder: Path) -> None:
    path = folder / "x.sock"
    with bind(Address(path=str(path)), 0o660, Identity(65534, 65533)):
        found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65533, 0o660)


def test_what_is_not_a_socket_is_left_alone(folder: Path) -> None:
    path = folder / "x.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind(Address(path=str(path)))
    assert path.read_text() == "precious"
    link = folder / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="not a socket"):
        remove_dead_socket(link)


@pytest.mark.parametrize("target", ["nothing", "file", "socket"])
def test_173_a_link_is_neither_followed_nor_removed(folder: Path, target: str) -> None:
    """Whatever it leads to: nothing, a file, or a socket that somebody serves."""
    link, there = folder / "link.sock", folder / "there"
    link.symlink_to(there)
    with socket.socket(socket.AF_UNIX) as server:
        if target == "file":
            there.write_text("precious")
        elif target == "socket":
            server.bind(str(there))
            server.listen()
        before = there.stat() if target != "nothing" else None
        with pytest.raises(ConfigError, match="something that is not a socket lies there"):
            bind(Address(path=str(link)), 0o600)
        assert link.is_symlink()
        assert link.readlink() == there
        assert (there.stat() if there.exists() else None) == before


@pytest.mark.parametrize("permissions", [0o666, 0o660, 0o600, 0o777, 0o000])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_173_permissions_are_what_was_asked_for_and_there_before_anybody_can_connect(
    folder: Path, permissions: int, umask: int
) -> None:
    before = os.umask(umask)
    try:
        for _ in range(2):  # what lay there before keeps nothing of its own
            with bind(Address(path=str(folder / "x.sock")), permissions) as bound:
                assert not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                assert stat.S_IMODE((folder / "x.sock").stat().st_mode) == permissions
            (folder / "x.sock").chmod(0o777)
        assert os.umask(umask) == umask, "put back"
    finally:
        os.umask(before)


def test_the_umask_is_put_back_where_binding_fails(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        with pytest.raises(ConfigError):
            bind(Address(path=f"{folder}/no/x.sock"), 0o666)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("permissions", "umask", "mode"),
    [("666", "", 0o666), ("660", "", 0o660), ("0o600", "", 0o600), ("0666", "022", 0o644), ("666", "0", 0o666)],
)
def test_the_umask_of_the_settings_is_taken_off(permissions: str, umask: str, mode: int) -> None:
    assert socket_permissions(TenantSettings(uds_permissions=permissions, umask=umask)) == mode


def test_by_default_everybody_may_connect_as_to_the_loopback() -> None:
    assert socket_permissions(TenantSettings()) == 0o666


@pytest.mark.parametrize("text", ["", "0o", "8", "18", "rw-", "-1", "1777", "00666", "0x1b6", "６６６", "6 6", "+660"])
def test_permissions_that_are_none_are_an_error_that_says_how_to_write_them(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^--umask: {re.escape(repr(text))} is not allowed; write three octal digits"
    ):
        parse_permissions(text, option="--umask")


def test_a_socket_file_is_removed_by_its_own_server_only(folder: Path) -> None:
    address = Address(path=str(folder / "x.sock"))
    path = Path(address.path)
    with bind(address) as first:
        own = identify(address)
        path.unlink()
        with bind(address):  # another server, while the first one still runs
            remove_socket_file(address, own)
            assert path.is_socket()
        path.unlink()
        path.symlink_to(folder)
        remove_socket_file(address, own)
        assert path.is_symlink()
        path.unlink()
        remove_socket_file(address, own)
        assert first.fileno() >= 0
    with bind(address):
        remove_socket_file(address, identify(address))
        assert not path.exists()
    assert identify(address) is None
    assert identify(Address(host="a", port=1)) is None
    remove_socket_file(Address(fd=0), None)


def test_a_path_that_is_too_long_is_said_so(folder: Path) -> None:
    path = f"{folder}/{'ö' * SUN_PATH_LIMIT}"
    with pytest.raises(ConfigError, match=f"longer than {SUN_PATH_LIMIT} bytes"):
        bind(Address(path=path))
    longest = f"{folder}/".ljust(SUN_PATH_LIMIT, "x")
    bind(Address(path=longest)).close()


@pytest.mark.parametrize("path", ["no/such/folder/x.sock", "nul\0.sock"])
def test_a_path_that_cannot_be_bound_is_the_operators_to_mend(folder: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot serve on unix:"):
        bind(Address(path=f"{folder}/{path}"))


# -- inherited sockets --


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/dev/fd").iterdir()}


def test_an_inherited_socket_is_served_on_and_kept_open_for_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as inherited:
        with bind(Address(fd=inherited.fileno())) as bound:
            assert bound.getsockname() == inherited.getsockname()
            assert bound.fileno() != inherited.fileno()
        assert inherited.getsockname()


def test_descriptors_that_are_no_stream_sockets_are_refused_and_none_is_leaked(folder: Path) -> None:
    before = open_descriptors()
    with (folder / "file").open("w") as file, socket.socket(type=socket.SOCK_DGRAM) as datagram:
        for number in (file.fileno(), datagram.fileno(), 9999, 2**31 - 1, 2**31, 10**30):
            with pytest.raises(ConfigError, match=f"^cannot serve on fd://{number}: "):
                bind(Address(fd=number))
    assert open_descriptors() == before


@given(st.text(st.characters(exclude_characters="/"), max_size=12))
def test_binding_any_path_raises_errors_of_ours_only(name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="js", dir="/tmp") as base:
        try:
            bind(Address(path=f"{base}/{name}")).close()
        except JumpstartError:
            pass


def test_nothing_is_left_open_when_binding_fails() -> None:
    before = open_descriptors()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(AddressInUseError):
            bind(Address(host="127.0.0.1", port=taken.getsockname()[1]))
    assert open_descriptors() == before
