"""The examples in the docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

from agent_reach.testing import simulation


def test_the_examples_in_the_docstrings_are_true() -> None:
    names = [module.name for module in pkgutil.iter_modules(simulation.__path__, f"{simulation.__name__}.")]
    modules = [simulation, *map(importlib.import_module, names)]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 8
    assert sum(result.failed for result in results) == 0


def test_everything_that_is_named_public_is_there() -> None:
    assert all(hasattr(simulation, name) for name in simulation.__all__)
    assert list(simulation.__all__) == sorted(simulation.__all__)
