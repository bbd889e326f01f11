"""Folders whose weights are stored in FP8 or MXFP4 with scales: read as values times scales, by shards, or refused;
folders of several dtypes, of dtypes in which no params are computed, and of sizes far beyond their files."""

import json
import re

import pytest
import torch
from probes import shaken
from safetensors.torch import load_file, save_file
from test_hugging_face import DEEPSEEK, MOE, SMALL, TOKENS

from scaling import tree
from scaling.configs import Config
from scaling.configs.model_types import weight_blocks
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models import transformer as model
from scaling.models.leaves import specs_of

BLOCKED = Config("small", 2, 192, 320, 4, 2, 48, 64)  # of blocks of 128 the last ones are smaller
GROUP = {"type": "float", "num_bits": 8, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
KINDS = {  # quantization_config, the scales' name
    "deepseek": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "_scale_inv"),
    "tensor": (COMPRESSED | {"config_groups": {"group_0": {"weights": GROUP | {"strategy": "tensor"}}}}, "_scale"),
    "channel": (COMPRESSED | {"config_groups": {"group_0": {"weights": GROUP | {"strategy": "channel"}}}}, "_scale"),
    "block": (
        COMPRESSED
        | {"config_groups": {"g": {"weights": GROUP | {"strategy": "block", "block_structure": [128, 128]}}}},
        "_scale",
    ),
}


def amend(folder, **changed) -> None:
    """Write other values into a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def check_slice(folder, type_: str, part: tuple) -> None:
    """W_in by shards of this type is this part of the whole."""
    (config, whole), mesh = hf.load(folder), AbstractMesh({"X": 2, "Y": 2})
    mesh.coord.update(X=1, Y=1)
    specs = specs_of(config) | {"layers": specs_of(config)["layers"] | {"W_in": type_}}
    _, own = hf.load_sharded(folder, specs, mesh, device="cpu")
    assert torch.equal(own["layers"]["W_in"], whole["layers"]["W_in"][part])


def folder(path, kind, change=None):
    """A folder of this kind, and the tensors that it stands for."""
    config, name = KINDS[kind]
    hf.save(path, BLOCKED, model.init(BLOCKED, 0, torch.bfloat16))
    tensors, meant = load_file(path / hf.SINGLE), {}
    for tensor, W in [*tensors.items()]:
        meant[tensor] = W
        if "_proj" not in tensor:
            continue
        rows, columns = {"tensor": W.shape, "channel": (1, W.shape[1])}.get(kind, (128, 128))
        q, scales = torch.empty_like(W, dtype=torch.float8_e4m3fn), []
        meant[tensor] = torch.empty_like(W)
        for i, some in enumerate(W.float().split(rows)):
            for j, block in enumerate(some.split(columns, 1)):
                s = block.abs().max() / 448
                at = slice(i * rows, i * rows + len(block)), slice(j * columns, j * columns + block.shape[1])
                q[at] = (block / s).to(torch.float8_e4m3fn)
                meant[tensor][at] = (q[at].float() * s).bfloat16()
                scales.append(s)
        shape = {"tensor": (1,), "channel": (len(W), 1)}.get(kind, (-(-len(W) // 128), -1))
        tensors |= {tensor: q, tensor + name: torch.stack(scales).reshape(shape)}
    save_file((change or (lambda x: x))(tensors), path / hf.SINGLE)
    amend(path, quantization_config=config)
    return meant


@pytest.mark.parametrize("kind", KINDS)
def test_read_as_values_times_scales(kind, tmp_path):
    meant = folder(tmp_path / "fp8", kind)
    config, params = hf.load(tmp_path / "fp8")
    assert tree.leaves(params)[0].dtype == torch.bfloat16
    hf.save(tmp_path / "wide", config, params)
    found = load_file(tmp_path / "wide" / hf.SINGLE)
    assert found.keys() == meant.keys()
    for name in meant:
        assert torch.equal(found[name], meant[name]), name


def test_a_shard_is_read_as_the_slice_of_the_whole(tmp_path):
    folder(tmp_path, "deepseek")
    check_slice(tmp_path, "W_in[L, D_X, F_Y]", (..., slice(96, None), slice(160, None)))


def test_scales_that_do_not_fit_are_refused(tmp_path):
    def halved(tensors):
        return {name: W[:1] if name.endswith("down_proj.weight_scale_inv") else W for name, W in tensors.items()}

    folder(tmp_path, "deepseek", halved)
    with pytest.raises(ValueError, match="has a scale for each block"):
        hf.load(tmp_path)


def test_experts_in_mxfp4_are_read_as_values_times_scales(tmp_path):
    """By the table of E2M1 and GPT-OSS's layout: a byte holds two neighbours along D, the first in its low bits."""
    config = BLOCKED.with_(V=60, D=64, F=32, H=16, E=4, k=2, sinks=True, expert_bias=True, clamp=7.0, output_bias=True)
    config = config.with_(attention_bias=True, window=(4, None), rope_scaling=None)
    hf.save(tmp_path, config, model.init(config, 0, torch.bfloat16))
    tensors, meant, g = load_file(tmp_path / hf.SINGLE), {}, torch.Generator().manual_seed(0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, D, F = tensors.pop(name).shape
        blocks = torch.randint(256, (E, F, D // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(110, 135, (E, F, D // 32), generator=g, dtype=torch.uint8)
        W = torch.cat([values, -values])[torch.stack([blocks % 16, blocks // 16], -1).long()].flatten(3)
        meant[name] = (W * 2.0 ** (scales.int() - 127)[..., None]).reshape(E, F, D).transpose(1, 2).bfloat16()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / hf.SINGLE)
    amend(tmp_path, quantization_config={"quant_method": "mxfp4"})
    config, params = hf.load(tmp_path)
    hf.save(tmp_path / "wide", config, params)
    found = load_file(tmp_path / "wide" / hf.SINGLE)
    assert all(torch.equal(found[name], W) for name, W in (tensors | meant).items() if name in found)
    assert {*meant} <= {*found}
    check_slice(tmp_path, "W_in[L, E, D_X, F_Y]", (..., slice(32, None), slice(16, None)))


@pytest.mark.parametrize("change", [
    {"quant_method": "mxfp4"},
    {"format": "pack-quantized"}, {"kv_cache_scheme": {"num_bits": 8}}, {"quant_method": "awq"},
    {"config_groups": {"g": {"weights": GROUP | {"num_bits": 4}}}},
    {"config_groups": {"g": {"weights": GROUP | {"strategy": "group"}}}},
])  # fmt: skip
def test_other_quantizations_are_refused(change, tmp_path):
    quantized = KINDS["channel"][0] | change
    assert weight_blocks(quantized) is None
    folder(tmp_path, "channel")
    amend(tmp_path, quantization_config=quantized)
    with pytest.raises(ValueError, match="quantization_config"):
        hf.load(tmp_path)


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
    file = tmp_path / "model.safetensors"
    hf.save(tmp_path, MOE, shaken(MOE))
    whole = load_file(file)
    for dtype, said in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")):
        save_file(whole | {"model.norm.weight": whole["model.norm.weight"].to(dtype)}, file)
        with pytest.raises(ValueError, match=rf"model\.norm\.weight is stored as {said}, in which.*\n  fix: "):
            hf.load(tmp_path)
    amend(tmp_path, num_hidden_layers=10**5, num_local_experts=10**5)
    with pytest.raises(ValueError, match=r"tensors; the sizes in config\.json give 30,000,700,003\n  fix: "):
        hf.load(tmp_path)
    amend(tmp_path, num_hidden_layers=10**9)
    with pytest.raises(ValueError, match=r"L is 1000000000: must be in \[1, 1e5\]\n  fix: "):
        hf.load(tmp_path)
