"""From words to the app: what may be written, what goes wrong, and how WSGI and ASGI are told apart."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jumpstart.errors import AppLoadError, ConfigError
from jumpstart.target import Target, detect_interface, load_app, parse_target

# -- parsing --


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("shop", Target("shop", None)),
        ("shop.web", Target("shop.web", None)),
        ("shop.web:", Target("shop.web", None)),
        ("shop.web:app", Target("shop.web", "app")),
        ("shop.web:site.app", Target("shop.web", "site.app")),
        ("shop:create_app()", Target("shop", "create_app", ((), {}))),
        ("shop:a.create('x', 1, key=[True, None])", Target("shop", "a.create", (("x", 1), {"key": [True, None]}))),
        ("shop:make(-1, b'x', {'a': (1, 2)})", Target("shop", "make", ((-1, b"x", {"a": (1, 2)}), {}))),
        ("größe:app", Target("größe", "app")),
    ],
)
def test_every_form_is_understood(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a module name"),
        (":app", "'' is not a module name"),
        ("shop/web.py:app", "write a dotted module, not a file"),
        ("web-shop:app", "'web-shop' is not a module name"),
        ("shop..web:app", "is not a module name"),
        ("shop:app-1", "neither an attribute"),
        ("shop:app[0]", "neither an attribute"),
        ("shop:1", "neither an attribute"),
        ("shop:create(x)", "neither an attribute"),
        ("shop:create(**{'a': 1})", "neither an attribute"),
        ("shop:create(*[1])", "neither an attribute"),
        ("shop:create()()", "neither an attribute"),
        ("shop:create({[]: 1})", "neither an attribute"),
        ("shop:create(a=1, a=2)", "neither an attribute"),
        ("shop:__import__('os').system('x')", "neither an attribute"),
        ("shop:a b", "neither an attribute"),
        ("shop:(", "neither an attribute"),
        ("shop:a\0", "neither an attribute"),
        ("shop:" + "(" * 500 + ")" * 500, "neither an attribute"),
        ("shop:" + "a." * 20_000 + "a", "neither an attribute"),
        ("shop:f(" + "-" * 20_000 + "1)", "neither an attribute"),
    ],
)
def test_anything_else_is_an_error_that_shows_what_is_possible(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_target(text)
    assert words in str(caught.value)


fragments = st.lists(
    st.sampled_from(
        ["shop", ":", ".", "app", "(", ")", "'", '"', "x", "=", ",", "*", "[", "]", "{", "}", "-", "1", " ", "\n"]
    )
)


@pytest.mark.filterwarnings("default")  # odd literals make the compiler warn
@given(st.text(max_size=20) | fragments.map("".join) | fragments.map(lambda parts: "shop:f(" + "".join(parts) + ")"))
@example("shop:f({[]})")
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    try:
        target = parse_target(text)
    except ConfigError:
        return
    assert all(part.isidentifier() for part in target.module.split("."))
    assert target.attribute is None or all(part.isidentifier() for part in target.attribute.split("."))


# -- loading --


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for apps, of which nothing stays imported."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_app_is_found_by_its_attribute(folder: Path) -> None:
    write(folder, "js_one.py", "class site:\n    app = 'deep'\napp = 'plain'\n")
    assert load_app("js_one:app", app_dir=folder) == "plain"
    assert load_app("js_one:site.app", app_dir=folder) == "deep"
    assert sys.path[0] == str(folder)
    load_app("js_one:app", app_dir=folder)
    assert sys.path.count(str(folder)) == 1


def test_without_an_attribute_app_comes_before_application(folder: Path) -> None:
    write(folder, "js_a.py", "app = 1\napplication = 2\n")
    write(folder, "js_b.py", "application = 2\n")
    assert load_app("js_a", app_dir=folder) == 1
    assert load_app("js_b", app_dir=folder) == 2


def test_factories_are_called_with_what_was_written(folder: Path) -> None:
    write(folder, "js_f.py", "def create_app(*given, **named): return (given, named)\n")
    assert load_app("js_f:create_app", app_dir=folder, factory=True) == ((), {})
    assert load_app("js_f:create_app('x', n=1)", app_dir=folder) == (("x",), {"n": 1})
    assert load_app("js_f:create_app('x')", app_dir=folder, factory=True) == (("x",), {})
    assert callable(load_app("js_f:create_app", app_dir=folder))


def failure(folder: Path, text: str, factory: bool = False) -> str:
    with pytest.raises(AppLoadError) as caught:
        load_app(text, app_dir=folder, factory=factory)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_the_operators_to_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--app-dir .*no such folder"):
        load_app("x:app", app_dir=tmp_path / "none")


def test_a_module_that_is_not_there_says_where_it_was_looked_for(folder: Path) -> None:
    text = failure(folder, "js_none.web:app")
    assert "no module named 'js_none'" in text and str(folder) in text and "Traceback" not in text
    write(folder, "js_pkg/__init__.py", "")
    assert "no module named 'js_pkg.web'" in failure(folder, "js_pkg.web:app")
    write(folder, "js_plain.py", "")
    assert "no module named 'js_plain.web'" in failure(folder, "js_plain.web:app")


def test_a_module_that_the_app_misses_is_another_matter(folder: Path) -> None:
    write(folder, "js_misses.py", "import no_such_dependency\napp = 1\n")
    text = failure(folder, "js_misses:app")
    assert "importing js_misses failed" in text and "no_such_dependency" in text and "js_misses.py" in text
    assert "importlib" not in text and "target.py" not in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('boom')", ["importing js_bad failed", "ValueError: boom", "js_bad.py"]),
        ("def broken(:\n", ["importing js_bad failed", "SyntaxError", "js_bad.py"]),
        ("import sys\nsys.exit('no database')", ["js_bad called sys.exit('no database') at import", "js_bad.py"]),
        (
            "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('second') from e",
            ["ZeroDivisionError", "ValueError: second"],
        ),
    ],
)
def test_an_app_that_fails_at_import_shows_its_own_frames(folder: Path, source: str, words: list[str]) -> None:
    write(folder, "js_bad.py", source)
    text = failure(folder, "js_bad:app")
    for word in words:
        assert word in text
    assert "importlib" not in text and "target.py" not in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def make(): raise ValueError('boom')", ["the factory js_fac:make raised", "ValueError: boom", "js_fac.py"]),
        ("def make(): raise SystemExit(3)", ["the factory js_fac:make called sys.exit(3)", "js_fac.py"]),
        ("def make(setting): pass", ["the factory js_fac:make raised", "TypeError", "setting"]),
        ("make = 3", ["the factory js_fac:make raised", "not callable"]),
    ],
)
def test_a_factory_that_fails_shows_the_apps_frames(folder: Path, source: str, words: list[str]) -> None:
    write(folder, "js_fac.py", source)
    text = failure(folder, "js_fac:make", factory=True)
    for word in words:
        assert word in text


def test_an_attribute_that_is_not_there_is_told_with_what_is(folder: Path) -> None:
    write(folder, "js_attr.py", "def create_app(): pass\nvalue = 3\n_private = print\n")
    text = failure(folder, "js_attr:application")
    assert text.endswith("module js_attr has no application; it has create_app")
    assert "has no app or application" in failure(folder, "js_attr")
    write(folder, "js_empty.py", "")
    assert failure(folder, "js_empty:app").endswith("module js_empty has no app")


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "type('Own', (BaseException,), {})"])
def test_whatever_an_app_raises_is_the_apps_own_error(folder: Path, error: str) -> None:
    """Our processes ignore SIGINT: a KeyboardInterrupt while the app is loaded was raised by the app itself."""
    write(folder, f"js_raises_{len(error)}.py", f"raise {error}")
    with pytest.raises(AppLoadError, match=r"line 1, in <module>\n.*raise "):
        load_app(f"js_raises_{len(error)}:app", app_dir=folder)
    write(folder, f"js_makes_{len(error)}.py", f"def make():\n    raise {error}")
    with pytest.raises(AppLoadError, match="line 2, in make"):
        load_app(f"js_makes_{len(error)}:make()", app_dir=folder)
    write(folder, f"js_hides_{len(error)}.py", f"def __getattr__(name):\n    raise {error}")
    with pytest.raises(AppLoadError, match="line 2, in __getattr__"):
        load_app(f"js_hides_{len(error)}:app", app_dir=folder)


def test_a_module_that_replaces_itself_by_an_object_without_attributes(folder: Path) -> None:
    source = "import sys\nclass Bare:\n    __slots__ = ()\nsys.modules[__name__] = Bare()\n"
    write(folder, "js_bare.py", source)
    with pytest.raises(AppLoadError, match="module js_bare has no app or application"):
        load_app("js_bare", app_dir=folder)


def test_an_app_that_cannot_be_looked_at_is_a_usage_error() -> None:
    class Proxy:
        def __call__(self, *args: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("working outside of application context")

    with pytest.raises(ConfigError, match="--interface asgi"):
        detect_interface(Proxy())


# -- telling apart --


async def asgi(scope: Any, receive: Any, send: Any) -> None: ...


def asgi_without_async(scope: Any, receive: Any, send: Any) -> Any: ...


def asgi2(scope: Any) -> Any: ...


def wsgi(environ: Any, start_response: Any) -> Any: ...


def wsgi_with_default(environ: Any, start_response: Any, extra: Any = None) -> Any: ...


class Asgi:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class AsgiAnyArguments:
    async def __call__(self, *args: Any) -> None: ...


class Asgi2Class:
    def __init__(self, scope: Any) -> None: ...

    async def __call__(self, receive: Any, send: Any) -> None: ...


class AsgiByAwait:
    def __init__(self, scope: Any, receive: Any, send: Any) -> None: ...

    def __await__(self) -> Any: ...


class Wsgi:
    def __call__(self, environ: Any, start_response: Any) -> Any: ...

    def method(self, environ: Any, start_response: Any) -> Any: ...

    async def async_method(self, scope: Any, receive: Any, send: Any) -> None: ...

    @classmethod
    def of_class(cls, environ: Any, start_response: Any) -> Any: ...

    @staticmethod
    async def static(scope: Any, receive: Any, send: Any) -> None: ...


class WsgiClass:
    def __init__(self, environ: Any, start_response: Any) -> None: ...

    def __iter__(self) -> Any: ...


class WsgiStaticCall:
    @staticmethod
    def __call__(environ: Any, start_response: Any) -> Any: ...


class CallIsAnInstance:
    __call__ = Wsgi()


class CallIsAnAsyncInstance:
    __call__ = Asgi()


class CallIsAPartial:
    __call__ = functools.partial(wsgi)


class Wraps:
    """As class-based middleware does that uses functools.update_wrapper."""

    def __init__(self, app: Any) -> None:
        functools.update_wrapper(self, app)
        self.app = app

    def __call__(self, *args: Any) -> Any:
        return self.app(*args)


def decorated(app: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(app)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return app(*args, **kwargs)

    return wrapper


def needs_more(config: Any, environ: Any, start_response: Any) -> Any: ...


async def async_needs_more(config: Any, scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.parametrize(
    ("app", "interface"),
    [
        pytest.param(asgi, "asgi", id="coroutine function"),
        pytest.param(asgi_without_async, "asgi", id="three arguments"),
        pytest.param(Asgi(), "asgi", id="instance"),
        pytest.param(AsgiAnyArguments(), "asgi", id="instance of any arguments"),
        pytest.param(AsgiByAwait, "asgi", id="class that is awaited"),
        pytest.param(Wsgi().async_method, "asgi", id="bound async method"),
        pytest.param(Wsgi.static, "asgi", id="static async method"),
        pytest.param(decorated(asgi), "asgi", id="decorated coroutine function"),
        pytest.param(decorated(decorated(asgi)), "asgi", id="decorated twice"),
        pytest.param(Wraps(asgi), "asgi", id="wrapping instance"),
        pytest.param(functools.partial(asgi), "asgi", id="partial"),
        pytest.param(functools.partial(async_needs_more, 1), "asgi", id="partial with an argument"),
        pytest.param(functools.partial(functools.partial(async_needs_more, 1)), "asgi", id="partial of a partial"),
        pytest.param(functools.partial(Asgi()), "asgi", id="partial of an instance"),
        pytest.param(CallIsAnAsyncInstance(), "asgi", id="async __call__ is an instance"),
        pytest.param(Asgi2Class, "asgi2", id="class of ASGI 2"),
        pytest.param(wsgi, "wsgi", id="function"),
        pytest.param(wsgi_with_default, "wsgi", id="function with a default"),
        pytest.param(lambda environ, start_response: [], "wsgi", id="lambda"),
        pytest.param(Wsgi(), "wsgi", id="WSGI instance"),
        pytest.param(Wsgi().method, "wsgi", id="bound method"),
        pytest.param(Wsgi.of_class, "wsgi", id="class method"),
        pytest.param(WsgiClass, "wsgi", id="WSGI class"),
        pytest.param(WsgiStaticCall(), "wsgi", id="static __call__"),
        pytest.param(CallIsAnInstance(), "wsgi", id="__call__ is an instance"),
        pytest.param(CallIsAPartial(), "wsgi", id="__call__ is a partial"),
        pytest.param(decorated(wsgi), "wsgi", id="decorated function"),
        pytest.param(Wraps(wsgi), "wsgi", id="wrapping instance of WSGI"),
        pytest.param(functools.partial(needs_more, 1), "wsgi", id="partial of WSGI"),
    ],
)
def test_what_would_be_called_tells_the_interface(app: Any, interface: str) -> None:
    assert detect_interface(app) == interface


def test_frameworks_are_told_apart() -> None:
    import fastapi
    import flask
    import starlette.applications
    from django.core.handlers.asgi import ASGIHandler
    from django.core.handlers.wsgi import WSGIHandler

    assert detect_interface(fastapi.FastAPI()) == "asgi"
    assert detect_interface(starlette.applications.Starlette()) == "asgi"
    assert detect_interface(flask.Flask("x")) == "wsgi"
    assert detect_interface(ASGIHandler.__call__.__get__(object())) == "asgi"
    assert detect_interface(WSGIHandler.__call__.__get__(object())) == "wsgi"


def create_app() -> Any: ...


def anything(*args: Any) -> Any: ...


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (3, "shop:app is 'int', which is not callable"),
        (asgi2, "say --interface asgi2"),  # a function of one argument is more often none
        (None, "not callable"),
        (create_app, "a factory? then add --factory"),
        (anything, "say --interface asgi or --interface wsgi"),
        (decorated(anything), "say --interface"),
        (lambda a, b, c, d: None, "say --interface"),
        (dict, "say --interface"),
    ],
)
def test_what_cannot_be_told_is_an_error_with_its_remedy(app: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_interface(app, "shop:app")
    assert words in str(caught.value)
    assert str(caught.value).startswith("shop:app")
