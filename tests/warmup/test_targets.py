"""What is recorded of real traffic holds nothing personal, no secret, and no order to do something."""

from __future__ import annotations

import string
import time
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jumpstart_warmup import targets
from jumpstart_warmup.corpus import read_requests, scrub
from jumpstart_warmup.targets import KEPT_HEADERS, is_fit_header, is_fit_target, is_probe, is_secret_name

SHOP_REQUESTS = Path(__file__).parents[2] / "examples" / "shop" / "warm.toml"


def _words(text: str) -> list[str]:
    return text.split()


ORDINARY = [
    "/",
    "/about",
    "/api/prices/us",
    "/api/v1/items?page=2&sort=price",
    "/api/v2/items?filter[color]=red&fields=id,title,price",
    "/api/products?ids[]=1&ids[]=2&limit=20&offset=40",
    "/app.css?v=3",
    "/blog/",
    "/blog/2024/11/07/making-pasta",
    "/blog/2024/11/title-of-post",
    "/blog/how-to-make-good-pasta-in-10-minutes-at-home",
    "/blog/seven-things-every-user-should-know",
    "/books?author=Le+Guin&q=dispossessed",
    "/cart",
    "/category/garden-chairs?min_price=10&max_price=99.90&in_stock=true",
    "/chat?n=3&delay_ms=1",
    "/contact",
    "/de-DE/produkte/k%C3%BCche",
    "/docs/reference/settings.html",
    "/events?from=2024-01-01&to=2024-01-31",
    "/export.csv",
    "/export.csv?format=zip",
    "/favicon.ico",
    "/feed.xml",
    "/healthz",
    "/index.php?page=2",
    "/invoice/2024-00017",
    "/invoice/2024-00017?format=mail",
    "/language/",
    "/login",
    "/archive/2024",
    "/media/image.png?w=300&h=200",
    "/news?preview&lang=en",
    "/notes/1/",
    "/openapi.json",
    "/order/123e4567-e89b-12d3-a456-426614174000",
    "/presets/warm-light",
    "/product/42?view=full&page=2&sort=price",
    "/products",
    "/products/7",
    "/products/headphones-wh-1000xm5",
    "/products?kind=mug&order=name",
    "/report",
    "/robots.txt",
    "/search?q=%E6%97%A5%E6%9C%AC",
    "/search?q=100%25+cotton",
    "/search?q=habour+lamp+under+45.00",
    "/search?q=lamp",
    "/search?q=phone+case",
    "/search?q=secret+garden",
    "/search?q=user+guide&page=3",
    "/sitemap.xml",
    "/smartphones/galaxy-s24",
    "/static/app.3f2a1b.css",
    "/static/js/vendor.min.js",
    "/tags/python?utm_source=newsletter",
    "/users",
    "/users/",
    "/users?page=2",
    "/wiki/Category:Lamps",
]

PERSONAL = [
    *(f"/f?{name}=SECRET" for name in _words("""
        pw totp cvv passport mfa bearer creds uid name street ip first_name firstName first-name firstname lastName
        last_name LAST-NAME lastname token access_token apiKey api_key API-KEY X-Amz-Signature sig code Password
        auth user_email sessionid PHPSESSID jsessionid OTP user[pw] user.pw users[0][name] date_of_birth dateOfBirth
        2fa 2fa_code userName user_id userId email_address e-mail e_mail phoneNumber phone_number tel zip postcode
        zipCode card_no cardNumber card-number ssn iban lat lng geo uname t u hash gclid fbclid cvc mot_de_passe
        kennwort passwort senha sso id_token refreshToken clientSecret _csrf authenticity_token recovery_code
        state[token] account accountNumber full_name fullName nickname contact customer_id ip_address ipAddr %74oken
        %2574oken p%61ssword passw%C3%B6rd p%EF%BD%81ss %EF%BD%90%EF%BD%97 passw%E2%80%8Bord a%20token
        """)),
    # nested
    "/f?next=/cb?code=X",
    "/f?next=%2Fcb%3Fcode%3DX",
    "/f?next=%252Fcb%253Fcode%253DX",
    "/f?next=/otp/X",
    "/f?next=https://x.example/user/alice",
    "/f?redirect_uri=https://x/cb?access_token=X",
    "/f?redirect_uri=https%3A%2F%2Fx%2Fcb%23access_token%3DX",
    "/f?filter=%7B%22password%22:%22X%22%7D",
    '/f?filter={"password":"X"}',
    "/f?query=%7Blogin(password:%22X%22)%7D",
    "/f?query=login(password:%22X%22)",
    "/f?q=password:X",
    "/f?q=password+hunter2",
    "/f?q=my+password+is+swordfish",
    "/f?q=pin+1234",
    "/f?q=email:bob",
    "/f?a=1;token=2",
    "/f?a=1%3Btoken=2",
    "/f?SECRETAAY",
    "/f?SECRETAAY=",
    "/f?4711abc",
    "/f?a=eyJhbGc.X.Y",
    "/f?next=eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmN",
    "/f?a=" + "word+" * 40,
    "/f?info=%12%f3%9a",
    "/f?" + "a=1&" * 40,
    "/" + "a/" * 40,
    "/f?info=%f3%9a%c0",
    # paths
    *(f"/{name}/X" for name in _words("""
        otp api_key apiKey apikey login ssn code auth/code user User users u pin password secret token access-token
        session key name street ip customer customers member profile iban account/bob invite reset/u verify magic share
        accesscode passwordreset verifyemail email mail my me v1/users api/user.json 2fa mfa totp uid card ticket
        """)),
    "/pin/1234",
    "/pin1234",
    "/reset-X",
    "/reset-abc123",
    "/password-reset/abc",
    "/user-alice",
    "/userId-77/orders",
    "/my-token-abc/x",
    "/token=X/x",
    "/user:alice",
    "/p;jsessionid=X",
    "/p;token=X",
    "/p%3Btoken%3DX",
    "/p%253Btoken%253DX",
    "/otp%2FX",
    "/otp%252FX",
    "/%6ftp/X",
    "/otp//X",
    "/a?/otp=1;x=2",
    "/~alice/",
    "/@alice",
    "/u/me@example.com",
    "/x/eyJhbGc.X.sig",
    "/share/d41d8cd98f00b204e9800998ecf8427e",
    # values
    "/f?q=200000000",
    "/f?m=alice%40x.example",
    "/f?m=alice%2540x.example",
    "/f?m=alice%25252540x.example",
    "/f?q=me%40example.com",
    *(f"/f?n={quote_plus(number)}" for number in (
        "4111111111111111", "4111-1111-1111-1111", "4111 1111 1111 1111", "4111.1111.1111.1111", "4111_1111_1111_1111",
        "4111\u00a01111\u00a01111\u00a01111", "4111\u20111111\u20111111\u20111111",
        "\uff14\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11",
        "+491511234567", "+49 151 1234", "0151 / 1234567", "(030) 123-456-7", "555-1234", "(555) 123-4567",
        "DE89 3704 0044 0532", "DE89370400440532013000", "GB82 WEST 1234 5698 7654 32", "078-05-1120", "850101-1234",
        "10.1.2.3", "2001:db8:0:0:1::1", "fe80::1", "52.5200,13.40495",
    )),
    "/call/+4915112345",
    "/c/4111-1111-1111-1111",
    "/n/078-05-1120",
]  # fmt: skip

ORDERS = [
    *(f"/{path}" for path in _words("""
        logout log-out logOut signout sign_out logoff login/now otp/new unsubscribe unsubscribe/7 newsletter/unsubscribe
        delete products/7/delete products/delete/7 delete-item item-delete deleteItem remove cart/remove/7 cart/add/7
        confirm confirm/7 verify reset password-reset cancel order/7/cancel webhook webhooks/stripe cron cron/hourly
        cron.php logout.do delete.php hook callback jobs/run approve/7 purge revoke shutdown like/7 vote/7 checkin
        accounts/logout/ admin/logout/ user/logout destroy activate deactivate subscribe pay/7 send restart emailconfirm
        cart?add=7 cart?remove_item=7 p?delete=7 p?action=delete p?do=logout p?op=remove p?logout p?confirm=1
        p?page=logout p?route=common/logout p?_method=DELETE p?mode=x&cmd=purge p?form_action=vote %64elete/7 %2564elete
        """)),
]  # fmt: skip

MALFORMED = ["/a%00b", "/a%0d%0ab", "/a b", "/ä", "/a#b", "*", "http://other/", "", "/" + "a" * 3000, "/a?b=%0a"]


@pytest.mark.parametrize("target", ORDINARY)
def test_an_ordinary_target_is_recorded_as_it_is(target: str) -> None:
    request = scrub("GET", target, ())
    assert request is not None
    assert request.path == target


def test_what_warms_the_example_shop_can_be_recorded() -> None:
    targets = [request.path for request in read_requests(SHOP_REQUESTS)]
    assert [target for target in targets if not is_fit_target(target)] == []


@pytest.mark.parametrize("target", PERSONAL)
def test_a_target_that_may_hold_a_secret_or_a_person_is_not_recorded(target: str) -> None:
    assert scrub("GET", target, ()) is None


@pytest.mark.parametrize("target", ORDERS)
def test_a_target_that_may_do_something_is_not_recorded(target: str) -> None:
    assert scrub("GET", target, ()) is None
    assert scrub("HEAD", target, ()) is None


@pytest.mark.parametrize("target", MALFORMED)
def test_a_target_that_is_none_is_not_recorded(target: str) -> None:
    assert scrub("GET", target, ()) is None


SECRET_NAMES = [
    ("password",), ("access", "token"), ("first", "name"), ("last", "name"), ("api", "key"), ("user", "id"), ("pin",),
    ("card", "number"), ("date", "of", "birth"), ("ip", "address"), ("otp",), ("session", "id"), ("ssn",), ("login",),
]  # fmt: skip
SPELLINGS = [
    "_".join,
    "-".join,
    "".join,
    lambda words: "_".join(words).upper(),
    lambda words: words[0] + "".join(word.title() for word in words[1:]),
    lambda words: "".join(word.title() for word in words),
]
VALUES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)
ROUNDS = st.integers(0, 3)


def encoded(text: str, rounds: int) -> str:
    """*text* percent-encoded again and again, letters too."""
    for _ in range(rounds):
        text = "".join(f"%{byte:02x}" for byte in text.encode())
        if len(text) > 500:
            break
    return text


@given(st.sampled_from(SECRET_NAMES), st.sampled_from(SPELLINGS), VALUES, ROUNDS, st.sampled_from(["", "user", "new"]))
def test_no_spelling_of_a_secret_name_passes(
    words: tuple[str, ...], spell: object, value: str, rounds: int, front: str
) -> None:
    assert callable(spell)
    name = spell((front, *words) if front and spell is not SPELLINGS[2] else words)
    assert is_secret_name(name)
    name = encoded(name, rounds)
    for target in (
        f"/?{name}={value}",
        f"/?a[{name}]={value}",
        f"/{name}/{value}",
        f"/x/{name}//{value}/y",
        f"/{name}={value}",
        f"/p;{name}={value}",
        f"/{name}-{value}",
        f"/?next=/x/{name}/{value}",
        f"/?q={name}:{value}",
    ):
        assert not is_fit_target(target), target


@given(
    st.text("0123456789", min_size=9, max_size=19),
    st.text(" -./_()+,:\u00a0\u2011", min_size=1, max_size=3),
    st.integers(2, 5),
    ROUNDS,
)
def test_long_numbers_do_not_pass_however_they_are_grouped(digits: str, separator: str, size: int, rounds: int) -> None:
    number = separator.join(digits[at : at + size] for at in range(0, len(digits), size))
    value = encoded(quote(number, safe=""), rounds)
    assert not is_fit_target(f"/f?q={value}")
    assert not is_fit_target(f"/f?q={digits}")
    assert not is_fit_target(f"/c/{digits}")


@given(VALUES, VALUES, ROUNDS)
def test_no_mail_address_passes(who: str, where: str, rounds: int) -> None:
    address = encoded(f"{who}@{where}.example", rounds)
    assert not is_fit_target(f"/f?q={address}")
    assert not is_fit_target(f"/f/{address}/x")


WORDS = st.sampled_from(_words("lamp chair garden table red oak shelf light sofa rug plant mirror desk wood green"))


@given(
    st.lists(WORDS, min_size=1, max_size=4),
    st.lists(WORDS, max_size=5),
    st.integers(0, 99999),
    st.integers(1, 12),
)
def test_shop_pages_are_recorded(path: list[str], search: list[str], number: int, month: int) -> None:
    for target in (
        f"/{'/'.join(path)}/{number}",
        f"/{'-'.join(path)}-{number % 1000}.html?page={number}",
        f"/search?q={'+'.join(search)}&sort=price&page={month}",
        f"/blog/2024/{month:02}/{'-'.join(path)}",
        f"/api/v1/{path[0]}s/{number}?fields={','.join(search)}",
    ):
        assert is_fit_target(target), target


@given(st.text(max_size=300).map(lambda text: "/" + text) | st.binary(max_size=60).map(lambda data: "/?" + quote(data)))
def test_any_text_is_judged(target: str) -> None:
    assert isinstance(is_fit_target(target), bool)


@pytest.mark.parametrize(
    "target",
    ["/" + "%25" * 680, "/?" + "a=1&" * 510, "/" + "a/" * 1020, "/a?q=" + "+" * 2000, "/" + "-" * 2000,
     "/a?q=" + "1-" * 1000, "/a?" + "a[" * 1000, "/" + "aB" * 1000, "/a?q=" + "a:" * 1000],
)  # fmt: skip
def test_no_target_takes_long(target: str) -> None:
    begun = time.perf_counter()
    is_fit_target(target)
    assert time.perf_counter() - begun < 0.2


# --- headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accept", "*/*"),
        ("accept", "application/json"),
        ("accept", "application/vnd.github.v3+json; version=1.0.0"),
        ("accept", "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8,"
                   "application/signed-exchange;v=b3;q=0.7"),
        ("accept-charset", "utf-8, iso-8859-1;q=0.5"),
        ("accept-encoding", "gzip, deflate, br, zstd"),
        ("accept-encoding", "gzip;q=1.0, identity; q=0.5, *;q=0"),
        ("accept-language", "de"),
        ("accept-language", "de-CH,de;q=0.9,en-US;q=0.8, zh-Hant-TW;q=0.7, es-419, *;q=0.5"),
    ],
)  # fmt: skip
def test_content_negotiation_is_kept(name: str, value: str) -> None:
    request = scrub("GET", "/", [(name, value)])
    assert request is not None
    assert request.headers == ((name, value),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accept", ""),
        ("accept", "text/html;SECRET=1"),
        ("accept", "text/html;a=SECRET"),
        ("accept", "text/html;q=0.1234"),
        ("accept", "text/SECRET"),
        ("accept", "secret/one"),
        ("accept", "alice"),
        ("accept", "text/html; q=0.5; token=x"),
        ("accept", "application/d41d8cd98f00b204e9800998ecf8427e"),
        ("accept", "application/vnd.1234567890"),
        ("accept", ", ".join(["*/*"] * 40)),
        ("accept-charset", "SECRET"),
        ("accept-encoding", "SECRET"),
        ("accept-encoding", "x" * 1000),
        ("accept-language", "de;SECRET"),
        ("accept-language", "de;q=SECRET"),
        ("accept-language", "secret-secret"),
        ("accept-language", "x-alice"),
        ("accept-language", ",".join(["de"] * 20)),
        ("accept-language", "dé"),
        ("accept-language", "de\n"),
    ],
)
def test_other_shapes_of_these_headers_are_dropped(name: str, value: str) -> None:
    request = scrub("GET", "/", [(name, value)])
    assert request is not None
    assert request.headers in ((), ((name, "de"),))


@given(st.sampled_from(sorted(KEPT_HEADERS)), st.text(max_size=300))
def test_any_header_is_judged(name: str, value: str) -> None:
    assert isinstance(is_fit_header(name, value), bool)


def test_each_probe_is_known_by_its_beginning_however_it_is_spelled() -> None:
    names = [each.decode() for each in targets._PROBES.pattern.removeprefix(b"^(?:").removesuffix(b")").split(b"|")]
    assert "haproxy" in names
    for name in names:
        for spelled in (name, name.upper(), name.title()):
            assert is_probe(spelled) and is_probe(f"{spelled} 9.1".encode())
            assert not is_probe("M" + spelled)
        assert not is_probe(name[:3])
