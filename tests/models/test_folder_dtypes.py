"""Folders of several dtypes, of dtypes in which no params are computed, and of sizes far beyond their files."""

import json
import re

import pytest
import torch
from probes import shaken
from safetensors.torch import load_file, save_file
from test_hugging_face import DEEPSEEK, MOE, SMALL, TOKENS

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
MIXED = {  # what is not stored in bfloat16: (a config, a pattern of its tensors' names, their dtype, the params')
    "norms": (SMALL, "norm", F32, F32),
    "a later layer": (SMALL, r"layers\.2\..*down_proj", F32, F32),
    "no dtype holds the other": (MOE, r"layers\.0\.", F16, F32),
    "a router's bias alone": (DEEPSEEK, "e_score", F32, BF16),
}


@pytest.mark.parametrize(("config", "names", "stored", "held"), MIXED.values(), ids=MIXED)
def test_several_dtypes_of_a_folder_are_read_in_one_that_holds_them(config, names, stored, held, tmp_path):
    file = tmp_path / "model.safetensors"
    hf.save(tmp_path, config, tree.map(lambda p: p.to(BF16), shaken(config)))
    kept = {name: tensor.to(stored) if re.search(names, name) else tensor for name, tensor in load_file(file).items()}
    save_file({n: t * 1e30 if "down_proj" in n and stored == F32 else t for n, t in kept.items()}, file)
    read, params = hf.load(tmp_path)
    assert {leaf.dtype for name, leaf in tree.named_leaves(params).items() if '"bias"' not in name} == {held}
    assert all(
        tree.leaves(tree.map(lambda a, b: torch.equal(a.double(), b), params, hf.load(tmp_path, torch.float64)[1]))
    )
    assert transformer.forward(params, TOKENS % config.V, config=read).dtype == held
    specs = tree.map(lambda spec: spec.replace("D", "D_X", 1), transformer.specs_of(config))
    shards = hf.load_sharded(tmp_path, specs, AbstractMesh({"X": 2}), device="cpu")[1]
    assert [a.dtype for a in tree.leaves(shards)] == [a.dtype for a in tree.leaves(params)]


def test_what_no_params_are_computed_in_is_refused_and_so_are_sizes_far_beyond_the_files(tmp_path):
    file, table = tmp_path / "model.safetensors", tmp_path / "config.json"
    hf.save(tmp_path, MOE, shaken(MOE))
    whole = load_file(file)
    for dtype, said in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")):
        save_file(whole | {"model.norm.weight": whole["model.norm.weight"].to(dtype)}, file)
        with pytest.raises(ValueError, match=rf"model\.norm\.weight is stored as {said}, in which.*\n  fix: "):
            hf.load(tmp_path)
    sizes = {"num_hidden_layers": 10**5, "num_local_experts": 10**5}
    table.write_text(json.dumps(json.loads(table.read_text()) | sizes))
    with pytest.raises(ValueError, match=r"tensors; the sizes in config\.json give 30,000,700,003\n  fix: "):
        hf.load(tmp_path)
    table.write_text(json.dumps(json.loads(table.read_text()) | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"L is 1000000000: must be in \[1, 1e5\]\n  fix: "):
        hf.load(tmp_path)
