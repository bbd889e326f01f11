from functools import lru_cache

import pytest
from machine import counted_once

from scaling.plan import candidates, guide


@pytest.fixture(autouse=True, scope="package")
def worked_out_once():
    """What the planner is asked, and a step on fake devices, are worked out once, whatever test asks."""
    with counted_once() as patch:
        for module in (candidates, guide):
            patch.setattr(module, "search", lru_cache(maxsize=None)(module.search))
        yield
