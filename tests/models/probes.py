"""Params, short tables of gradients, and what Hugging Face's classes say of a config, for tests that compare."""

import contextlib
import json
import re
import shutil
import warnings

import torch
import torch.nn.functional as F

from scaling import serve, tree
from scaling.book.arrays import largest
from scaling.configs import load
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer


def read_cases(text: str, names: dict) -> dict[str, tuple[str, dict]]:
    """{name: (kind, options)} of lines `name: kind(options)`, or `kind(options)`; indented, they go on."""
    found = {}
    for line in text.strip().replace("\n    ", " ").split("\n"):
        name, kind, options = re.fullmatch(r"(?:(.+?): )?(\w+)\((.*)\)", line).groups()
        found[name or kind] = kind, eval(f"dict({options})", names)
    return found


def shaken(config):
    """Params of which no gain is 1 and no bias 0."""
    specs = transformer.specs_of(config)
    noise = tree.map(lambda _: tree.Normal(0.1), specs)
    more = tree.init(noise, specs, config.sizes, AbstractMesh({}), 4, torch.float64, "cpu")
    return tree.map(torch.add, first_drawn(config, 3, torch.float64), more)


def first_drawn(config, seed: int, dtype: torch.dtype) -> dict:
    """Params as they were drawn when other programs' answers were stored: a tied embedding had a variance of 1."""
    params = transformer.init(config, seed, dtype)
    return params | {"embed": params["embed"] * config.D**0.5} if config.tied else params


def probes(grads) -> dict[str, list[float]]:
    """Two numbers a leaf, of which any change in it changes one: its norm, and its product with a fixed vector."""
    found = {}
    for name, leaf in tree.named_leaves(grads, "").items():
        along = torch.arange(leaf.numel(), dtype=leaf.dtype).cos()
        found[name] = [leaf.norm().item(), (leaf.flatten() @ along).item()]
    return found


MORE = {"starcoder2": 0.1}  # all its products have biases, which they add before a product is rounded, and we after it
TEXTS = torch.randint(61, (128, 16), generator=torch.Generator().manual_seed(0))


def rounded(config) -> dict:
    """Params in bfloat16."""
    return tree.map(lambda p: p.to(torch.bfloat16), shaken(config))


def of_bf16(config) -> list[float]:
    """Each text's error of logits in bfloat16: half of the text by prefill, and the other by decode steps."""
    params, found = rounded(config), []
    for dtype in (torch.bfloat16, torch.float32):
        own = tree.map(lambda p, dtype=dtype: p.to(dtype), params)
        half, cache = TEXTS.shape[1] // 2, serve.init_cache(config, *TEXTS.shape)
        logits, cache = serve.extend(own, TEXTS[:, :half], cache, config, donate=True)
        steps = [logits]
        for tokens in TEXTS[:, half:].T:
            logits, cache = serve.decode(own, tokens, cache, config, donate=True)
            steps.append(logits[:, None])
        found.append(torch.cat(steps, 1))
    return relative_errors(*found)


def relative_errors(low, wide) -> list[float]:
    """The norm of the difference of each text's logits[B, T, V], over that of the wider ones."""
    low, wide = low.double().flatten(1), wide.double().flatten(1)
    return ((low - wide).norm(dim=1) / wide.norm(dim=1)).tolist()


def bound_of(ours, theirs) -> float:
    """The upper end of the one-sided 95% interval of the mean of ours minus theirs, text by text.

    A text in which a rounding chooses other experts has several times the usual error: it is left out."""
    both = torch.tensor([ours, theirs], dtype=torch.float64)
    usual = (both < 2 * both.median(1, keepdim=True).values).all(0)
    more = both[0, usual] - both[1, usual]
    return (more.mean() + 1.645 * more.std() / len(more) ** 0.5).item()


@contextlib.contextmanager
def wide():
    """The casts to float32 of Hugging Face's classes are casts to float64."""
    kept = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32 = torch.float = kept[0]
        torch.Tensor.float = kept[1]
        torch.set_default_dtype(kept[0])


def outcome(table: dict, folder, whole: bool = False) -> tuple[str, str]:
    """("equal" | "both refuse" | "refused here" | "refused there" | "DIFFER" | "BROKEN", what was said).

    In float64. With `whole`, loss, gradients, greedy tokens and what is exported are compared, too.
    """
    import transformers

    tokens = torch.arange(24)[None] * 7 % 11
    for path in folder.iterdir():
        path.unlink()
    (folder / "config.json").write_text(json.dumps(table))
    try:
        with wide(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder)
            config._experts_implementation = "eager"  # the others ask for widths of a multiple of 16 bytes
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
            generator = torch.Generator().manual_seed(0)
            biases = [b for n, b in model.named_buffers() if n.endswith("_bias")]
            with torch.no_grad():
                for weight in (*model.parameters(), *biases):
                    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                    weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5 + (weight.ndim == 1))
            tokens = tokens % model.config.vocab_size
            model.get_input_embeddings().padding_idx = None  # whose row has no gradient there
            there = model(tokens).logits
            wanted = F.cross_entropy(there[0, :-1], tokens[0, 1:])
            model.save_pretrained(folder)
    except Exception as error:  # whatever a class says of a config that it cannot read
        return _alone(folder, table, f"{type(error).__name__}: {str(error)[:80]}")
    (folder / "config.json").write_text(json.dumps(table))
    try:
        config, params = hf.load(folder)
        here = transformer.forward(params, tokens, config=config)
        size = there.abs().max().item() or 1.0  # a LayerNorm of one number is 0
        if config.V == 1:  # a lone logit may be small by chance, beside the terms of which it is the sum
            size = largest((size, params["embed"].norm().item()))
        apart = {"logits": (here - there).abs().max().item() / size / 1e-12}
        if whole:
            apart |= more_apart(model, there.detach(), wanted, biases, config, params, tokens, folder)
    except ValueError as error:
        return ("refused here" if "\n  fix: " in str(error) else "BROKEN"), str(error)
    except Exception as error:
        return "BROKEN", f"{type(error).__name__}: {error}"
    return ("equal" if all(each < 1 for each in apart.values()) else "DIFFER"), str(apart)


def more_apart(model, there, wanted, biases: list, config, params: dict, tokens, folder) -> dict[str, float]:
    """How far loss, gradients, greedy tokens and the exported model are apart, in units of what is let pass."""
    import transformers

    grads, loss = torch.func.grad_and_value(transformer.loss)(params, tokens, config=config)
    wanted.backward()
    table = (folder / "config.json").read_text()
    with torch.no_grad():
        for p in (*model.parameters(), *biases):
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        model.save_pretrained(folder)
    (folder / "config.json").write_text(table)
    pairs = [*zip(tree.leaves(grads), tree.leaves(hf.load(folder)[1]), strict=True)]
    sizes = [b.abs().amax().item() for _, b in pairs]
    least = 1e-3 * largest(sizes)
    far = [(a - b).abs().amax().item() / largest((size, least)) for (a, b), size in zip(pairs, sizes, strict=True)]
    hf.save(folder / "out", config, params)
    back = hf.load(folder / "out")[1]
    with wide():
        written = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "out", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.no_grad():
            exported = (written(tokens).logits - there).abs().max().item() / (there.abs().max().item() or 1.0)
    shutil.rmtree(folder / "out")
    text = tokens[0, :7].tolist()
    for _ in range(4):
        text.append(int(transformer.forward(params, torch.tensor([text]), config=config)[0, -1].argmax()))
    same = all(map(torch.equal, tree.leaves(params), tree.leaves(back)))
    return {
        "loss": abs(loss.item() / wanted.item() - 1) / 1e-12, "gradients": largest(far) / 1e-10,
        "export": exported / 1e-12,
        "class": 2.0 * (written.config.model_type != config.model_type),
        "reload": 2.0 * (not same), "tokens": 2.0 * (serve.generate(params, [text[:7]], config, 4)[0] != text[7:]),
    }  # fmt: skip


def _alone(folder, table: dict, said: str) -> tuple[str, str]:
    """What is said here of a config that transformers refuses."""
    try:
        config = load(folder / "config.json")
        return ("both refuse" if transformer.uncomputed(config) else "refused there"), said
    except ValueError as error:
        return ("both refuse" if "\n  fix: " in str(error) else "BROKEN"), f"{said} | {error}"
    except Exception as error:
        return "BROKEN", f"{type(error).__name__}: {error}"
