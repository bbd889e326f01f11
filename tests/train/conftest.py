import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test stands in an empty folder of its own. Ranks that are used again do not: they are given whole paths."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of models, tokenizers and data (tests/train/tokenized.py), for all tests of a file."""
    from tokenized import make  # here: it needs the library of tokenizers

    make(here := tmp_path_factory.mktemp("place"))
    return here
