"""The page's table of models that load is the code's; and weights that cannot be read are refused in words."""

import re
from pathlib import Path

import pytest
from probes import shaken

from scaling import tree
from scaling.configs import Config
from scaling.configs.gguf import ARCHITECTURES
from scaling.configs.hugging_face import KINDS
from scaling.models import hf

PAGE = Path(__file__).parents[2] / "docs" / "a-real-model.md"
CONFIG = Config("small", L=2, D=12, F=20, N=4, K=2, H=6, V=28)


def test_the_table_of_models_is_the_codes():
    rows = re.findall(r"^\| (\w+) \| (\w+ForCausalLM) \|( yes)? \|$", PAGE.read_text(), re.MULTILINE)
    loads = {name: kind.architecture for name, kind in KINDS.items() if kind.architecture}
    assert {name: architecture for name, architecture, _ in rows} == loads
    assert {name for name, _, yes in rows if yes} == set(ARCHITECTURES)


def test_broken_weights_are_refused(tmp_path):
    hf.save(tmp_path, CONFIG, tree.map(lambda p: p.float(), shaken(CONFIG)))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*\n  fix: download"):
            hf.load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors\n  fix: "):
        hf.load(tmp_path)
