"""Each family of models on meshes, served, and out again; that its loss and gradients are those of Hugging Face's class
is in test_hugging_face.py, by the same table. A family is a row of FAMILIES."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from probes import shaken
from problems import rows_on, same
from safetensors.torch import load_file, save_file
from test_hugging_face import TABLE

from scaling import serve, tree
from scaling.configs import Config
from scaling.configs.hugging_face import read_config
from scaling.models import adapters, hf, transformer
from scaling.models.lora import Lora
from scaling.serve.requests import served_text
from scaling.serve.scheduler import refusal
from scaling.serve.states import Options, Request
from scaling.strategies import transformer as strategy

FAMILIES = (  # rows of the table
    "gemma", "granite tied, biases", "smollm3 windows", "phi3", "ernie 4.5", "phi3 part", "seed oss", "olmo2", "olmo3",
    "olmoe", "gemma3", "glm", "glm4", "starcoder2", "stablelm parallel", "gpt neox", "gpt neox in turn", "cohere",
    "cohere2", "exaone4", "llama mlp biases", "qwen2 moe", "granite moe", "gemma2", "gpt oss", "glm4 moe normed",
    "deepseek v2", "deepseek v2 lite", "cohere norms", "stablelm norms", "nemotron", "arcee", "vaultgemma", "hunyuan",
    "phi3 short", "phi3 long", "gpt2", "phi", "olmo", "olmoe clipped", "glm4 moe lite", "apertus",
    "llama4", "llama4 dense between",
)  # fmt: skip
LINEAR = "qwen3 next", "qwen3 next dense"  # whose steps and whose states are in test_linear_layers.py
ROWS = torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(3))
PROMPTS = [[5, 9, 11, 2, 40], [7], [1, 59, 3]]


@cache
def model(family: str) -> tuple[Config, dict]:
    """The family's small model, of a vocabulary that divides, with gains and scales that are not 1."""
    config = Config(family, **read_config(TABLE[family]["written"])).with_(V=60, dropout=0.0)
    config = config.with_(attention_dropout=0.0, embed_dropout=0.0)
    return config, shaken(config)


@cache
def alone(family: str) -> tuple[torch.Tensor, dict]:
    config, params = model(family)
    return transformer.loss_and_grads(params, ROWS[:, :-1], targets=ROWS[:, 1:], config=config)


def check_step(mesh, family: str, wanted: tuple, *whole, **options) -> None:
    """A step on the mesh, and the loss alone, of tokens, targets and maybe segments, beside one device's."""
    (config, params), (tokens, targets, *segments) = model(family), rows_on(mesh, *whole)
    own = strategy.shard(params, config, mesh, zero=options.get("zero", 3))
    given = {"segments": segments[0]} | options if segments else options
    loss, grads = strategy.loss_and_grads(own, tokens, targets, config, mesh, **given)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(strategy.unshard(grads, config, mesh), wanted[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(strategy.loss(own, tokens, targets, config, mesh, **given), wanted[0])


def in_turn(values_of: dict[str, list], new: tuple[str, ...]) -> list:
    """Rows of a value and a family: all for the sweep; for the suite one of each new family, in turn."""

    def row(turn: int, family: str, i: int, values: list):
        other = pytest.mark.sweep if family not in new or i != turn % len(values) else ()
        return pytest.param(values[i], family, marks=other, id=f"{family}, {values[i]}")

    return [row(n, family, i, each) for n, (family, each) in enumerate(values_of.items()) for i in range(len(each))]


MESHES = [{"X": 2, "Y": 2}, {"Z": 2, "C": 2}]
OF_EXPERTS = [{"E": 2, "C": 2}, {"E": 2, "Y": 2}]


def meshes_of(family: str) -> list[dict[str, int]]:
    config, _ = model(family)
    if isinstance(config.dense_layers, tuple):  # no stage stores them
        return [{"X": 2, "Y": 2}, *OF_EXPERTS]
    return MESHES + (OF_EXPERTS if config.moe else [])


@pytest.mark.parametrize(
    "options", [{"remat": "block", "microbatches": 2}, pytest.param({}, marks=pytest.mark.sweep)], ids=str
)
@pytest.mark.parametrize(
    ("mesh", "family"),
    in_turn({family: meshes_of(family) for family in FAMILIES}, FAMILIES),
)
def test_a_step_on_a_mesh_is_that_of_one_device(mesh, family, options):
    check_step(mesh, family, alone(family), ROWS[:, :-1], ROWS[:, 1:], **options)


def test_a_block_s_last_product_is_not_left_out_where_a_norm_reads_it():
    config, params = model("olmo2")
    with pytest.raises(ValueError, match="norms after blocks\n  fix: "):
        transformer.loss(params, ROWS, remat="matmuls", config=config)


@pytest.mark.parametrize("family", ["olmo2", "cohere2", "gemma3"])
@pytest.mark.parametrize("mesh", [{"X": 2, "Y": 2}], ids=str)
def test_a_step_that_keeps_products_alone(mesh, family):
    check_step(mesh, family, alone(family), ROWS[:, :-1], ROWS[:, 1:], remat="matmuls")


LONG = model("phi3 long")[0].with_(rope_scaling=replace(model("phi3 long")[0].rope_scaling, original=7))


@pytest.mark.parametrize("mesh", [{"X": 2, "Y": 2}, {"Z": 2, "C": 2}], ids=str)
def test_a_rank_s_part_of_a_long_text_has_the_factors_of_the_whole(mesh):
    params = model("phi3 long")[1]
    wanted = transformer.loss(params, ROWS[:, :-1], targets=ROWS[:, 1:], config=LONG)
    assert abs(wanted - alone("phi3 long")[0]) > 1e-6
    shards = rows_on(mesh, ROWS[:, :-1], ROWS[:, 1:])
    found = strategy.loss(strategy.shard(params, LONG, mesh), *shards, LONG, mesh)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


LEARNED = model("gpt2")[0].with_(learned_positions=7)
FEW = model("gpt2")[1] | {"positions": model("gpt2")[1]["positions"][:7]}
LIMITED = {"longrope": ("phi3 long", LONG, model("phi3 long")[1]), "learned": ("gpt2", LEARNED, FEW)}


@pytest.mark.parametrize("says", LIMITED)
def test_no_text_is_longer_than_its_positions(says):
    """Cached keys would have to be rotated anew by longrope, and each document would have its own factors."""
    family, config, params = LIMITED[says]
    assert serve.generate(params, PROMPTS, config, 3) == greedy(family, 3)  # 7 tokens are computed
    cache = serve.init_cache(config, 4, 20, dtype=torch.float64)
    options = Options(4, 16, longest=served_text(config))
    assert refusal(Request(0, (1, 2), 6), options) == "8 tokens with the completion, but only 7 fit"
    assert refusal(Request(0, (1, 2), 5), options) is None
    for long in (
        lambda: serve.generate(params, PROMPTS, config, 4),
        lambda: serve.prefill(params, ROWS, cache, config),
        lambda: transformer.loss(params, ROWS, config=config, segments=torch.zeros_like(ROWS)),
    ):
        with pytest.raises(ValueError, match=rf"(?s){says}.* 7.*\n  fix: "):
            long()


@pytest.mark.parametrize(
    ("mesh", "family"), [({"X": 2, "Y": 2}, "gpt2"), ({"Z": 2, "C": 2}, "gpt2"), ({"X": 2, "C": 2}, "llama4")], ids=str
)
def test_positions_and_chunks_start_again_with_each_document(mesh, family):
    config, params = model(family)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2, 2], [0] * 8, [0] * 6 + [1] * 2])
    whole = {"targets": ROWS[:, 1:], "segments": ids, "config": config}
    wanted = transformer.loss_and_grads(params, ROWS[:, :-1], **whole)
    check_step(mesh, family, wanted, ROWS[:, :-1], ROWS[:, 1:], ids, microbatches=2)
    first = transformer.forward(params, ROWS[1:2, 1:6], config=config)  # the document alone
    packed = transformer.forward(params, ROWS[1:2, :-1], config=config, segments=ids[1:2])[:, 1:6]
    torch.testing.assert_close(packed, first)


def test_a_published_gpt2_is_read_whose_names_lack_the_prefix(tmp_path):
    config, params = model("gpt2")
    hf.save(tmp_path, config, params)
    named = {name.removeprefix("transformer."): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    named |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    save_file(named, tmp_path / "model.safetensors")
    assert same(params, hf.load(tmp_path)[1])


def test_xielu_is_computed_with_its_own_constants_and_without_a_gate(tmp_path):
    config, params = model("apertus")
    hf.save(tmp_path, config, params)
    named = load_file(tmp_path / "model.safetensors")
    assert named["model.layers.1.mlp.act_fn.beta"] == 0.5
    save_file(named | {"model.layers.1.mlp.act_fn.beta": torch.tensor(0.25)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1\.mlp\.act_fn\.beta is 0\.25; only 0\.5 is computed here\n  fix: "):
        hf.load(tmp_path)
    assert transformer.uncomputed(config.with_(gated=True)) == ["a gate with xielu"]


def greedy(family: str, count: int) -> list[list[int]]:
    """The likeliest tokens, each by the whole text through one device's model."""
    config, params = model(family)
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(count):
            text.append(int(transformer.forward(params, torch.tensor([text]), config=config)[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
def test_its_greedy_tokens_and_its_checkpoint(family, tmp_path):
    """By a batch, by a lone row, which attends without a mask, and by the engine; written and read again to the bit."""
    (config, params), wanted = model(family), greedy(family, 6)
    assert serve.generate(params, PROMPTS, config, 6) == wanted
    assert serve.generate(params, PROMPTS[:1], config, 6) == wanted[:1]
    steps = [*serve.stream(params, PROMPTS, config, 6, serve.Sampling(), page=3)]
    assert [[t.id for step in steps for t in step if t.row == row] for row in range(3)] == wanted
    hf.save(tmp_path / "m", config, params)
    again, back = hf.load(tmp_path / "m")
    assert again == config.with_(name="m", source=again.source)
    assert same(params, back)
    table = json.loads((tmp_path / "m" / "config.json").read_text())
    assert table["architectures"] == TABLE[family]["written"]["architectures"]


@pytest.mark.parametrize("family", ["phi3", "ernie 4.5"])
def test_its_adapters_are_refused_where_the_files_order_params_otherwise(family, tmp_path):
    config, lora = model(family)[0], Lora(2, ("W_Q",), 4.0)
    with pytest.raises(ValueError, match=r"joined or in another order(.|\n)*fix: export without --adapters"):
        adapters.save(tmp_path / "peft", config, lora, adapters.init(config, lora))


def test_its_adapters_of_attention_are_read_where_its_experts_are_joined(tmp_path):
    config, lora = model("gpt oss")[0], Lora(2, ("W_Q", "W_O"), 4.0)
    own = adapters.init(config, lora)
    adapters.save(tmp_path / "peft", config, lora, own)
    again, read = adapters.load(tmp_path / "peft", config)
    assert again == lora
    assert same(read, own)
    with pytest.raises(ValueError, match="joined or in another order"):
        adapters.save(tmp_path / "peft", config, Lora(2, ("W_in",)), adapters.init(config, Lora(2, ("W_in",))))


FORMS = {"heads": "YZ", "heads_batch": "YZ", "sequence": "YZ"}  # each with its mesh's axes
OWN_DECODING = (  # what is new in decoding
    "olmo3", "cohere2", "gemma2", "gpt oss", "glm4 moe normed", "deepseek v2", "deepseek v2 lite", "cohere norms",
    "stablelm norms", "nemotron", "hunyuan", "olmo", "phi", "olmoe clipped", "llama4", "llama4 dense between",
)  # fmt: skip
SERVED = {family: [*FORMS, "experts" if model(family)[0].moe else "2d"] for family in FAMILIES}


def served(mesh, family: str, form: str = "heads", **how) -> list[list[int]]:
    config, params = model(family)
    own = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
    return serve.generate(own, PROMPTS, config, 6, mesh=mesh, form=form, **how)


@pytest.mark.parametrize(("form", "family"), in_turn(SERVED, OWN_DECODING))
def test_it_is_served_by_every_form(ranks, form, family):
    sizes = dict.fromkeys((FORMS | {"experts": "EY", "2d": "XY"})[form], 2)
    assert ranks(served, sizes, family, form) == [greedy(family, 6)] * 4


def test_a_sink_counts_once_where_no_rank_splits_the_sequence(ranks):
    assert ranks(served, {"Y": 2}, "gpt oss", "sequence") == [greedy("gpt oss", 6)] * 2
