import pytest
from grpo import write_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """(config, params) of the model in the working folder, beside prompts and a reward file."""
    monkeypatch.chdir(tmp_path)
    return write_folder()
