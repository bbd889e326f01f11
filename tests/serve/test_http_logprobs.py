"""Log-probabilities: which bytes each token adds to the text, where it is there, and what it is called; and those of
prompts that are scored, by `echo` with `logprobs`, as evaluations ask for it."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import CONFIG, GREEDY, PARAMS, running

from scaling import serve
from scaling.models.text import ByteText

pytest.importorskip("tokenizers", reason="the extra hf has it")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scaling.models.text import tokenizer
from scaling.serve.requests import Request
from scaling.serve.states import Options
from scaling.serve.text import TextStream, token_bytes_of
from scaling.serve.web.words import AnswerPiece, AnswerWriter, ClientCall, Model, TokenNote

TEXT = "漢字🙂 true"


def byte_level() -> Tokenizer:
    """As GPT-2's: 漢 is two tokens, and one token holds the end of 字 and the begin of 🙂."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    han, zi, face = (spell.pre_tokenize_str(c)[0][0] for c in "漢字🙂")
    merges = [(han[0], han[1]), (zi[-1], face[0]), ("t", "r"), ("tr", "u"), ("tru", "e"), ("Ġ", "true")]
    words = letters + [a + b for a, b in merges]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer, made.decoder = spell, decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """As Llama 2's: what the vocabulary lacks is bytes, a space is written ▁, and a text's first one is left out."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁true", "true", "▁", "漢", "▁a", "A"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def word_pieces() -> Tokenizer:
    """As BERT's: a space is between two words, unless the second goes on with the first."""
    words = ["[UNK]", "true", "##true", "漢", "##字", "a"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


MADE = {"byte level": byte_level, "byte fallback": byte_fallback, "word pieces": word_pieces}


@pytest.fixture(scope="module", params=MADE)
def by(request, tmp_path_factory):
    """A tokenizer, with a special token."""
    made = MADE[request.param]()
    made.add_special_tokens(["<end>"])
    made.save(str(path := tmp_path_factory.mktemp("made") / "tokenizer.json"))
    return tokenizer(str(path))


def written(by, prompt, ids, chat=False, top=(), stream=True):
    """(the text that is served, its log-probabilities' JSON) of an answer with these ids."""
    call = ClientCall(chat, [Request(0, tuple(prompt), len(ids))], len(prompt), 5, False, False)
    text = TextStream(by, (), prompt)
    notes = [(text.push(id), (TokenNote(id, -1.0, top),)) for id in ids]
    pieces = [AnswerPiece(*each) for each in notes] + [AnswerPiece(text.rest(), (), "stop", len(ids))]
    model = Model("tiny", by, by.vocabulary, (), None, Options(9))
    choice = AnswerWriter(call, model).choice(0, AnswerPiece.joined(pieces))
    return (choice["message"]["content"] if chat else choice["text"]), choice["logprobs"]


def bytes_in(by) -> list[int]:
    """The ids of parts of characters."""
    return [id for id in range(by.vocabulary) if "\ufffd" in by.decode([id])]


def test_pieces_are_the_served_text(by):
    """Of drawn ids after a prompt the bytes of all together are the text, and each token is in it at its offset."""
    chance = random.Random(3)
    whole = [id for id in range(by.vocabulary) if id not in bytes_in(by)]
    for _ in range(60):
        prompt, ids = ([chance.choice(whole) for _ in range(n)] for n in (chance.randint(1, 8), chance.randint(1, 12)))
        text, notes = written(by, prompt, ids, chat=True)
        assert by.decode([*prompt, *ids]) == by.decode(prompt) + text
        assert b"".join(bytes(note["bytes"] or []) for note in notes["content"]).decode() == text
        text, notes = written(by, prompt, ids)
        for token, offset in zip(notes["tokens"], notes["text_offset"], strict=True):
            assert text[offset : offset + len(token)] == token or token == "<end>"


def test_parts_of_characters_that_never_become_one(by):
    """Ten thousand bytes without an end to any character: given as soon as that is certain, at once and in one step."""
    if parts := bytes_in(by):
        for ids in ([parts[0]] * 10_000, [*parts[:7], *parts[-9:], *by.encode("漢"), parts[3]]):
            stream = TextStream(by)
            given = [stream.push(id) for id in ids]
            assert len("".join(given)) >= len(ids) - 3 - 2 * (len(ids) < 99)
            assert "".join([*given, stream.rest()]) == by.decode(ids)
            assert len(stream.ids) <= 8


def test_half_characters_and_tokens_that_are_written_alike(tmp_path):
    """As OpenAI writes them: the bytes of each part, at the offset of its character; no token takes another's place."""
    byte_level().save(str(path := tmp_path / "tokenizer.json"))
    by = tokenizer(str(path))
    ids = by.encode(TEXT)
    text, notes = written(by, by.encode("a"), ids)
    assert text == TEXT
    assert notes["tokens"][:5] == ["bytes:\\xe6\\xbc", "bytes:\\xa2", "bytes:\\xe5", "bytes:\\xad", "bytes:\\x97\\xf0"]
    assert notes["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 3]  # of 🙂 from the middle of a token on
    _, notes = written(by, by.encode("a"), ids, chat=True)
    assert (notes["content"][0]["token"], notes["content"][0]["bytes"]) == ("\\xe6\\xbc", [0xE6, 0xBC])
    byte_fallback().save(str(path))
    by = tokenizer(str(path))
    space, bare, letter, byte = (by.loaded.token_to_id(token) for token in ("▁true", "true", "A", "<0x41>"))
    likeliest = ((space, -0.1), (bare, -0.2), (letter, -0.3), (byte, -0.4))
    text, notes = written(by, by.encode("A"), [bare, space, byte], top=likeliest)
    assert (text, notes["text_offset"]) == ("true trueA", [0, 4, 9])
    assert notes["tokens"] == ["true", " true", "A"]
    for token, top in zip(notes["tokens"], notes["top_logprobs"], strict=True):
        assert (len(top), top[token]) == (4, -1.0)
    assert [*notes["top_logprobs"][2]] == [" true", "true", f"token_id:{letter}", "A"]
    assert token_bytes_of(ByteText()).name(300) == "token_id:300"


PROMPTS = ["the cat sat on the mat, " * 3, "the cat sat on it", "a", [7, 200, 7, 201] * 9]


@pytest.fixture(scope="module")
def served():
    with running(pages=60) as found:
        yield found


def ids_of(prompt) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def check_scores(choice: dict, prompt, new: int) -> None:
    """Beside `score`, which computes the whole text at once."""
    notes, ids = choice["logprobs"], ids_of(prompt)
    answer = serve.generate(PARAMS, [ids], CONFIG, new)[0]
    wanted = serve.score(PARAMS, [ids + answer], CONFIG)[0]
    assert notes["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-4) for value in wanted)]
    assert choice["text"] == ByteText().decode(ids) + ByteText().decode(answer)
    assert notes["top_logprobs"][0] is None
    for value, top, token in zip(
        *(notes[name][1:] for name in ("token_logprobs", "top_logprobs", "tokens")), strict=True
    ):
        assert top[token] == value  # to the bit, by which evaluations tell whether a token is the likeliest
        assert len(top) in (2, 3)


@pytest.mark.parametrize("new", [0, 1, 5])
def test_prompts_are_scored(served, new):
    """In chunks of 16 tokens, again where their pages are there already, and several at once; with one new token as
    lm-evaluation-harness asks for it."""
    body = {"max_tokens": new, "echo": True, "logprobs": 2, **GREEDY}
    for _ in range(2):
        answer = served.plain(PROMPTS[:2], n=2, **body)
        for i, choice in enumerate(answer["choices"]):
            check_scores(choice, PROMPTS[i // 2], new)
        assert answer["usage"]["completion_tokens"] == 4 * new
        assert (answer["usage"]["prompt_tokens_details"], answer["choices"][0]["finish_reason"]) == (
            {"cached_tokens": 0},
            "length",
        )
    whole = served.plain(PROMPTS[0], **body)["choices"][0]
    parts = [part["choices"][0] for part in served.parts(prompt=PROMPTS[0], **body, stream=True)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in (part["logprobs"] or {name: []})[name]] == values
    assert served.plain("ab", **body | {"logprobs": None})["choices"][0]["text"].startswith("ab")


@pytest.mark.slow
def test_prompts_are_scored_beside_others_that_take_their_pages():
    """Preempted and computed again: each token is told once."""
    with running(pages=24, draft="ngram") as found, ThreadPoolExecutor(8) as pool:
        body = {"echo": True, "logprobs": 2, "max_tokens": 12, **GREEDY}
        for prompt, answer in zip(PROMPTS * 2, pool.map(lambda p: found.plain(p, **body), PROMPTS * 2), strict=True):
            check_scores(answer["choices"][0], prompt, 12)


def test_a_policy_without_chunks_scores_no_prompt():
    """It would hold the logits of all of a prompt at once."""
    with running(policy="interleaved") as found:
        error = found.call("a", echo=True, logprobs=1).json()["error"]
        assert (error["param"], "not served by --policy interleaved" in error["message"]) == ("echo", True)
        assert found.plain("a", echo=True, max_tokens=0)["choices"][0]["text"] == "a"
