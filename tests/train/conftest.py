import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of models, tokenizers and data (tests/train/tokenized.py), for all tests of a file."""
    from tokenized import make  # here: it needs the library of tokenizers

    make(here := tmp_path_factory.mktemp("place"))
    return here
