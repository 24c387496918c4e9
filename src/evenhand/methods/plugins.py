"""Parts and methods of other packages: entry points of the group ``evenhand.methods``, each imported only by its name.

An entry point is called like the registered rule, query or schedule that it names, or like a function that returns a
``Method``. Nothing is imported before somebody asks for that name, or for a list of all methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from evenhand._user_code import described
from evenhand.errors import UsageError
from evenhand.methods import catalogue, registry
from evenhand.terminal import say

GROUP = "evenhand.methods"
_adopted: dict[tuple[str, str], Any] = {}
_told: set[str] = set()


def entries(name: str | None = None) -> list[metadata.EntryPoint]:
    """Return the entry points of all installed packages, or those of one name; nothing is imported."""
    of_group = metadata.entry_points(group=GROUP)
    return [entry for entry in of_group if name is None or entry.name == name]


def package(entry: metadata.EntryPoint) -> str:
    """Return the name and version of the package that declares an entry point."""
    return "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def names() -> set[str]:
    """Return the names that other packages declare; nothing is imported."""
    return {entry.name for entry in entries()}


def origin(part: type) -> str:
    """Return name and version of the package that declares a part as a plugin; "" for other parts.

    Examples:
      >>> from evenhand.methods.rules import Clip
      >>> origin(Clip)
      ''
    """
    if part.__module__.startswith("evenhand."):
        return ""
    home = part.__module__.partition(".")[0]
    mine = [entry for entry in entries(getattr(part, "name", "")) if entry.module.partition(".")[0] == home]
    return package(mine[0]) if mine else ""


def packages(method: catalogue.Method) -> tuple[str, ...]:
    """Return name and version of every other package that the method or a part of it comes from.

    Examples:
      >>> packages(catalogue.method("dpsgd"))
      ()
    """
    return tuple(sorted({method.package, *map(origin, method.parts)} - {""}))


def adopt(name: str) -> Any:
    """Import what the entry point called ``name`` points to, and return it; None if no package declares the name.

    Raises:
      UsageError: the package cannot be imported, names something else, or a name that is taken. What it had
        registered until then is forgotten.
    """
    declared = entries(name)
    if not declared:
        return None
    key = name, declared[0].value
    if key not in _adopted:
        with _all_or_nothing(declared[0]):
            _refuse_clash(declared)
            _adopted[key] = _checked(declared[0], declared[0].load())
    return _adopted[key]


def recipe(name: str) -> catalogue.Recipe | None:
    """Return the method of another package called ``name``: its rule alone, or what its function makes."""
    part = adopt(name)
    if part is None or getattr(part, "kind", "rule") != "rule":
        return None
    if isinstance(part, type):
        return catalogue.of_rule(name)
    return catalogue.of_function(name, part, package(entries(name)[0]))


def recipes() -> Iterator[catalogue.Recipe]:
    """Yield the methods of all packages that can be imported; say once of each other one what is wrong with it."""
    for name in sorted(names()):
        try:
            named = recipe(name)
        except UsageError as error:
            if str(error) not in _told:
                _told.add(str(error))
                say(f"WARNING: {error}")
            continue
        if named is not None:
            yield named


def refuse_other_versions(packages: Iterable[str]) -> None:
    """Raise unless the packages that a plan names are installed in the version that it names."""
    for named in packages:
        name, _, version = named.rpartition(" ")
        try:
            installed = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            installed = "no version"
        if installed != version:
            raise UsageError(
                f"The plan was made with the package {named}, and {installed} of it is installed: another version may "
                f"train otherwise. pip install '{name}=={version}', then go on. Nothing was spent."
            )


def _refuse_clash(declared: list[metadata.EntryPoint]) -> None:
    name = declared[0].name
    if len(declared) > 1:
        both = " and ".join(package(entry) for entry in declared)
        raise UsageError(f"{both} declare the same name: uninstall one of them.")
    taken = {*catalogue.RECIPES, *catalogue.DENSITIES}
    if name in taken or any(name in registry.built_in(kind) for kind in registry.KINDS):
        raise UsageError("the name belongs to evenhand itself, which is used instead: its authors must choose another.")


def _checked(entry: metadata.EntryPoint, part: Any) -> Any:
    """Return a part that is registered under the name of its entry point, or a function that makes a method."""
    if isinstance(part, type):
        registry.register(part)
        if part.name != entry.name:  # type: ignore[attr-defined]
            raise UsageError(f"the part is called {part.name!r}: the entry point must have its name.")  # type: ignore[attr-defined]
    elif callable(part):
        offered = catalogue.of_function(entry.name, part, package(entry))
        for each in offered.make(**offered.defaults).parts:
            if not origin(each) and not each.__module__.startswith("evenhand."):
                raise UsageError(f"{each.__name__} needs an entry point of its own, else no run could be resumed.")
    else:
        raise UsageError("it must be a registered rule, query or schedule, or a function that returns a Method.")
    return part


@contextmanager
def _all_or_nothing(entry: metadata.EntryPoint) -> Iterator[None]:
    """Forget what was registered inside the block if it fails, and name the package in the error."""
    before = registry.snapshot()
    try:
        yield
    except (Exception, SystemExit) as error:
        registry.restore(before)
        what = str(error) if isinstance(error, UsageError) else f"it cannot be imported ({described(error)})."
        raise UsageError(
            f"{entry.name!r} of the package {package(entry)} cannot be used: {what} All else works; nothing was spent."
        ) from error
    except BaseException:
        registry.restore(before)
        raise
