"""Folders whose weights are stored in FP8 or MXFP4 with scales: read as values times scales, by shards, or refused."""

import json

import pytest
import torch

from scaling import tree
from scaling.configs import Config
from scaling.configs.quantized import weight_blocks
from scaling.mesh import AbstractMesh
from scaling.models import hf
from scaling.models import transformer as model
from scaling.models.leaves import specs_of

safetensors = pytest.importorskip("safetensors.torch")

SMALL = Config("small", 2, 192, 320, 4, 2, 48, 64)  # of blocks of 128 the last ones are smaller
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


def folder(path, kind, change=None):
    """A folder of this kind, and the tensors that it stands for."""
    config, name = KINDS[kind]
    hf.save(path, SMALL, model.init(SMALL, 0, torch.bfloat16))
    tensors, meant = safetensors.load_file(path / hf.SINGLE), {}
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
    safetensors.save_file((change or (lambda x: x))(tensors), path / hf.SINGLE)
    table = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(table))
    return meant


@pytest.mark.parametrize("kind", KINDS)
def test_read_as_values_times_scales(kind, tmp_path):
    meant = folder(tmp_path / "fp8", kind)
    config, params = hf.load(tmp_path / "fp8")
    assert tree.leaves(params)[0].dtype == torch.bfloat16
    hf.save(tmp_path / "wide", config, params)
    found = safetensors.load_file(tmp_path / "wide" / hf.SINGLE)
    assert found.keys() == meant.keys()
    for name in meant:
        assert torch.equal(found[name], meant[name]), name


def test_a_shard_is_read_as_that_of_the_whole(tmp_path):
    folder(tmp_path, "deepseek")
    config, whole = hf.load(tmp_path)
    mesh = AbstractMesh({"X": 2, "Y": 2})
    mesh.coord.update(X=1, Y=1)
    specs = specs_of(config) | {"layers": specs_of(config)["layers"] | {"W_in": "W_in[L, D_X, F_Y]"}}
    _, own = hf.load_sharded(tmp_path, specs, mesh, device="cpu")
    assert torch.equal(own["layers"]["W_in"], whole["layers"]["W_in"][:, 96:, 160:])


def test_scales_that_do_not_fit_are_refused(tmp_path):
    def halved(tensors):
        return {name: W[:1] if name.endswith("down_proj.weight_scale_inv") else W for name, W in tensors.items()}

    folder(tmp_path, "deepseek", halved)
    with pytest.raises(ValueError, match="has a scale for each block"):
        hf.load(tmp_path)


def test_experts_in_mxfp4_are_read_as_values_times_scales(tmp_path):
    """By the table of E2M1 and GPT-OSS's layout: a byte holds two neighbours along D, the first in its low bits."""
    config = SMALL.with_(V=60, D=64, F=32, H=16, E=4, k=2, sinks=True, expert_bias=True, clamp=7.0, output_bias=True)
    config = config.with_(attention_bias=True, window=(4, None), rope_scaling=None)
    hf.save(tmp_path, config, model.init(config, 0, torch.bfloat16))
    tensors, meant, g = safetensors.load_file(tmp_path / hf.SINGLE), {}, torch.Generator().manual_seed(0)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, D, F = tensors.pop(name).shape
        blocks = torch.randint(256, (E, F, D // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(110, 135, (E, F, D // 32), generator=g, dtype=torch.uint8)
        W = torch.cat([values, -values])[torch.stack([blocks % 16, blocks // 16], -1).long()].flatten(3)
        meant[name] = (W * 2.0 ** (scales.int() - 127)[..., None]).reshape(E, F, D).transpose(1, 2).bfloat16()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.save_file(tensors, tmp_path / hf.SINGLE)
    table = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    config, params = hf.load(tmp_path)
    hf.save(tmp_path / "wide", config, params)
    found = safetensors.load_file(tmp_path / "wide" / hf.SINGLE)
    assert all(torch.equal(found[name], W) for name, W in (tensors | meant).items() if name in found)
    assert {*meant} <= {*found}
    mesh = AbstractMesh({"X": 2, "Y": 2})
    mesh.coord.update(X=1, Y=1)
    specs = specs_of(config) | {"layers": specs_of(config)["layers"] | {"W_in": "W_in[L, E, D_X, F_Y]"}}
    own = hf.load_sharded(tmp_path, specs, mesh, device="cpu")[1]["layers"]["W_in"]
    assert torch.equal(own, params["layers"]["W_in"][:, :, 32:, 16:])


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
    table = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="quantization_config"):
        hf.load(tmp_path)
