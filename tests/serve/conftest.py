import pytest


@pytest.fixture(scope="module")
def served():
    """The tiny model's server, for all tests of a file."""
    from http_server import running  # here: it needs the extras serve and test

    with running() as found:
        yield found
