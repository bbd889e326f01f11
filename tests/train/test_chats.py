"""Messages become tokens by the tokenizer's own chat template. What counts are the assistant's answers, each with the
token that ends it, as in transformers' own mask; so a model that has learnt them stops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the library: pip install tokenizers")
pytest.importorskip("jinja2", reason="chat templates need it: pip install jinja2")

from runs import ONE, TINY, refusal, train, write_model
from tokenizers import Tokenizer

from scaling.models import transformer
from scaling.models.template import NO_END, chat_template
from scaling.models.text import BYTES, of_bytes, tokenizer
from scaling.serve import generate_command as generating
from scaling.strategies import transformer as strategy
from scaling.train.batches import IGNORED, Batches
from scaling.train.corpus import open_corpus
from scaling.train.documents import Reader
from scaling.train.folder import keep_options
from scaling.train.loop import run
from scaling.train.settings import Settings
from scaling.train.step import local

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}
{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %} {{ m.content }}</s>{% endgeneration %}{% else %}
[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"""
OUTSIDE = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>")
ASK, TELL = ({"role": role} for role in ("user", "assistant"))
CHATS = {
    "one": [ASK | {"content": "2 + 2?"}, TELL | {"content": "4"}],
    "turns": [
        {"role": "system", "content": "Be brief."}, ASK | {"content": "Hi"}, TELL | {"content": "Hello 漢字🙂"},
        ASK | {"content": "Hello 漢字🙂"}, TELL | {"content": "  def f(x):\n\n        return x  # 🙂"},
    ],
    "asked last": [ASK | {"content": "a"}, TELL | {"content": "b\n\nc"}, ASK | {"content": "b\n\nc"}],
}  # fmt: skip


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tokenizer(folder: str, template: str | None, eos: str = "<|im_end|>", trim: bool = True) -> None:
    """Write a tokenizer of bytes and a few pairs. `trim`: white space is said to be no character of its token."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim, "use_regex": True}
    table = of_bytes() | {"pre_tokenizer": level, "post_processor": level}
    pairs = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("H", "e"), ("l", "l"), ("Ġ", "d"), ("Ċ", "Ċ")]
    table["model"]["merges"] = [list(pair) for pair in pairs]
    table["model"]["vocab"] |= {"".join(pair): BYTES + i for i, pair in enumerate(pairs)}
    by = Tokenizer.from_str(json.dumps(table))
    by.add_special_tokens(SPECIAL)
    Path(folder).mkdir()
    by.save(f"{folder}/tokenizer.json")
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(options))
    if template:
        Path(folder, "chat_template.jinja").write_text(template)


def read(folder: str, messages: list[dict], ends: bool = True) -> tuple[str, str]:
    """Return the document's text, and what of it counts."""
    by = tokenizer(folder)
    ids, counted, _ = Reader(by, None if ends else NO_END).record({"messages": messages})
    loaded = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return tuple(loaded.decode(some.tolist(), skip_special_tokens=False) for some in (ids, ids[counted]))


def said(messages: list[dict], form: str) -> str:
    return "".join(form % message["content"] for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(("template", "form", "eos"), [
    (CHATML, "%s<|im_end|>", "<|im_end|>"), (unmarked(CHATML), "%s<|im_end|>", "<|im_end|>"),
    (OUTSIDE, "%s<|im_end|>", "<|im_end|>"), (INST, " %s</s>", "</s>"), (unmarked(INST), " %s</s>", "</s>"),
])  # fmt: skip
def test_answers_count_with_the_token_that_ends_each(template, form, eos, chat, trim):
    write_tokenizer("own", template, eos, trim)
    text, counted = read("own", CHATS[chat])
    assert counted == said(CHATS[chat], form)
    assert text == chat_template("own").render(CHATS[chat]) + (eos if chat == "asked last" else "")
    assert read("own", CHATS[chat], ends=False)[1] == counted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_what_counts_is_transformers_own_mask():
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install transformers")
    for i, (marked, eos) in enumerate([(CHATML, "<|im_end|>"), (INST, "</s>")]):
        for j, template in enumerate((marked, unmarked(marked))):
            write_tokenizer(folder := f"own{i}{j}", template, eos, trim=False)
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            by = tokenizer(folder)
            for chat in ("one", "turns"):
                ids, counted, _ = Reader(by).record({"messages": CHATS[chat]})
                how = {"chat_template": marked, "return_dict": True, "return_assistant_tokens_mask": True}
                wanted = theirs.apply_chat_template(CHATS[chat], **how)
                assert ids.tolist() == wanted["input_ids"]
                assert counted.tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("written", ["", "{% if not add_generation_prompt %}</s>{% endif %}"])
def test_an_answer_whose_end_ends_no_text_is_followed_by_the_end_of_text(written):
    """Once, whether or not the template writes it."""
    write_tokenizer("own", unmarked(CHATML) + written, "</s>")
    text, counted = read("own", CHATS["turns"])
    assert text.endswith("🙂<|im_end|>\n</s>")
    assert counted == said(CHATS["turns"], "%s<|im_end|>") + "\n</s>"
    Path("own/generation_config.json").write_text(json.dumps({"eos_token_id": [BYTES + 6 + 1, BYTES + 6 + 3]}))
    assert read("own", CHATS["turns"])[1] == said(CHATS["turns"], "%s<|im_end|>")
    assert read("own", CHATS["asked last"])[1] == said(CHATS["asked last"], "%s<|im_end|>")


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML), None])
def test_an_answer_with_weight_0_does_not_count(template):
    """As in files for OpenAI's fine-tuning, where only answers have weights."""
    write_tokenizer("own", template, "<|im_end|>")
    turns = [ASK | {"content": "a"}, TELL | {"content": "no"}, ASK | {"content": "b"}, TELL | {"content": "yes"}]
    ends = "<|im_end|>" if template else "\n\n<|im_end|>"
    for weights, wanted in (((0, 1), ["yes"]), ((1, 0), ["no"]), ((0, None), ["yes"]), ((1, 1), ["no", "yes"])):
        given = [turns[0], turns[1] | {"weight": weights[0]}, turns[2], turns[3] | {"weight": weights[1]}]
        assert read("own", given)[1] == "".join(answer + ends for answer in wanted)
    for message, words in (
        (TELL | {"content": "", "weight": 0.5}, 'an answer has "weight": 0.5'),
        (TELL | {"content": "", "weight": True}, 'an answer has "weight": true'),
        (ASK | {"content": "", "weight": 1}, "a message of 'user' has"),
    ):
        with pytest.raises(ValueError, match=words):
            read("own", [message])


@pytest.mark.parametrize("command", ["tokenize", "--model model.toml --batch 1 --seq 4 --steps 1"])
def test_chats_of_which_nothing_counts_are_refused(command, capsys):
    write_model()
    line = {"messages": [ASK | {"content": "a"}, {"role": "asistant", "content": "b"}]}
    Path("chats.jsonl").write_text((json.dumps(line) + "\n") * 20)
    assert "chats.jsonl: nothing in it counts in the loss" in refusal(capsys, f"{command} --data chats.jsonl --out o")
    assert not Path("o").exists()


def test_without_a_template_answers_end_with_the_end_of_text_and_that_is_said_once(capsys):
    write_tokenizer("own", None, "</s>")
    text, counted = read("own", CHATS["asked last"])
    assert text == "user: a\n\nassistant: b\n\nc\n\n</s>user: b\n\nc\n\n</s>"
    assert counted == "b\n\nc\n\n</s>"
    Path("chats.jsonl").write_text((json.dumps({"messages": CHATS["one"]}) + "\n") * 20)
    once = 'chats.jsonl: its messages are written as "role: content": own/tokenizer.json has no chat template\n  fix: '
    assert train("tokenize --data chats.jsonl --out shards --tokenizer own") == 0
    assert capsys.readouterr().err.count(once) == 1
    Path("run").mkdir()
    run(ONE, Settings(TINY.with_(V=268), "chats.jsonl", "run", 2, 32, steps=1, eval_batches=1, tokenizer="own"))
    assert capsys.readouterr().err.count(once) == 1


def test_what_a_template_is_told_beside_the_messages_comes_from_the_line():
    write_tokenizer(
        "own", "{{ tools[0].name if tools }}{{ mood }}{% for m in messages %}{{ m.content }}</s>{% endfor %}", "</s>"
    )
    by = tokenizer("own")
    for more, begins in ({}, "2 + 2?"), ({"tools": [{"name": "f"}], "chat_template_kwargs": {"mood": "!"}}, "f!2 + 2?"):
        ids, _, _ = Reader(by, 1).record({"messages": CHATS["one"]} | more)
        assert by.decode(ids.tolist()).startswith(begins)
    for name in "messages", "self", "tokenize":
        with pytest.raises(ValueError, match=f"chat_template_kwargs has '{name}'"):
            Reader(by, 1).record({"messages": CHATS["one"], "chat_template_kwargs": {name: 1}})


def test_a_run_keeps_no_template_of_an_earlier_one_that_saved_nothing():
    """Also where the earlier one had files that the later one lacks: a template, or a tokenizer's files at all."""
    write_tokenizer("old", CHATML)
    write_tokenizer("new", None, "</s>")
    settings = Settings(TINY.with_(V=268), "chats.jsonl", "run", 2, 8, eos_id=1)
    for name, kept in (("new", ["tokenizer.json", "tokenizer_config.json"]), ("bytes", [])):
        for by in ("old", name):
            keep_options(Path("run"), replace(settings, tokenizer=by), "tiny", "X=1", 0)
        assert sorted(path.name for path in Path("run/model").iterdir()) == kept
        assert all(Path("run/model", file).read_bytes() == Path(name, file).read_bytes() for file in kept)
    for by in ("old", "run/model"):  # which goes on with its own
        keep_options(Path("run"), replace(settings, tokenizer=by), "tiny", "X=1", 0)
    assert Path("run/model/chat_template.jinja").is_file()


@pytest.mark.parametrize("mesh", [{"X": 2}])
def test_ranks_have_as_many_tokens_and_each_answer_as_much_weight(mesh, tmp_path):
    """Chats of any length fill rows of one length; the loss is one mean, also where a rank has nothing that counts."""
    path, T = tmp_path / f"chats{mesh.rank}.jsonl", 16  # each rank writes its own
    for turns in ("a" * 130, "b"), ("c", "d" * 90), ("e", "f"):
        lines = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]
        with path.open("a") as file:
            file.write(json.dumps({"messages": lines}) + "\n")
    corpus = open_corpus(str(path), tokenizer("bytes"), NO_END, False)
    batch = Batches(corpus, 16, T, 0, 0, len(corpus)).rows(range(16))
    assert torch.equal(batch[0].flatten(), torch.from_numpy(corpus.between(0, 16 * T)[0].astype("int64")))
    counted = [int((part != IGNORED).sum()) for part in batch[1].chunk(4)]
    assert counted[0] == counted[1] == 0 < counted[3]
    config = TINY.with_(V=256)
    params = transformer.init(config, 0, torch.float64)
    wanted = transformer.loss(params, batch[0], config=config, targets=batch[1], segments=batch[2])
    found, _ = strategy.loss_and_grads(
        strategy.shard(params, config, mesh), *(local(x, mesh) for x in batch[:2]), config, mesh,
        segments=local(batch[2], mesh), microbatches=2,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_a_model_that_has_learnt_a_chat_stops_after_its_answer(capsys):
    """Served from the run and from its export. The end of text is one that no file of the tokenizer's names but the
    one of its eos_token."""
    write_tokenizer("own", unmarked(CHATML))
    chat = [ASK | {"content": "2 + 2?"}, TELL | {"content": "It is 4."}]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 60)
    Path("sizes.json").write_text(json.dumps({x: getattr(TINY.with_(V=268), x) for x in "LDFNKHV"}))
    small = "--model sizes.json --tokenizer own --batch 8 --seq 64 --steps 60 --lr 2e-2 --eval-batches 1"
    assert train(f"--data chats.jsonl {small}") == train("export run --out out") == 0
    capsys.readouterr()
    for folder in ("run", "out"):
        assert generating.main(["--model", folder, "--chat", "--prompt", chat[0]["content"]]) == 0
        assert capsys.readouterr().out.strip() == chat[1]["content"]
