import functools

import pytest
import running


@pytest.fixture(scope="session")
def chapter():
    """`chapter("01_roofline")`: the chapter as run once for all tests (tests/book/running.py)."""
    return functools.cache(running.run)
