"""FILE.gguf, written by the library gguf from known params in llama.cpp's order, is read back; what is refused."""

import itertools
import json
from pathlib import Path

import numpy
import pytest
import torch
from probes import shaken
from refused import named, read_table

from scaling import tree
from scaling.configs import Config, RopeScaling, source_of
from scaling.configs.gguf import rope_scaling
from scaling.models import hf, rope
from scaling.models.template import chat_template, ends_of
from scaling.models.text import FromFile, tokenizer_of

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
from safetensors.torch import load_file  # noqa: E402

LLAMA = Config("small", L=2, D=32, F=64, N=4, K=2, H=8, V=270, theta=1e4)
QWEN2 = LLAMA.with_(attention_bias=True, tied=True)
QWEN3 = LLAMA.with_(qk_norm=True, H=16)
TOKENS = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 173)] + [chr(c) for c in range(174, 324)]
TOKENS += ["th", "Ġth", *(f"<x{i}>" for i in range(12))]  # 256 bytes, two merges, twelve specials
MERGES, TYPES = ["t h", "Ġ th"], [1] * 258 + [3] * 11 + [4]
TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"


def permuted(rows, heads):
    """As llama.cpp's convert_hf_to_gguf.py writes Llama's queries and keys."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def written(path, config, arch="llama", kind="F32", pre="gpt-2", leave=(), more=(), fields=(), texts=(), unsaid=()):
    """The config's shaken params as a file, their names by the library's own table."""
    hf.save(path.parent / "folder", config, tree.map(lambda p: p.float(), shaken(config)))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.L)
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": config.L, "embedding_length": config.D, "feed_forward_length": config.F}
    sizes |= {"head_count": config.N, "head_count_kv": config.K, "rope_freq_base": config.theta}
    if config.N * config.H != config.D:
        sizes |= {"key_length": config.H, "value_length": config.H}
    tokens = [*TOKENS[:258], *texts, *TOKENS[258 + len(texts) :]]
    of_text = {"tokenizer_model": "gpt2", "tokenizer_pre": pre, "token_list": tokens, "token_merges": MERGES}
    of_text |= {"token_types": TYPES, "bos_token_id": 258, "eos_token_id": 259, "chat_template": TEMPLATE}
    for field, value in (sizes | {"layer_norm_rms_eps": config.eps} | of_text).items():
        if field not in unsaid:
            getattr(writer, f"add_{field}")(value)
    adds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for key, value in fields:
        adds.get(type(value), writer.add_array)(key, value)
    tensors = load_file(path.parent / "folder" / "model.safetensors")
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        theirs, values = f"{names.get_name(base)}.{last}", tensor.numpy()
        for part, heads in ((".q_proj.", config.N), (".k_proj.", config.K)):
            if arch == "llama" and part in name:
                values = permuted(values, heads)
        if theirs in leave:
            continue
        kept = kind if values.ndim > 1 else "F32"
        quantization = gguf.GGMLQuantizationType[kept]
        writer.add_tensor(theirs, gguf.quantize(values, quantization), raw_dtype=quantization)
    for name, values in more:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def read(tmp_path, monkeypatch):
    """What `--model m.gguf` names, of a file that is written so; what is made of it stands in tmp_path / "cache"."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda config=LLAMA, **given: source_of(written(tmp_path / "m.gguf", config, **given))


@pytest.mark.parametrize(("arch", "config"), [("llama", LLAMA), ("qwen2", QWEN2), ("qwen3", QWEN3)])
@pytest.mark.parametrize(("kind", "off"), [("F32", 0.0), ("F16", 2e-3), ("Q4_1", 0.3)])
def test_a_file_is_the_model_that_was_written(arch, config, kind, off, tmp_path, read):
    source = read(config, arch=arch, kind=kind)
    kept, params = hf.load(source.folder)
    assert source.config == kept == config.with_(name="m", source=kept.source)
    assert source_of(tmp_path / "m.gguf", sizes_only=True).config == kept.with_(source=str(tmp_path / "m.gguf"))
    wanted = tree.named_leaves(hf.load(tmp_path / "folder")[1])
    for name, got in tree.named_leaves(params).items():
        assert (got - wanted[name]).abs().max() <= off * wanted[name].abs().max(), name


def test_tokenizer_ends_and_template(read):
    folder = read().folder
    tokenizer = tokenizer_of(folder, LLAMA.V)
    ids = tokenizer.encode("<x1>the <x11> th€")
    assert ids == [259, 256, TOKENS.index("e"), TOKENS.index("Ġ"), 269, 257, *(TOKENS.index(c) for c in "âĤ¬")]
    assert tokenizer.decode(ids) == "the <x11> th€"  # <x1> is special, and left out
    assert ends_of(folder) == (259,)
    assert (template := chat_template(folder)) is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<x0>hi<x1>"


PIECES = {  # of "I'LL pay 1234 €  now\n\n ok", by hand from the patterns that llama.cpp has under these names
    "gpt-2": "I|'|LL|Ġpay|Ġ1234|ĠâĤ¬|Ġ|Ġnow|ĊĊ|Ġok",
    "smollm": "I|'|LL|Ġpay|Ġ|1|2|3|4|ĠâĤ¬|Ġ|Ġnow|ĊĊ|Ġok",
    "qwen2": "I|'LL|Ġpay|Ġ|1|2|3|4|ĠâĤ¬|Ġ|Ġnow|ĊĊ|Ġok",
    "llama-bpe": "I|'LL|Ġpay|Ġ|123|4|ĠâĤ¬|Ġ|Ġnow|ĊĊ|Ġok",
}


@pytest.mark.parametrize("pre", PIECES)
def test_how_text_is_cut_and_begun(pre, read):
    tokenizer = tokenizer_of(read(pre=pre).folder, LLAMA.V)
    assert isinstance(tokenizer, FromFile)
    cut = tokenizer.loaded.pre_tokenizer.pre_tokenize_str("I'LL pay 1234 €  now\n\n ok")
    assert "|".join(piece for piece, _ in cut) == PIECES[pre]
    assert tokenizer.encode("th", special=True) == [258, 256] or pre != "llama-bpe"


def test_llama_3_1s_frequencies(read):
    """The factors that transformers divides by (modeling_rope_utils, llama3), one by one."""
    waves = 2 * numpy.pi * LLAMA.theta ** (numpy.arange(0, LLAMA.H, 2) / LLAMA.H)
    smooth = numpy.clip((8192 / waves - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / 32 + smooth)
    assert factors[0] == 1.0
    assert 1 < factors[-1] < 32
    source = read(more=[("rope_freqs.weight", factors.astype(numpy.float32))])
    assert source.config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def rotated(fields, position=37):
    """[cosines, sines] of a position's planes, by the formulas of ggml's rope_yarn and llama.cpp's context."""
    get = {key.removeprefix("llama.rope."): value for key, value in fields}.get
    factor = get("scaling.factor", get("scale_linear", 0.0)) or 1.0
    kind = get("scaling.type", "linear")
    scale = 1.0 if kind == "none" else 1 / factor
    frequencies = LLAMA.theta ** (-numpy.arange(0, LLAMA.H, 2) / LLAMA.H)
    angle, length = scale * position * frequencies, 1.0
    if kind == "yarn":
        original = get("scaling.original_context_length", 0) or get("context_length", 2048)
        turns = [LLAMA.H * numpy.log(original / (n * 2 * numpy.pi)) / (2 * numpy.log(LLAMA.theta)) for n in (32, 1)]
        low, high = max(0, numpy.floor(turns[0])), min(LLAMA.H - 1, numpy.ceil(turns[1]))
        ramp = 1 - numpy.clip((numpy.arange(LLAMA.H // 2) - low) / max(0.001, high - low), 0, 1)
        angle = angle * (1 - ramp) + position * frequencies * ramp
        length = 1 + 0.1 * numpy.log(factor) if factor > 1 else 1.0
    return length * numpy.cos(angle), length * numpy.sin(angle)


TYPES_OF_SCALING = [(), (("scaling.type", "none"),), (("scaling.type", "linear"),), (("scaling.type", "yarn"),)]
FACTORS = [(), (("scaling.factor", 4.0),), (("scale_linear", 3.0),), (("scaling.factor", 0.0),)]
FACTORS += [(("scaling.factor", 4.0), ("scale_linear", 3.0)), (("scaling.factor", 0.5),)]
CONTEXTS = [(), (("scaling.original_context_length", 20),), (("scaling.finetuned", True),)]


@pytest.mark.parametrize("kind", TYPES_OF_SCALING)
def test_scalings_are_llama_cpps(kind, tmp_path):
    """With every factor and context that may be missing, in both places where a factor may be."""
    for keys in itertools.product([kind], FACTORS, CONTEXTS):
        fields = {f"llama.rope.{key}": value for part in keys for key, value in part}
        table = {"model_type": "llama", "max_position_embeddings": 2048, "head_dim": LLAMA.H, "rope_theta": LLAMA.theta}
        scaling = RopeScaling.of(rope_scaling(tmp_path, fields, table, None) or {})
        cos, sin = rope.tables(torch.tensor([37]), LLAMA.H, LLAMA.theta, scaling)
        for ours, theirs in zip((cos, sin), rotated(fields.items()), strict=True):
            assert ours[0, LLAMA.H // 2 :].numpy() == pytest.approx(theirs, abs=1e-12), fields


def test_a_file_s_scaling_and_sizes_that_are_lists_are_read(read):
    fields = [("llama.rope.scale_linear", 3.0), ("llama.context_length", 99)]
    lists = [("llama.feed_forward_length", [64, 64]), ("llama.attention.head_count_kv", [2, 2])]
    config = read(fields=fields + lists, unsaid=("feed_forward_length", "head_count_kv")).config
    assert config == LLAMA.with_(name="m", source=config.source, rope_scaling=RopeScaling("linear", 3.0))
    assert config.max_positions == 99


# keys that llama.cpp does not read for llama, or whose values change nothing there
TABLE = """
key                                          value
llama.vocab_size                             300
llama.attention.sliding_window               4
llama.attention.key_length_swa               4
llama.rope.dimension_count_swa               4
llama.pooling_type                           1
llama.logit_scale                            3.0
llama.attention.scale                        2.0
llama.residual_scale                         2.0
llama.embedding_scale                        2.0
llama.expert_count                           0
llama.attention.causal                       True
llama.attention.key_length                   8
llama.attention.value_length                 8
llama.rope.dimension_count                   8
llama.rope.scaling.type                      "yarn"
llama.rope.scaling.finetuned                 True
llama.rope.scaling.attn_factor               1.0
nobody.knows                                 1
llama.rope.scaling.original_context_length   20
tokenizer.ggml.add_space_prefix              True
tokenizer.ggml.remove_extra_whitespaces      True
tokenizer.ggml.add_sep_token                 True
"""
IGNORED = read_table(TABLE, {}, ("key",))


def test_what_llama_cpp_ignores_changes_nothing(read, tmp_path):
    plain = Path(read().folder)
    other = Path(read(fields=IGNORED).folder)
    assert plain != other
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((plain / name).read_text()) == json.loads((other / name).read_text())


TABLE = """
tokens from id 258 on                                      ids that end               options
<x> <|endoftext|> <|im_end|> <|eot_id|> <end_of_turn>      [259, 260, 261, 262]
<|end|> <y> <reponame> <|fim_pad|> <|file_sep|>            [258, 259, 260, 261, 262]
<|end|> <y> <reponame> <|fim_pad|> <z>                     [258, 259, 262]            fim_pad=262, fim_rep=258
<|end|> <|return|> <|call|> <a>                            [259, 260]
<|end|> <|flush|> <|calls|> </s>                           [259, 260, 261, 262]       eom=262
<|end|> <|flush|> </s> <|tool_response>                    [258, 259, 261, 263]       eot=263
"""
ENDING = read_table(TABLE, {}, ("tokens from id 258 on",))


@pytest.mark.parametrize(("texts", "ids", "keys"), ENDING)
def test_ends_are_llama_cpps_by_key_and_by_text(texts, ids, keys, read):
    fields = [(f"tokenizer.ggml.{name}_token_id", id) for name, id in keys.items()]
    folder = read(texts=texts.split(), fields=fields).folder
    assert ends_of(folder) == tuple(ids)


def test_a_token_that_ends_is_a_control_token_whatever_the_file_says(read):
    folder = read(texts=[*(f"<{i}>" for i in range(11)), "<|im_end|>"]).folder  # of type 4, which is shown
    tokenizer = tokenizer_of(folder, LLAMA.V)
    assert tokenizer.encode("th<|im_end|>") == [256, 269]
    assert tokenizer.decode([256, 269]) == "th"


WIDE = {"leave": ["output_norm.weight"], "more": [("output_norm.weight", numpy.ones(32))]}  # float64
EXTRA = [("blk.0.attn_q_norm.weight", numpy.ones(8, numpy.float32))]
OTHER = [("rope_freqs.weight", numpy.array([1, 2, 3, 4], numpy.float32))]
# what is said: how the file is written
REFUSED = named(
    r"""
what is said                                                  how the file is written
llama\.cpp's architecture 'gemma'                             {"arch": "gemma"}
output_norm\.weight is quantized as F64, which the library gguf cannot read  WIDE
pre-tokenizer 'falcon'                                        {"pre": "falcon"}
lacks the tensor blk\.1\.ffn_up\.weight                       {"leave": ["blk.1.ffn_up.weight"]}
has, and its architecture has not, the tensor blk\.0\.attn_q_norm\.weight  {"more": EXTRA}
rope_freqs\.weight is of no scaling known here                {"more": OTHER}
4 experts, which is not read                                  {"fields": [("llama.expert_count", 4)]}
4 rotary dims of 8                                            {"fields": [("llama.rope.dimension_count", 4)]}
L is 1000000000: must be in .1, 1e5.
    { "fields": [("llama.block_count", 10**9)], "unsaid": ["block_count"], }
values of 4 dims beside keys of 8                             {"fields": [("llama.attention.value_length", 4)]}
attention that is not causal                                  {"fields": [("llama.attention.causal", False)]}
a rope\.scaling\.type 'ntk'                                   {"fields": [("llama.rope.scaling.type", "ntk")]}
a rope\.scaling\.attn_factor of 1\.5                          {"fields": [("llama.rope.scaling.attn_factor", 1.5)]}
the key llama\.rope\.scaling\.yarn_beta_fast                  {"fields": [("llama.rope.scaling.yarn_beta_fast", 8.0)]}
a scaling by 2\.0 beside rope_freqs\.weight
    {"fields": [("llama.rope.scale_linear", 2.0)], "more": OTHER}
has not, the tensor rope_freqs\.weight                        {"arch": "qwen2", "config": QWEN2, "more": OTHER}
llama\.feed_forward_length that differs among layers
    { "fields": [("llama.feed_forward_length", [64, 32])], "unsaid": ["feed_forward_length"], }
an end of text after each prompt                              {"fields": [("tokenizer.ggml.add_eos_token", True)]}
eot_token_id is not one of its 270 tokens                     {"fields": [("tokenizer.ggml.eot_token_id", 300)]}
""",
    globals(),
)


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_and_nothing_written(said, read, tmp_path):
    with pytest.raises(ValueError, match=rf"{said}(.|\n)*\n  fix: "):
        read(**REFUSED[said])
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_truncated_file_is_refused(tmp_path, read):
    whole = written(tmp_path / "m.gguf", LLAMA).read_bytes()
    at = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8  # its dims; then the type
    no_gguf = r"is truncated, or no GGUF file(.|\n)*\n  fix: "
    files = [(whole[: int(len(whole) * share)], no_gguf) for share in (0, 0.001, 0.1, 0.9999)]
    files += [(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :], r".*99(.|\n)*fix: .*pip install -U gguf")]
    for data, said in files:
        (tmp_path / "cut.gguf").write_bytes(data)
        with pytest.raises(ValueError, match=rf"cut\.gguf: {said}"):
            source_of(tmp_path / "cut.gguf")
    with pytest.raises(ValueError, match=r"none\.gguf: no such file\n  fix: "):
        source_of(tmp_path / "none.gguf")
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


def test_it_is_written_once(tmp_path, read):
    first = read().folder
    config = Path(first, "config.json")
    before = config.stat().st_mtime_ns
    assert source_of(tmp_path / "m.gguf").folder == first
    assert config.stat().st_mtime_ns == before
    assert json.loads(config.read_text())["rms_norm_eps"] == 1e-5
    assert read(LLAMA.with_(theta=5e5)).folder != first
