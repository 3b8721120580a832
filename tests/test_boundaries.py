"""Who may import whom, who reads the environment, who prints and who exits: read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("jumpstart", "jumpstart_warmup", "jumpstart_server")  # from the ground up; imports go down only
FOLDERS = {
    "jumpstart": ROOT / "jumpstart",
    "jumpstart_warmup": ROOT / "warmup" / "jumpstart_warmup",
    "jumpstart_server": ROOT / "server" / "jumpstart_server",
}

# Outside the cli package: the ends of processes that are ours from their first line to their last.
MAY_EXIT = {
    "server/jumpstart_server/__main__.py",  # the command itself
    "server/jumpstart_server/mold.py",
    "server/jumpstart_server/worker.py",
    "server/jumpstart_server/system.py",  # the parent is gone: nobody is left to be told
    "server/jumpstart_server/forks.py",  # a child of a handler, which must not come back
}
MAY_READ_THE_ENVIRONMENT = {"server/jumpstart_server/config.py"}
MAY_HAND_THE_ENVIRONMENT_ON = {"server/jumpstart_server/spawn.py"}  # whole, to a child
MAY_ADD_TO_THE_ENVIRONMENT = {"server/jumpstart_server/envfile.py"}  # what --env-file and --user ask for
MAY_READ_ARGUMENTS = {
    "server/jumpstart_server/__main__.py",  # starts the first process before the command line is parsed
    "server/jumpstart_server/mold.py",  # the number of its control socket
}
MAY_PRINT = {"server/jumpstart_server/settings_reference.py"}  # `scripts/docs` runs it as a program

SOURCES = sorted(path for folder in FOLDERS.values() for path in folder.rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def floor_of(path: Path) -> str:
    return next(floor for floor, folder in FOLDERS.items() if path.is_relative_to(folder))


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import, those inside functions and type checks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # "jumpstart_server.mold:main", as in tables of names that are imported later
            module, colon, attribute = node.value.partition(":")
            if colon and module.split(".")[0] in FLOORS and attribute.isidentifier() and " " not in module:
                yield node.lineno, module


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def uses(tree: ast.AST, *names: str) -> list[tuple[int, str]]:
    """Lines where one of the dotted *names* is spelled, and imports of it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) in names:
            found.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.ImportFrom):
            found += [
                (node.lineno, f"{node.module}.{alias.name}")
                for alias in node.names
                if f"{node.module}.{alias.name}" in names
            ]
    return sorted(found)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def test_there_is_something_to_read() -> None:
    assert {floor_of(path) for path in SOURCES} == set(FLOORS)
    assert len(SOURCES) > 40
    sample = ast.parse("def f():\n    import a.b\n    from c import d\n    importlib.import_module('e')")
    assert [name for _, name in imports(ROOT / "x.py", sample)] == ["a.b", "c", "e"]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_imports_go_down_only(path: Path) -> None:
    height = FLOORS.index(floor_of(path))
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for line, module in imports(path, parse(path))
        if module.split(".")[0] in FLOORS[height + 1 :]
    ]
    assert wrong == []


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_only_the_configuration_reads_the_environment(path: Path) -> None:
    name, tree = name_of(path), parse(path)
    names = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    found = uses(tree, *names)
    if name in MAY_READ_THE_ENVIRONMENT:
        return
    if name in MAY_HAND_THE_ENVIRONMENT_ON:
        whole = {
            argument.lineno
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            for argument in call.args
            if dotted(argument) == "os.environ"
        }
        found = [(line, what) for line, what in found if line not in whole]
    if name in MAY_ADD_TO_THE_ENVIRONMENT:
        updates = {line for line, _ in uses(tree, "os.environ.update")}
        found = [(line, what) for line, what in found if line not in updates]
    assert [f"{name}:{line} {what}" for line, what in found] == []


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_only_the_command_line_package_prints_and_exits(path: Path) -> None:
    name, tree = name_of(path), parse(path)
    if "cli" in path.relative_to(FOLDERS[floor_of(path)]).parts[:1]:
        return
    if name not in MAY_PRINT:
        assert uses(tree, "print", "sys.stdout", "sys.stdout.write", "click.echo") == []
    exits = uses(tree, "sys.exit", "os._exit", "exit", "quit", "os.abort")
    raises = [
        (node.lineno, "raise SystemExit")
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc) == "SystemExit"
    ]
    if name not in MAY_EXIT:
        assert exits + raises == []


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_only_the_command_line_package_reads_the_command_line(path: Path) -> None:
    if "cli" in path.relative_to(FOLDERS[floor_of(path)]).parts[:1] or name_of(path) in MAY_READ_ARGUMENTS:
        return
    assert uses(parse(path), "sys.argv", "sys.orig_argv") == []


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_what_decides_does_no_io(path: Path) -> None:
    pure = {
        "jumpstart/records.py": {"time"},  # a default clock
        "jumpstart/choice.py": set(),
        "jumpstart/upkeep.py": set(),
        "server/jumpstart_server/lifecycle.py": set(),
        "server/jumpstart_server/metrics.py": set(),
        "server/jumpstart_server/settings.py": {"pathlib"},
        "server/jumpstart_server/exits.py": set(),
        **{
            f"server/jumpstart_server/export/{name}.py": set()
            for name in ("model", "yaml", "nginx", "envoy", "systemd", "kubernetes")
        },
        "server/jumpstart_server/envelope/sizing.py": set(),
        "server/jumpstart_server/envelope/explain.py": set(),
    }
    allowed = pure.get(name_of(path))
    if allowed is None:
        return
    io = {"os", "signal", "socket", "threading", "time", "asyncio", "subprocess", "pathlib", "tempfile", "select"}
    used = {module.split(".")[0] for _, module in imports(path, parse(path))}
    assert used & io <= allowed


def test_the_lists_of_exceptions_name_files_that_are_there() -> None:
    for name in MAY_EXIT | MAY_READ_THE_ENVIRONMENT | MAY_HAND_THE_ENVIRONMENT_ON | MAY_READ_ARGUMENTS | MAY_PRINT:
        assert (ROOT / name).is_file(), name
    for name in MAY_EXIT:
        assert uses(parse(ROOT / name), "sys.exit", "os._exit"), f"{name} need not be on the list"
