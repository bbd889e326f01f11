import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test stands in an empty folder of its own. Ranks that are used again do not: they are given whole paths."""
    monkeypatch.chdir(tmp_path)
