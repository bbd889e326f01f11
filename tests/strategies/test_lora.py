"""Low-rank adapters beside one device, whose autograd differentiates W + s A B, and beside PEFT: losses, gradients of A
and B, merged weights. Nothing else has a gradient, and no product is as large as that of a whole matrix's gradient."""

import json
import re

import pytest
import torch
from problems import close, rows_on
from refused import named, read_table

from scaling import tree
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh
from scaling.models import adapters, hf
from scaling.models import transformer as model
from scaling.models.lora import MATRICES, Lora, rounding_note
from scaling.spec import ShardingError
from scaling.strategies import transformer
from scaling.trace import trace

PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
RICH = PLAIN.with_(name="rich", attention_bias=True, qk_norm=True, tied=True, window=(None, 5))
QWEN = PLAIN.with_(name="qwen", qk_norm=True, tied=True)
EXPERTS = PLAIN.with_(name="experts", E=4, k=2, aux_coef=0.1)
GATED = PLAIN.with_(name="gated", head_gate=True)
LATENT = PLAIN.with_(name="latent", K=4, theta=1e4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
UNRANKED = LATENT.with_(name="unranked", latent=Latent(q_rank=0, kv_rank=10, nope=6, rope=4, value=8))
DEEP = LATENT.with_(name="deep", E=4, k=2, shared=1, routing="sigmoid", norm_topk=True)
FIRST = DEEP.with_(name="first", L=3, dense_layers=1, F_dense=20)
BETWEEN = FIRST.with_(name="between", dense_layers=(1,))
EVERY = Lora(3, ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out"), 6.0)
ALL = Lora(3, tuple(name for name in MATRICES if name not in ("W_Q", "W_K", "W_V", "W_G")), 6.0)
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TABLE = """
config                       lora                        mesh     options
PLAIN                        EVERY                       X=1
PLAIN                        EVERY                       X=2      microbatches=2
# two ranks share a KV head
PLAIN                        EVERY                       Y=4      remat="block"
RICH                         EVERY                       X=2,Y=2  keep_weights=True
RICH.with_(gated=False)      Lora(2, ("W_in", "W_K"))    C=2,Y=2  microbatches=2, scale=64.0
PLAIN                        Lora(4, ("W_Q", "W_V"))     P=2,X=2
EXPERTS                      Lora(2, ("W_Q", "W_O"))     X=2,E=2
EXPERTS                      EVERY                       X=2,E=2
EXPERTS                      EVERY                       E=2,Y=2  remat="block"
EXPERTS.with_(aux_coef=0.0)  Lora(2, ("W_out", "W_Q"))   P=2,C=2
DEEP                         ALL                         E=2,Y=2
BETWEEN                      ALL                         X=2,E=2  microbatches=2
FIRST                        ALL                         X=2,Y=2  remat="block"
PLAIN                        EVERY                       Z=2      microbatches=2
GATED                        Lora(2, ("W_G",))           X=2,Y=2
LATENT                       ALL                         X=2,Y=2
LATENT                       ALL                         C=2,Y=2  microbatches=2, remat="block"
UNRANKED                     Lora(2, ("W_UQ", "W_DKV"))  P=2,X=2  remat="matmuls"
LATENT                       ALL                         Z=2,Y=2  microbatches=2
RICH                         EVERY                       Z=2,X=2  microbatches=4, schedule="gpipe"
EXPERTS.with_(aux_coef=0.0)  EVERY                       Z=2,Y=2  microbatches=2, remat="block"
"""
CASES = read_table(TABLE, globals())


def drawn(config, lora):
    """Params, adapters that change something, and a batch."""
    params, own = model.init(config, 0, torch.float64), adapters.init(config, lora, 1, torch.float64)
    g = torch.Generator().manual_seed(2)
    own = tree.map(lambda W: W + 0.1 * torch.randn(W.shape, dtype=W.dtype, generator=g), own)
    tokens, targets = torch.randint(0, config.V, (2, 8, 16), generator=g)
    targets[torch.rand(targets.shape, generator=g) < 0.2] = -100
    return params, own, tokens, targets


def one_device(config, lora):
    params, own, tokens, targets = drawn(config, lora)
    own = tree.map(torch.Tensor.requires_grad_, own)
    for stack, matrices in own.items():
        params[stack] = params[stack] | {
            name: params[stack][name] + lora.alpha / lora.rank
            * (A @ B if A.dim() == B.dim() == 4 else A.flatten(1, -2) @ B.flatten(2)).view(params[stack][name].shape)
            for name, (A, B) in ((name, (each["A"], each["B"])) for name, each in matrices.items())
        }  # fmt: skip
    loss = model.loss(params, tokens, config=config, targets=targets)
    grads = torch.autograd.grad(loss, tree.leaves(own))
    return loss.detach(), tree.unflatten(own, grads), tree.map(torch.Tensor.detach, params)


def on_mesh(mesh, config, lora, options):
    params, own, tokens, targets = drawn(config, lora)
    zero = options.get("zero", 3)
    types = transformer.specs(config, mesh, zero=zero, lora=lora)
    held = transformer.shard(params, config, mesh, zero=zero)
    held |= {"lora": tree.shard(own, types["lora"], mesh)}
    tokens, targets = rows_on(mesh, tokens, targets)
    with trace() as log:
        loss, grads = transformer.loss_and_grads(held, tokens, targets, config, mesh, lora=lora, **options)
    without = {name: value for name, value in options.items() if name == "zero"}
    alone = transformer.loss(held, tokens, targets, config, mesh, lora=lora, **without)
    whole = adapters.merged({n: W for n, W in held.items() if n != "lora"}, held["lora"], lora, config, types)
    made = {str(event.after) for event in log.events}
    assert not [line for line in made if line.startswith(tuple(f"d{name}[" for name in (*MATRICES, "U", "E")))]
    return (
        loss,
        alone,
        tree.unshard(grads, {"lora": types["lora"]}, mesh),
        transformer.unshard(whole, config, mesh, zero=zero),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "config", "lora", "options"),
    [pytest.param(sizes, *own, options, id=f"{own[0].name} {sizes}") for *own, sizes, options in CASES],
)
def test_adapters_train_as_on_one_device(mesh, config, lora, options):
    wanted, grads, params = one_device(config, lora)
    loss, alone, found, merged = on_mesh(mesh, config, lora, options)
    close([loss, alone], [wanted, wanted])
    close(found, {"lora": grads})
    close(merged, params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which tests write."""
    return tmp_path_factory.mktemp("model")


def test_adapter_files_are_read_as_they_were_written(folder):
    _, own, *_ = drawn(QWEN, EVERY)
    adapters.save(folder / "adapter", QWEN, EVERY, own, base=str(folder))
    lora, again = adapters.load(folder / "adapter", QWEN)
    assert lora == EVERY
    close(again, own, 1e-300)


WRONG = named(
    """
words                             change
peft_type='IA3'                   {"peft_type": "IA3"}
use_dora=True                     {"use_dora": True}
modules_to_save=['lm_head']       {"modules_to_save": ["lm_head"]}
is of shape (3, 16), not (4, 16)  {"r": 4}
""",
    globals(),
)


@pytest.mark.parametrize("said", WRONG)
def test_adapters_that_are_not_computed_are_refused(folder, said):
    adapters.save(folder / "wrong", QWEN, EVERY, drawn(QWEN, EVERY)[1])
    path = folder / "wrong" / adapters.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | WRONG[said]))
    with pytest.raises(ValueError, match=re.escape(said)):
        adapters.load(folder / "wrong", QWEN)


def test_adapters_of_another_model_are_refused(folder):
    adapters.save(folder / "deep", PLAIN.with_(L=3), EVERY, drawn(PLAIN.with_(L=3), EVERY)[1])
    for config, said in (
        (PLAIN, "layers.2.mlp.down_proj.lora_A.weight is left over"),
        (PLAIN.with_(L=4), "is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            adapters.load(folder / "deep", config)
    for config, lora, said in (
        (DEEP, EVERY, "no adapter is computed for W_Q"),
        (PLAIN.with_(gated=False), EVERY, "no adapter is computed for W_gate"),
        (PLAIN, Lora(2, ("W_Q", "W_Q")), "each matrix once"),
        (PLAIN, Lora(0), "a rank of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            transformer.specs(config, AbstractMesh({"X": 2}), lora=lora)
    staged = (PLAIN.with_(L=3), {}), (PLAIN.with_(L=4), {"schedule": "interleaved"}), (PLAIN, {"zero": 1}), (FIRST, {})
    for config, how in staged:
        with pytest.raises(ShardingError, match="as many on each stage Z"):
            transformer.specs(config, AbstractMesh({"Z": 2}), lora=Lora(2, ("W_O",)), **how)


@pytest.mark.parametrize(("size", "lost"), [(1e-3, 0.78), (1e-2, 0.17), (1e-1, 0.02)])
def test_the_warning_of_rounding_says_what_is_lost(size, lost):
    g = torch.Generator().manual_seed(0)
    config = PLAIN.with_(L=1, D=512, N=8, K=8, H=64)
    W = model.init(config, 0, torch.bfloat16)
    on = Lora(8, ("W_Q",), 8.0)
    own = adapters.init(config, on, 1, torch.float64)
    B = torch.randn(1, 8, 8, 64, generator=g, dtype=torch.float64)
    A, plain = own["layers"]["W_Q"]["A"].flatten(0, -2), W["layers"]["W_Q"].double()
    B *= size * plain.std() / (A @ B.flatten(2)[0]).std()
    own["layers"]["W_Q"]["B"] = B
    exact = (A @ B.flatten(2)[0]).view(plain.shape)
    low = tree.map(torch.Tensor.bfloat16, own)
    error = adapters.merged(W, low, on, config)["layers"]["W_Q"].double() - plain - exact
    assert (error.norm() / exact.norm()).item() == pytest.approx(lost, abs=0.02)
    assert f"{lost:.0%}" in rounding_note(on, "bf16")
    assert max(map(len, f"warning: {rounding_note(on, 'bf16')}".splitlines())) <= 100
    assert rounding_note(on, "fp32") == rounding_note(None, "bf16") == ""


LATENTS = Lora(3, ALL.on[:5], 6.0)
PEFTS = pytest.mark.parametrize(("config", "on"), [(QWEN, EVERY), (FIRST, LATENTS)], ids=["qwen", "deep"])


def of_peft(folder, config, on, params, own):
    """PEFT's model around transformers', of these weights and adapters."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    hf.save(folder, config, params)
    adapters.save(folder / "theirs", config, on, own, base=str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER)
    return peft.PeftModel.from_pretrained(base, folder / "theirs", is_trainable=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@PEFTS
def test_adapters_are_pefts(config, on, folder, monkeypatch):
    """Logits, gradients and files. Their casts to float32 are casts to float64."""
    params, own, tokens, targets = drawn(config, on)
    for place, name in ((torch, "float32"), (torch, "float")):
        monkeypatch.setattr(place, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    theirs = of_peft(folder, config, on, params, own)
    logits = theirs(tokens).logits
    merged = adapters.merged(params, own, on, config)
    close([model.forward(merged, tokens, config=config)], [logits.detach()])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    theirs.save_pretrained(folder / "again")
    lora, read = adapters.load(folder / "again", config)
    assert lora == on
    close(read, own)
    for W in theirs.parameters():
        W.data = W.grad if W.grad is not None else W.data
    theirs.save_pretrained(folder / "gradients")
    close(adapters.load(folder / "gradients", config)[1], one_device(config, on)[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("config", "on"), [(QWEN, EVERY), (FIRST, ALL), (EXPERTS, EVERY)], ids=["qwen", "deep", "experts"]
)
def test_merged_weights_are_pefts(config, on, folder):
    params, own, *_ = drawn(config, on)
    of_peft(folder, config, on, params, own).merge_and_unload().save_pretrained(folder / "merged")
    found, wanted = hf.load(folder / "merged")[1], adapters.merged(params, own, on, config)
    close(*({name: each[stack][name] for stack in own for name in on.on} for each in (found, wanted)))
