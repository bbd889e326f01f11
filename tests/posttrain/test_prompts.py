"""Prompts become the ids that transformers gives: a text with the tokens around it, messages by the chat template."""

import json

import pytest
from grpo import PROMPTS

from scaling.models.text import tokenizer
from scaling.posttrain.rewards import read_prompts

CHATML = """{% if tools %}tools {{ tools | length }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
ASK, TELL = ({"role": role, "content": text} for role, text in (("user", "Hi\u2028 é"), ("assistant", "Hello")))
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
CHATS = [
    {"messages": [ASK]},
    {"prompt": [ASK], "answer": 4},
    {"messages": [{"role": "system", "content": "Be brief."}, ASK, TELL, ASK]},
    {"messages": [ASK], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture
def chats(tmp_path):
    """A folder with a tokenizer of bytes, which puts <s> before a text, and its chat template."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate([*letters, *special])}, []))
    by.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    by.add_special_tokens(special)
    one = by.token_to_id("<s>")
    by.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", one)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=by, bos_token="<s>", chat_template=CHATML)
    theirs.save_pretrained(tmp_path / "model")
    return tmp_path, theirs


def read(here, rows):
    path = here / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return read_prompts(path, tokenizer(str(here / "model")), 500)


def test_prompts_are_those_of_transformers(chats):
    here, theirs = chats
    found = read(here, [*CHATS, *({"prompt": text} for text in PROMPTS)])
    for prompt, row in zip(found, CHATS, strict=False):
        given = {"tools": row.get("tools"), "add_generation_prompt": True} | row.get("chat_template_kwargs", {})
        messages = row.get("messages") or row["prompt"]
        assert prompt.ids == theirs.apply_chat_template(messages, **given, return_dict=False)
        assert prompt.text == theirs.apply_chat_template(messages, **given, tokenize=False)
        assert prompt.row == row
    assert [prompt.ids for prompt in found[len(CHATS) :]] == [theirs(text).input_ids for text in PROMPTS]


WRONG = {
    "the last message is the assistant's": {"messages": [ASK, TELL]},
    "has neither a text nor messages": {"messages": []},
    "messages are objects": {"messages": ["Hi"]},
    "chat_template_kwargs has 'messages'": {"messages": [ASK], "chat_template_kwargs": {"messages": []}},
    "must be a table": {"messages": [ASK], "chat_template_kwargs": 1},
    "the prompt has": {"messages": [ASK | {"content": "a" * 600}]},
}


@pytest.mark.parametrize("said", WRONG)
def test_messages_that_nobody_can_answer_are_refused_by_their_line(chats, said):
    with pytest.raises(ValueError, match=f"prompts.jsonl:2: .*{said}"):
        read(chats[0], [CHATS[0], WRONG[said]])
