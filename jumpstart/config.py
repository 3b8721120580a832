"""
`Config`: a named set of real-time values (flags, limits, prices) that is kept current off the request path.

Reads take the newest value that there is and never wait, but for the first ever. Two reads may see two versions, as a
long stream that asks again for a kill switch wants it; `view` is one version, for code that wants several values that
belong together.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, ClassVar, NamedTuple

from jumpstart import live
from jumpstart.dependencies import note_read
from jumpstart.upkeep import Rules

WHOLE = "*"  # stands for the set itself: which keys there are
TOMBSTONES = 1000  # marks of keys that are gone, before they are forgotten

_MISSING: Any = object()


class Values(NamedTuple):
    """
    One version of a set.

    Attributes:
        marks: key → version in which it last changed; keys without a mark have that of the *floor*.
    """

    values: dict[str, Any]
    version: int
    floor: int
    marks: dict[str, int]

    def version_of(self, key: str) -> int:
        return self.version if key == WHOLE else self.marks.get(key, self.floor)


class View(Mapping[str, Any]):
    """One version of a `Config`; it never changes. Reading from it counts as reading the `Config`."""

    __slots__ = ("_config", "_values")

    def __init__(self, config: Config, values: Values) -> None:
        self._config = config
        self._values = values

    @property
    def version(self) -> int:
        """Grows with each change of the `Config`."""
        return self._values.version

    def __getitem__(self, key: str) -> Any:
        note_read(self._config, key, self._values.version_of(key))
        return self._values.values[key]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            note_read(self._config, key, self._values.version_of(key))
        return key in self._values.values

    def __iter__(self) -> Iterator[str]:
        note_read(self._config, WHOLE, self._values.version)
        return iter(self._values.values)

    def __len__(self) -> int:
        note_read(self._config, WHOLE, self._values.version)
        return len(self._values.values)

    def __repr__(self) -> str:
        return f"<{self._config.name} version {self.version}: {self._values.values!r}>"


class Config(live.Live[Values], Mapping[str, Any]):
    """
    A mapping of real-time values: ``flags["new_checkout"]``, ``flags.get("limit", 10)``.

    Attributes are its own (``flags.age``), keys are only reached by ``[]`` and ``get``, so that no key hides a method.
    Do not change the values that it hands out: all requests share them.

    Args:
        name: in profiles, logs and ``jumpstart status``; one `Config` of a name per app.
        fetch: returns a mapping with strings for keys; a function or a coroutine function. Called in a background
            thread, a coroutine in an event loop that is kept for this `Config`. See `jumpstart.sources`.
        ttl: seconds for which values are fresh; each process fetches them a little sooner, at moments drawn by lot.
        timeout: seconds that one fetch may take. One that takes longer is left, and counts as failed; what it brings
            after all is used unless there is something newer.
        validate: called with each new mapping; refuses it by raising or by returning False.
        default: the values until the source has answered, where it is down and no profile has any.
        on_down: what a boot does when the source has not answered within *boot_timeout*: ``"profile"`` takes the values
            of the profile, else *default*, else reads raise; ``"refuse"`` fails.
        boot_timeout: seconds that the first read, or a worker's boot, waits for the source's first answer.
        snapshot: ``"value"`` puts the values, which must be JSON types, into profiles, with their age; None: the name.

    Raises:
        ValueError, TypeError: an option is out of range.
    """

    kind: ClassVar[str] = "config"
    noun: ClassVar[str] = "configuration"

    def __init__(
        self,
        name: str,
        fetch: Callable[[], Any],
        *,
        ttl: float = 30.0,
        timeout: float = 5.0,
        validate: Callable[[Mapping[str, Any]], Any] | None = None,
        default: Mapping[str, Any] | None = None,
        on_down: live.OnDown = "profile",
        boot_timeout: float = 5.0,
        snapshot: live.Snapshot | None = None,
    ) -> None:
        self._validate = validate
        if default is not None:
            default = self._check(default)[0]
        super().__init__(
            name,
            fetch,
            Rules(ttl, timeout),
            boot_timeout=boot_timeout,
            on_down=on_down,
            default=live._NOTHING if default is None else default,
            snapshot=snapshot,
        )

    # Identity, as weak references and dependencies need it; a mapping would compare values, and not be hashable.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __getitem__(self, key: str) -> Any:
        """
        Raises:
            KeyError: there is no such key.
            SourceUnavailable: there are no values at all, since the source never answered.
        """
        found = self._known()
        note_read(self, key, found.version_of(key))
        return found.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of *key*, or *default* where there is no such key or there are no values at all."""
        found = self._current()
        if found is None:
            note_read(self, key, 0)
            return default
        note_read(self, key, found.version_of(key))
        return found.values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return self.get(key, _MISSING) is not _MISSING if isinstance(key, str) else False

    def __iter__(self) -> Iterator[str]:
        return iter(self.view())

    def __len__(self) -> int:
        return len(self.view())

    def keys(self) -> KeysView[str]:
        return self.view().keys()

    def values(self) -> ValuesView[Any]:
        return self.view().values()

    def items(self) -> ItemsView[str, Any]:
        return self.view().items()

    def view(self) -> View:
        """
        The newest version as it is now, which stays as it is: for several values that belong together.

        Raises:
            SourceUnavailable: there are no values at all.
        """
        return View(self, self._known())

    def version(self, key: str) -> int:
        """In which version *key* has changed last; 0 where there never was a value. Never waits."""
        found = self._published
        return 0 if found is None else found.version_of(key)

    def __repr__(self) -> str:
        info = self.info()
        return f"<Config {self.name!r} version {info.version} from {info.origin}>"

    def _known(self) -> Values:
        found = self._current()
        if found is None:
            raise self._unavailable()
        return found

    # ------------------------------------------------------------------ for `Live`

    def _check(self, answer: Any) -> Values:
        if not isinstance(answer, Mapping):
            raise TypeError(f"fetched {type(answer).__name__}, which is no mapping")
        values = dict(answer)
        for key in values:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
        if self._validate is not None and self._validate(values) is False:
            raise ValueError("validate() has refused it")
        return Values(values, 0, 0, {})

    def _merge(self, old: Values | None, new: Values, version: int) -> tuple[Values, frozenset[str]]:
        if old is None:
            return new._replace(version=version, floor=version), frozenset((*new.values, WHOLE))
        before, after = old.values, new.values
        changed = [key for key in {**before, **after} if not same(before.get(key, _MISSING), after.get(key, _MISSING))]
        if not changed:
            return old, frozenset()
        marks = {**old.marks, **dict.fromkeys(changed, version)}
        floor = old.floor
        if len(marks) > len(after) + TOMBSTONES:
            # What is gone counts as changed now: versions may grow for no reason, and never shrink.
            marks = {key: version if key in changed else old.version_of(key) for key in after}
            floor = version
        return Values(after, version, floor, marks), frozenset((*changed, WHOLE))

    def _for_users(self, changed: frozenset[str]) -> frozenset[str]:
        return changed - {WHOLE}

    def _as_data(self, value: Values) -> Any:
        return value.values


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types throughout, as 1 and True and 1.0 are not."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other)
    except Exception:  # objects may compare as they like; what cannot be told counts as changed
        return False
