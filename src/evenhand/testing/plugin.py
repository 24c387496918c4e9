"""The pytest plugin: ``conforms`` for a test of one line, and one test per check with ``@pytest.mark.conformance``.

Examples::

    def test_my_rule(conforms):
        conforms(MyRule())

    @pytest.mark.conformance(MyRule(), MyOtherRule())
    def test_my_rules(conformance):
        conformance()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, so that strict markers accept it."""
    config.addinivalue_line(
        "markers", "conformance(*parts): rules, queries or subjects that `conformance` is run on, one test per check"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test per marked part and check."""
    if "conformance" not in metafunc.fixturenames:
        return
    marked = [part for mark in metafunc.definition.iter_markers("conformance") for part in mark.args]
    if not marked:
        raise pytest.UsageError("conformance needs @pytest.mark.conformance(MyRule(), ...) above the test.")
    from evenhand.testing.conformance import CHECKS, assert_conforms
    from evenhand.testing.subjects import Subject

    parts = [Subject.of(part) for part in marked]
    tests = [(f"{part.name}-{name}", partial(assert_conforms, part, only=[name])) for part in parts for name in CHECKS]
    metafunc.parametrize("conformance", [test for _, test in tests], ids=[words for words, _ in tests])


@pytest.fixture
def conforms() -> Callable[..., None]:
    """Return ``evenhand.testing.assert_conforms``."""
    from evenhand.testing.conformance import assert_conforms

    return assert_conforms
