"""Loss and gradients beside stored numbers of Hugging Face's classes (tests/oracles/hugging_face.py), and checkpoints:
written and read whole and by shards, what is refused, and the page's table of what loads."""

import json
import re
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from probes import MORE, bound_of, of_bf16, probes, read_cases, shaken
from refused import evaluated, named, refused
from safetensors.torch import load_file, save_file

from scaling import serve, tree  # noqa: F401 - a call in UNWRITTEN names serve
from scaling.configs import Config, Latent, RopeScaling, load
from scaling.configs.gguf import ARCHITECTURES
from scaling.configs.hugging_face_write import write_config
from scaling.configs.model_types import KINDS
from scaling.cost import transformer as cost
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models.text import tokenizer_of
from scaling.spec import ShardingError
from scaling.strategies import transformer as strategy
from scaling.strategies.transformer.types import stored_places
from scaling.trace import trace

TABLE = json.loads((Path(__file__).parent / "hugging_face.json").read_text())
ERRORS = json.loads((Path(__file__).parent / "accuracy.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "a-real-model.md"
TOKENS = torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(0))
YARN = RopeScaling("yarn", 4.0, 1.0, 32.0, 16, mscale=0.8, mscale_all=1.2)
SMALL = Config("small", L=3, D=12, F=20, N=4, K=2, H=6, V=28)
MOE = SMALL.with_(name="moe", E=4, k=2)
LATENT = SMALL.with_(name="latent", K=4, latent=Latent(q_rank=8, kv_rank=6, nope=4, rope=2, value=6))
DEEPSEEK = LATENT.with_(name="deepseek", E=4, k=2, shared=2, routing="sigmoid", expert_groups=2, rope_scaling=YARN)


def config_from(table, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(table))
    return load(tmp_path / "config.json")


@pytest.mark.parametrize("name", TABLE)
def test_loss_and_gradients_are_hugging_faces(name, tmp_path):
    row = TABLE[name]
    config = config_from(row["written"], tmp_path)  # as transformers 5 writes it
    assert config_from(row["published"], tmp_path) == config
    grads, loss = torch.func.grad_and_value(transformer.loss)(shaken(config), TOKENS, config=config)
    assert loss.item() == pytest.approx(row["loss"], rel=1e-12)
    got = probes(grads)
    assert got.keys() == row["grads"].keys()
    for leaf, (norm, product) in row["grads"].items():
        assert got[leaf][0] == pytest.approx(norm, rel=1e-11), leaf
        assert got[leaf][1] == pytest.approx(product, rel=1e-11, abs=1e-11 * norm + 1e-15), leaf  # 0: keys' biases


@pytest.mark.parametrize("name", ERRORS)
def test_logits_in_bf16_are_as_near_to_float32_as_theirs(name, tmp_path):
    """The upper 95% bound of the mean of ours minus theirs, which the oracle stores, by prefill and decode."""
    ours, theirs = of_bf16(config_from(TABLE[name]["written"], tmp_path)), ERRORS[name]
    assert bound_of(ours, theirs) <= MORE.get(name, 0) * sum(theirs) / len(theirs)


@pytest.mark.parametrize("name", TABLE)
def test_the_planner_counts_the_params_of_each_family(name, tmp_path):
    config = config_from(TABLE[name]["written"], tmp_path)
    params = transformer.init(config, device="meta")
    assert cost.num_params(config) == sum(leaf.numel() for leaf in tree.leaves(params))


@pytest.mark.parametrize("config", [SMALL.with_(tied=True), MOE, LATENT, DEEPSEEK], ids=attrgetter("name"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_leave_and_return_to_the_bit(config, dtype, tmp_path):
    params = tree.map(lambda p: p.to(dtype), shaken(config))
    hf.save(tmp_path / "once", config, params)
    again, back = hf.load(tmp_path / "once")
    assert again == config.with_(name="once", source=again.source)
    assert all(tree.leaves(tree.map(lambda a, b: torch.equal(a, b) and a.dtype == b.dtype, params, back)))
    wide = tree.leaves(hf.load(tmp_path / "once", torch.float64)[1])
    assert {leaf.dtype for leaf in wide} == {torch.float64}
    with pytest.raises(ValueError, match=r"holds another checkpoint, model\.safetensors\n  fix: "):
        hf.save_sharded(tmp_path / "once", config, params, transformer.specs_of(config), AbstractMesh({}))


FSDP = {"W_Q": "W_Q[L, D_X, N_Y, H]", "W_K": "W_K[L, D_X, K_Y, H]", "W_O": "W_O[L, N_Y, H, D_X]"}
FSDP |= {"W_in": "W[L, D_X, F_Y]", "W_gate": "W[L, D_X, F_Y]", "W_out": "W[L, F_Y, D_X]", "norm_mlp": "g[L, D_XY]"}
STAGES = {name: spec.replace("L", "L_Z", 1) for name, spec in transformer.specs_of(SMALL)["layers"].items()}
STAGES |= {"W_V": "W_V[L_Z, D, K, H_Y]"}
EXPERTS = {"W_in": "W[L, E_X, D, F_Y]", "W_out": "W[L, E_YX, F, D]", "router": "r[L, D_Y, E_X]"}
# what: (mesh, config, its layers' types, a schedule)
CASES = named(
    """
what              mesh, config, its layers' types, schedule
FSDP, tensor      ({"X": 2, "Y": 2}, SMALL, FSDP, None)
stages, head dim  ({"Z": 2, "Y": 2}, SMALL.with_(L=4), STAGES, None)
experts           ({"X": 2, "Y": 2}, MOE, EXPERTS, None)
empty places      ({"Z": 2, "Y": 2}, MOE.with_(L=7, V=27), {}, "interleaved")
""",
    globals(),
)


@pytest.mark.parametrize(("mesh", "config", "types", "schedule"), CASES.values(), ids=CASES)
def test_shards_are_written_read_and_drawn_as_the_whole(mesh, config, types, schedule, tmp_path):
    """Where the layers lie in a schedule's order, with empty places, the vocabulary has some too."""
    folder, whole, specs, places = tmp_path / "shards", shaken(config), transformer.specs_of(config), {}
    specs |= {"layers": specs["layers"] | types}
    shard = partial(tree.shard, specs=specs, mesh=mesh)
    if schedule:
        specs, places = strategy.specs(config, mesh, schedule=schedule), stored_places(config, mesh, schedule)
        shard = partial(strategy.shard, config=config, mesh=mesh, schedule=schedule)
        assert {*places} == {"L", "V"}
        assert all(-1 in at for at in places.values())
    shards, drawn = shard(whole), shard(transformer.init(config, 5, torch.float64))
    with trace() as log:
        hf.save_sharded(folder, config, shards, specs, mesh, places=places)
    largest = max(leaf.nbytes // config.L for leaf in tree.leaves(whole["layers"]))
    assert max(event.nbytes for event in log.collectives()) <= max(largest, whole["embed"].nbytes)
    _, read = hf.load_sharded(folder, specs, mesh, places=places)
    made = transformer.init(config, 5, torch.float64, mesh=mesh, specs=specs, places=places)
    for found, wanted in ((read, shards), (made, drawn), (hf.load(folder)[1], whole)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(list(folder.glob("model-*.safetensors"))) == config.L + 1


BROKEN = {  # what is said: what stands in the file in place of some tensors
    r"lm_head\.weight is missing": {"lm_head.weight": None},
    r"layers\.0\.self_attn\.k_proj\.weight is missing \(and 1 more\)": {
        "model.layers.0.self_attn.k_proj.weight": None, "model.layers.2.self_attn.k_proj.weight": None
    },
    r"layers\.0\.self_attn\.q_proj\.bias is left over: m has no such tensor": {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(24)
    },
    r"layers\.2\.mlp\.down_proj\.weight is of shape \(20, 12\); the sizes in config\.json give \(12, 20\)": {
        "model.layers.2.mlp.down_proj.weight": torch.ones(20, 12)
    },
}  # fmt: skip
MISPLACED = {  # what is said: the file in which the index has a tensor
    r"has no model-00002\.safetensors": {"lm_head.weight": "model-00002.safetensors"},
    r"model-00001\.safetensors does not have lm_head\.bias": {"lm_head.bias": "model-00001.safetensors"},
}


def test_what_is_wrong_in_a_folder_is_named(tmp_path):
    """Tensors dropped, added and misshaped, files that are cut off, an index of others; not an old file's frequencies,
    nor a tied table that stands there twice."""
    folder, file = tmp_path / "m", tmp_path / "m" / "model.safetensors"

    def edit(file, tensors):
        left = load_file(file) | tensors
        save_file({name: tensor for name, tensor in left.items() if tensor is not None}, file)

    def refuses(folder, says):
        with pytest.raises(ValueError, match=says):
            hf.load(folder)

    hf.save(folder, SMALL, shaken(SMALL))
    whole = file.read_bytes()
    for says, tensors in BROKEN.items():
        edit(file, tensors)
        refuses(folder, says)
        file.write_bytes(whole)
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refuses(folder, r"model\.safetensors cannot be read.*\n  fix: download")
    file.write_bytes(whole)
    edit(file, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    hf.load(folder)
    specs = transformer.specs_of(SMALL)
    del specs["norm"]
    with pytest.raises(ShardingError, match=r'specs\["norm"\]: missing'):
        hf.load_sharded(folder, specs, AbstractMesh({}), device="cpu")
    where = dict.fromkeys(load_file(file), "model-00001.safetensors")
    file.rename(folder / "model-00001.safetensors")
    refuses(folder, r"has no model\.safetensors\n  fix: ")
    for says, wrong in MISPLACED.items():
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where | wrong}))
        refuses(folder, says)
    (folder / "config.json").unlink()
    refuses(folder, r"has no config\.json")

    hf.save(tmp_path, SMALL.with_(tied=True), shaken(SMALL.with_(tied=True)))
    file = tmp_path / "model.safetensors"
    twice = load_file(file)["model.embed_tokens.weight"]
    edit(file, {"lm_head.weight": twice.clone()})
    assert "unembed" not in hf.load(tmp_path)[1]
    edit(file, {"lm_head.weight": twice + 1})
    refuses(tmp_path, r"lm_head\.weight is left over")


def test_without_a_library_it_says_what_to_install(tmp_path, monkeypatch):
    hf.save(tmp_path, SMALL, shaken(SMALL))
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizer = partial(tokenizer_of, vocabulary=SMALL.V)
    for library, call in (("safetensors.torch", hf.load), ("tokenizers", tokenizer)):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=r"fix: pip install 'scaling-book-torch\[hf\]'"):
            call(tmp_path)


RANKS = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 3}
BASE = {"hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 20, "num_attention_heads": 4, "vocab_size": 28}
BASE |= {"num_key_value_heads": 4}
YARN_OF_KIND = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
# what is said: the config's table
TABLES = """
model_type 'bloom': bloom()
model_type 'deepseek_v32': deepseek_v32(RANKS, scoring_func='sigmoid')
latent attention with partial rotation: glm4_moe_lite(RANKS, partial_rotary_factor=0.5)
model_type 'kimi_k25': kimi_k25(text_config={'model_type': 'llama'} | BASE)
per_layer_config: llama(per_layer_config={'0': {'intermediate_size': 8}})
is_causal false: llama(is_causal=False)
a mixture of one expert: mixtral(num_local_experts=1, num_experts_per_tok=1)
rotary positions of 3 dims, an odd number: llama(head_dim=3)
latent attention with biases: deepseek_v3(RANKS, attention_bias=True)
rope_scaling of type 'dynamic': llama(rope_scaling={'type': 'dynamic', 'factor': 2.0})
of type 'by layer': llama(rope_parameters={'a': {'rope_type': 'default'}})
partial_rotary_factor 0.5: llama(partial_rotary_factor=0.5, rope_scaling={'type': 'linear', 'factor': 2.0})
partial_rotary_factor 0.75: olmo3(rope_parameters={'full_attention': YARN_OF_KIND
    | {'partial_rotary_factor': 0.75}, 'sliding_attention': {'rope_type': 'default'}})
partial_rotary_factor 0.25: gpt_oss(partial_rotary_factor=0.25, num_local_experts=4, sliding_window=5)
norms of heads with biases: phi(qk_layernorm=True)
quantization_config 'awq': llama(quantization_config={'quant_method': 'awq'})
hidden_act 'xielu': llama(hidden_act='xielu')
embedding_dropout=0.1: starcoder2(embedding_dropout=0.1)
"""
UNCOMPUTED = read_cases(TABLES, globals())


@pytest.mark.parametrize("says", UNCOMPUTED)
def test_what_is_not_computed_is_counted_and_refused_by_name(says, tmp_path):
    kind, table = UNCOMPUTED[says]
    config = config_from({"model_type": kind} | BASE | table, tmp_path)  # can be counted
    assert says in ", ".join(transformer.uncomputed(config))
    for refuses in (lambda: hf.load(tmp_path), lambda: transformer.init(config, device="meta")):
        with pytest.raises(ValueError, match=f"not computed here: .*{says}"):
            refuses()


NAMELESS = transformer.init(LATENT, device="meta")
X2, X4, Y2 = (AbstractMesh(sizes) for sizes in ({"X": 2}, {"X": 4}, {"Y": 2}))
UNWRITTEN = r"""
call                                                  words of its error
hf.save('', MOE.with_(gated=False), {})               no class of Hugging Face's has its gated
hf.save('', MOE.with_(shared=1), {})                  no class of Hugging Face's has its routing (nearest: glm4_moe)
hf.save('', MOE.with_(routing='sigmoid'), {})         no class of Hugging Face's has its routing
hf.save('', MOE.with_(capacity=1.0), {})              no class of Hugging Face's has its capacity
hf.save('', SMALL.with_(window=(2, None, 3)), {})     no class of Hugging Face's has its window
hf.save('', MOE.with_(window=(2, None, 2)), {})       no class of Hugging Face's has its window (nearest: mixtral)
hf.save('', DEEPSEEK.with_(window=2), {})             no class of Hugging Face's has its window (nearest: deepseek_v3)
LATENT.with_(H=5)                                     K=N=4 of them; got H=5, K=4\n  fix:
transformer.config_of_params(NAMELESS)                do not say how a head's dims are divided
strategy.specs(LATENT, X4)                            C=6 of the keys' and
strategy.specs(LATENT.with_(H=7, latent=Latent(8, 6, 4, 2, 7)), Y2)  is wider than its keys
serve.specs(LATENT, X2, form='2d')                    latent: the form "2d" has no latent
serve.cache_specs(LATENT, X2, form='2d')              the form "2d" has no latent attention
"""
test_what_is_not_written_and_a_latent_where_it_is_not_computed = refused(evaluated(UNWRITTEN, globals()))


WRITTEN = [  # what a class of transformers computes, in the forms that its defaults would change
    SMALL.with_(theta=30.0, eps=1e-3, tied=True, activation="gelu"),
    SMALL.with_(attention_bias=True, output_bias=True, rope_scaling=RopeScaling("llama3", 8.0, 2.0, 3.0, 99)),
    SMALL.with_(window=7), SMALL.with_(attention_bias=True, window=(None, 4, None)), SMALL.with_(qk_norm=True),
    MOE.with_(window=5), MOE.with_(k=1, qk_norm=True, norm_topk=False), MOE.with_(qk_norm=True, window=5),
    LATENT.with_(rope_scaling=RopeScaling("linear", 4.0, mscale_all=1.2)), DEEPSEEK.with_(norm_topk=False),
    DEEPSEEK.with_(dense_layers=1, F_dense=24, routed_scale=1.5, latent=Latent(8, 6, 4, 2, 6, interleaved=False)),
]  # fmt: skip


@pytest.mark.parametrize("config", WRITTEN)
def test_what_is_written_is_read_back(config, tmp_path):
    read = config_from(write_config(config), tmp_path)
    assert read == config.with_(name="config", source=read.source)
    assert transformer.uncomputed(read) == []


def test_published_configs(tmp_path):
    """What published folders say and leave out, by hand."""
    llama2 = {"model_type": "llama"} | BASE
    config = config_from(llama2, tmp_path)
    assert (config.theta, config.eps, config.K, config.H, config.rope_scaling) == (1e4, 1e-6, 4, 4, None)
    assert config_from(BASE, tmp_path) == config  # no class is named: read by its keys
    assert config_from({"model_type": "mistral"} | BASE, tmp_path).windows == (4096,) * 3
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2} | BASE
    assert config_from(qwen, tmp_path).windows == (None, None, 7)
    assert config_from(qwen | {"use_sliding_window": False}, tmp_path).window is None
    with pytest.raises(ValueError, match="rope_scaling of type 'llama3' lacks its factor"):
        config_from(llama2 | {"rope_scaling": {"rope_type": "llama3"}}, tmp_path)


def test_the_page_s_table_of_models_is_the_code_s():
    rows = re.findall(r"^\| (\w+) \| (\w+(?:ForCausalLM|LMHeadModel)) \|( yes)? \|$", PAGE.read_text(), re.MULTILINE)
    loads = {name: kind.architecture for name, kind in KINDS.items() if kind.architecture}
    assert {name: architecture for name, architecture, _ in rows} == loads
    assert {name for name, _, yes in rows if yes} == set(ARCHITECTURES)
