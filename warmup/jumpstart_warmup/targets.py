"""
Which targets and headers of real requests hold nothing personal, no secret, and no order to do something.

Nobody can tell a name from a word, so this guesses, and it guesses against the request: one that is not recorded costs
some warmth, a recorded password costs somebody's account, a replayed ``/unsubscribe`` costs a customer. Two ideas
carry it. Everything is looked at as an app might come to see it: percent-encoding is taken off until nothing is left of
it, names are compared word by word *and* with their words joined, values that look like a path are judged as one. And
what surrounds a value decides: a query parameter, a path segment or the front of a segment that is called like a secret
condemns whatever follows it.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote

MAX_TARGET = 2048  # bytes of path and query; longer ones are searches and tokens
MAX_VALUE = 128  # characters of one segment or value; longer ones are somebody's text
MAX_HEADER_VALUE = 256  # bytes; a browser's Accept has about 140
MAX_LANGUAGES = 8  # of Accept-Language; a longer list is a fingerprint
MAX_PARTS = 32  # segments of a path, parameters of a query; bounds the time that one target takes
DECODINGS = 4  # of percent-encoding; whoever needs more hides something
DIGITS = 9  # in a row, whatever stands between them: phone, card and account numbers


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- the words ------------------------------------------------------------------------------------------------------

_SECRETS = _words_of("""
    2fa access accesskey apikey auth authorization authorisation authkey bearer captcha challenge clave code contrasena
    cred creds credential credentials csc csrf cvc cvn cvv digest hash hmac hotp jwt kennwort key login
    magic mdp mfa motdepasse nonce oauth oidc otp pass passcode passport passwd password passwort passphrase pin
    privatekey psk psw puk pw pwd recaptcha recovery saml samlrequest samlresponse secret secretkey senha session
    sessid share shared sid sig signature signin signup sso tfa ticket token totp xsrf
    """)
_PEOPLE = _words_of("""
    account accountid acct address bic birth birthdate birthday birthplace cardno card cardnumber cc ccnum ccnumber
    contact customer customerid dateofbirth dob ean email employee familyname firstname fname
    forename friend fullname geo geolocation givenname iban imei ip ipaddress lastname lat latitude lname
    lng lon longitude mail maidenname member middlename name nationalid nhs nickname nino passenger
    patient people person personal plz postal postalcode postcode profile recipient remoteip sender sortcode ssn street
    student subscriber surname taxid tel telephone uid user userid username vatid visitor whoami zip zipcode
    """)
_SECRET_WORDS = _SECRETS | _PEOPLE

# Only as the name of a parameter: as words of a path they are as often departments of a shop.
_SECRET_QUERY_WORDS = _words_of("""
    bank cell clid coordinates coords driver fax fbclid gclid guest handle license licence location mobile msclkid
    msisdn owner phone plate serial swift tan wallet
    """)
_SECRET_QUERY_NAMES = _words_of("k t u")
_SECRET_SEGMENTS = _words_of("u me my")
_SECRET_QUERY_ENDINGS = ("key", "pwd", "sid", "sig", "name", "code", "clid", "userid")
_SECRET_ENDINGS = re.compile("(?:code|pwd|otp|(?:access|api|app|auth|license|private|secret|user)key)$")
_SECRET_QUERY_PARTS = re.compile("birth|address|account|e_?mail|phone")
_SECRET_PARTS = re.compile(
    "token|secret|passw|passphrase|passcode|session|signature|credential|csrf|xsrf|oauth|username|surname|"
    "(?:first|last|full|given|family)_?name"
)
_PASSWORD = re.compile("passw|passphrase|passcode|kennwort")  # in a value these are no longer a coincidence

# A GET that does something. The strong ones count wherever they stand, the weak ones, which are ordinary words too, as
# the name of a step: alone, in front of one or two other words, or behind one.
_STRONG_EFFECTS = _words_of("""
    activate activation callback cancel confirm confirmation cron deactivate delete destroy disable erase hook
    impersonate invite invitation logoff logout optin optout purge reactivate recover remove reset resubscribe revoke
    shutdown signoff signout subscribe terminate undelete unlink unpublish unregister unsubscribe validate
    verification verify webhook
    """)
_EFFECT_PARTS = re.compile(
    "logo(?:ut|ff)|signo(?:ut|ff)|unsubscri|verif|activat|recover|(?<!p)reset|confirm|invit|webhook"
)
_WEAK_EFFECTS = _words_of("""
    accept add approve ban buy charge checkin claim clear click clone commit copy create decline deploy dismiss
    do downvote drop enable enqueue exec execute fire flush follow generate import increment insert invalidate join kill
    leave like lock mark merge migrate move mute pay pixel poweroff process publish purchase reboot rebuild refresh
    refund register reindex reject rename renew replace resend restart restore retry rollback rotate run save send
    set start stop submit switch sync task toggle track transfer trash trigger undo unfollow unlike unlock update
    upgrade upvote vote wipe withdraw write
    """)
_QUERY_EFFECTS = _STRONG_EFFECTS | _words_of("add approve buy clear dismiss pay purchase remove send submit vote")
_ACTION_NAMES = _words_of("action act do op operation cmd command event func function method task what")

# --- health checks --------------------------------------------------------------------------------------------------

_HEALTH = _words_of("""
    health healthz healthy health-check healthcheck health_check _health _healthz livez readyz liveness readiness
    heartbeat lbheartbeat up-check
    """)
_HEALTH_ALONE = _words_of("ping alive ready live _ping")  # words of a path elsewhere
_PROBE_LETTERS: frozenset[str | bytes] = frozenset(
    kind(letter) for letter in "akceghjrAKCEGHJR" for kind in (str, str.encode)
)
_PROBES = re.compile(
    rb"^(?:kube-probe/|elb-healthchecker/|googlehc/|consul health check|envoy/hc|haproxy|azure traffic manager|"
    rb"route 53|amazon-route53-health-check|amazon route 53 health check|"
    rb"jumpstart-shadow/)",  # what is replayed and mirrored, should a proxy have dropped its mark
    re.IGNORECASE,
)


def is_health_check(target: str) -> bool:
    """Whether a target or route is one that load balancers and orchestrators ask for, and nobody else. Pure."""
    segments = [segment for segment in target.partition("?")[0].lower().split("/") if segment]
    if not segments or len(segments) > 4:
        return False
    return segments[0] in _HEALTH or segments[-1] in _HEALTH or (len(segments) == 1 and segments[0] in _HEALTH_ALONE)


def is_probe(user_agent: str | bytes) -> bool:
    """Whether a request with this ``User-Agent`` is a health check. Asked of every request. Pure."""
    if user_agent[:1] not in _PROBE_LETTERS:  # of a browser all is said
        return False
    begins = user_agent.encode("latin-1", "replace") if isinstance(user_agent, str) else user_agent
    return _PROBES.match(begins) is not None


# --- shapes ---------------------------------------------------------------------------------------------------------

_VISIBLE_ASCII = re.compile(r"/[\x21\x22\x24-\x7e]*")  # without '#'
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_.$:\-]{0,39}(?:\[[A-Za-z0-9_.\-]{0,40}\]){0,4}")
_FLAG = re.compile(r"[a-z][a-z_-]{0,15}")
_SEGMENT_UNFIT = re.compile(r"[^\w\-.~+,:!()*'$ /|%]")
_VALUE_UNFIT = re.compile(r"""[@?={}\[\]<>"\\^`;&#]""")
_EXTENSION = re.compile(
    r"\.(?:html?|php|aspx?|jsp|do|cgi|xml|json|csv|txt|pdf|css|m?js|map|png|jpe?g|gif|svg|webp|avif|ico|woff2?|zip|"
    r"rss|atom|md|yaml|yml|webmanifest)$",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[^\W\d_]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NUMBER_OF_YEAR = re.compile(r"(?:19|20)[0-9]{2}-[0-9]{1,5}")  # of an invoice or an order
_PHONE = re.compile(r"\+\W*(?:\d\W*){6}|^\(?\d{3}\)?[-. ]\d{4}$")
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])|::|(?:[0-9a-fA-F]{1,4}:){4}")
_KNOWN_TOKEN = re.compile(r"^(?:eyJ|[spr]k_(?:live|test)_|gh[pousr]_|github_pat_|xox[a-z]-|glpat-|AKIA|AIza)")
_LABEL = re.compile(r"([\w.\-]+)\s*[:(|,]")
_PROSE = re.compile(r"[a-z]+(?:-[a-z]+){3,}")  # a slug of four words or more
_RUN = re.compile(r"[^\W_]+", re.ASCII)
_HEX = re.compile(r"(?:[0-9a-f]{16,}|[0-9A-F]{16,})")
_KIND_CHANGE = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])|(?<=[a-z])(?=[A-Z])")


def is_opaque(text: str) -> bool:
    """
    Whether *text* looks made by a machine to be unguessable: long hex, base64, a JWT; not a word, slug, date or UUID.

    A guess: long, and letters, capitals and digits take turns more often than they do in names.
    """
    if len(text) < 16:
        return False
    if _HEX.fullmatch(text):
        return any(letter.isdigit() for letter in text)
    runs = _RUN.findall(text)
    if any(len(run) >= 32 for run in runs):
        return True
    if any(len(run) >= 20 and not run.isalpha() and not run.isdigit() for run in runs):
        return True
    changes = sum(len(_KIND_CHANGE.findall(run)) for run in runs)
    return changes * 4 >= len(text) and not _UUID.fullmatch(text)


# --- names ----------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    """The words of a name in any of the usual spellings, in lower case: ``userID``, ``user-id``, ``USER_ID``."""
    return [word.lower() for word in _WORD.findall(text)]


def _phrases(words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Each run of one to three of *words*, joined, with its first index and the one after its last."""
    for start in range(len(words)):
        for end in range(start + 1, min(start + 3, len(words)) + 1):
            yield start, end, "".join(words[start:end])


def _is_among(phrase: str, known: frozenset[str]) -> bool:
    return phrase in known or (phrase.endswith("s") and (phrase[:-1] in known or phrase.removesuffix("es") in known))


@functools.lru_cache(maxsize=2048)  # apps have few names, and each request that is not recorded is looked at again
def is_secret_name(name: str) -> bool:
    """Whether a parameter called *name* is likely to hold a secret or a person."""
    lowered = name.lower().replace("-", "_")
    if _SECRET_PARTS.search(lowered) or _SECRET_QUERY_PARTS.search(lowered) or lowered.endswith(_SECRET_QUERY_ENDINGS):
        return True
    words = _words(name)
    return lowered in _SECRET_QUERY_NAMES or any(
        _is_among(phrase, _SECRET_WORDS) or _is_among(phrase, _SECRET_QUERY_WORDS) for _, _, phrase in _phrases(words)
    )


def _secret_ends(words: Sequence[str]) -> set[int]:
    """Where in *words* something ends that is called like a secret or a person."""
    return {
        end
        for _, end, phrase in _phrases(words)
        if _is_among(phrase, _SECRET_WORDS) or _SECRET_PARTS.search(phrase) or _SECRET_ENDINGS.search(phrase)
    }


# --- values ---------------------------------------------------------------------------------------------------------


def _decoded(text: str) -> str | None:
    """*text* without percent-encoding and with one spelling of each letter; None when there is no end to it."""
    for _ in range(DECODINGS + 1):
        plain = unquote(text)
        if plain == text:
            break
        text = plain
    else:
        return None
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        # No text at all, or with characters that nobody sees: both can hide a word.
        if any(letter == "\ufffd" or unicodedata.category(letter)[0] == "C" for letter in text):
            return None
    return text if text.isprintable() else None


def _holds_a_number(text: str) -> bool:
    """Whether *text* has so many digits, between letters, that it may be the number of a person, a card, an account."""
    if _UUID.fullmatch(text) or _NUMBER_OF_YEAR.fullmatch(text):
        return False
    return any(sum(map(str.isdigit, run)) >= DIGITS for run in _LETTERS.split(text))


def _is_unfit_text(text: str) -> bool:
    """What is refused in values and in segments alike."""
    return (
        len(text) > MAX_VALUE
        or is_opaque(text)
        or _KNOWN_TOKEN.search(text) is not None
        or _PHONE.search(text) is not None
        or _ADDRESS.search(text) is not None
        or _holds_a_number(text)
    )


def _is_fit_value(value: str) -> bool:
    """Whether a decoded *value* of an unsuspicious parameter may be recorded."""
    if not value:
        return True
    if _VALUE_UNFIT.search(value) or _is_unfit_text(value):
        return False
    if any(is_secret_name(label) for label in _LABEL.findall(value)):
        return False
    if "/" in value and not _is_fit_path(value):
        return False
    words = _words(value)
    if len(words) <= 2 and _is_order(words):  # ?page=logout
        return False
    if len(words) > 1 and _PASSWORD.search(value.lower()):
        return False
    ends = _secret_ends(words)
    return not any(word.isdigit() for word in words[min(ends) :]) if ends else True


# --- paths ----------------------------------------------------------------------------------------------------------


def _is_order(words: Sequence[str]) -> bool:
    if _EFFECT_PARTS.search("".join(words)):
        return True
    return any(_is_among(phrase, _STRONG_EFFECTS) for _, _, phrase in _phrases(words))


def _is_effect(segment: str) -> bool:
    """Whether asking for a path with this segment is likely to do something."""
    words = _words(_EXTENSION.sub("", segment))
    if _is_order(words):
        return True
    if len(words) == 2 and words[1] in _WEAK_EFFECTS:
        return True
    return 0 < len(words) <= 3 and words[0] in _WEAK_EFFECTS


def _carries(segment: str) -> bool:
    """Whether the front of *segment* is called like a secret that then follows: ``token-X``, ``pin1234``."""
    stem = _EXTENSION.sub("", segment)
    words = _words(stem)
    ends = {end for end in _secret_ends(words) if end < len(words)}
    if _PROSE.fullmatch(stem):  # an article's title may speak of users and codes, not of API keys, and not at its end
        return len(words) - 1 in ends or any(
            _is_among(phrase, _SECRET_WORDS) or _SECRET_PARTS.search(phrase)
            for start, end, phrase in _phrases(words)
            if end < len(words) and (end - start > 1 or _SECRET_PARTS.search(phrase))
        )
    return bool(ends)


def _introduces(segment: str) -> bool:
    """Whether what comes after *segment* in a path belongs to a secret or a person."""
    words = _words(_EXTENSION.sub("", segment))
    return segment.lower() in _SECRET_SEGMENTS or bool(_secret_ends(words))


def _is_fit_path(path: str) -> bool:
    """Whether a decoded *path* may be recorded."""
    if path.count("/") > MAX_PARTS or _SEGMENT_UNFIT.search(path):
        return False
    introduced = False
    for segment in path.split("/"):
        if not segment:
            continue
        if introduced or segment.startswith("~") or _is_unfit_text(segment) or _is_effect(segment):
            return False
        if _carries(segment):
            return False
        introduced = _introduces(segment)
    return True


# --- queries --------------------------------------------------------------------------------------------------------


def _is_fit_parameter(name: str, value: str | None) -> bool:
    if value is None:  # no name at all but a flag, or a value without one
        return _FLAG.fullmatch(name) is not None and _is_fit_parameter(name, "") and _is_fit_value(name)
    if not _NAME.fullmatch(name) or name.lower() in ("_method", "x-http-method-override"):
        return False
    if is_secret_name(name) or is_opaque(name) or _holds_a_number(name):
        return False
    words = _words(name)
    if any(_is_among(phrase, _QUERY_EFFECTS) for _, _, phrase in _phrases(words)):
        return False
    if words and words[-1] in _ACTION_NAMES and _is_effect(value):
        return False
    return _is_fit_value(value)


def _is_fit_query(query: str) -> bool:
    # Some apps still split at semicolons; what they would see as names is not checked below.
    if ";" in query or query.count("&") >= MAX_PARTS:
        return False
    for part in query.split("&"):
        if not part:
            continue
        raw_name, equals, raw_value = part.replace("+", " ").partition("=")
        name = _decoded(raw_name)
        value = _decoded(raw_value)
        if name is None or value is None or not _is_fit_parameter(name, value if equals else None):
            return False
    return True


def is_fit_target(target: str) -> bool:
    """Whether a request for *target*, path and query, may be recorded and replayed. Pure; never raises."""
    if len(target) > MAX_TARGET or not _VISIBLE_ASCII.fullmatch(target):
        return False
    raw_path, _, query = target.partition("?")
    path = _decoded(raw_path)
    return path is not None and _is_fit_path(path) and _is_fit_query(query)


# --- headers --------------------------------------------------------------------------------------------------------

_QUALITY = r"(?:;\s?q=(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?))?"
_MEDIA = re.compile(
    r"(?:\*/\*|(?:text|application|image|audio|video|font|message|model|multipart)/(?:\*|[a-z0-9][a-z0-9.+-]{0,40}))"
    r"(?:;\s?(?:charset=utf-8|v=b3|version=[0-9]\.[0-9]\.[0-9]|level=[0-9]))?" + _QUALITY
)
_LANGUAGE = re.compile(r"(?:\*|[A-Za-z]{2,3}(?:-[A-Za-z]{4})?(?:-(?:[A-Za-z]{2}|[0-9]{3}))?)" + _QUALITY)
_CODING = re.compile(r"(?:\*|gzip|deflate|br|zstd|compress|identity|x-gzip|x-compress)" + _QUALITY)
_CHARSET = re.compile(r"(?:\*|utf-(?:8|16)|us-ascii|iso-8859-[0-9]{1,2}|windows-125[0-9])" + _QUALITY, re.IGNORECASE)


def _list_of(item: re.Pattern[str], limit: int) -> Callable[[str], bool]:
    def is_fit(value: str) -> bool:
        items = [part.strip(" ") for part in value.split(",")]
        return len(items) <= limit and all(
            item.fullmatch(part) and not _is_unfit_text(part.partition(";")[0]) for part in items
        )

    return is_fit


_HEADERS: dict[str, Callable[[str], bool]] = {
    "accept": _list_of(_MEDIA, 12),
    "accept-charset": _list_of(_CHARSET, 4),
    "accept-encoding": _list_of(_CODING, 8),
    "accept-language": _list_of(_LANGUAGE, MAX_LANGUAGES),
}

KEPT_HEADERS = frozenset(_HEADERS)
"""Content negotiation only. Not the user agent (a fingerprint), no cookies, authorization, conditions or range."""


def is_fit_header(name: str, value: str) -> bool:
    """Whether *value* of a header of `KEPT_HEADERS`, *name* in lower case, has a shape that holds nothing else."""
    return len(value) <= MAX_HEADER_VALUE and _HEADERS[name](value)
