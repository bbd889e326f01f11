"""Prompts that are scored: `echo` with `logprobs`, as evaluations ask for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import CONFIG, GREEDY, PARAMS, running

from scaling import serve
from scaling.models.text import ByteText

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


def test_a_prompt_alone_is_scored(served):
    """As lm-evaluation-harness asks for it, or without the token that it leaves out."""
    for new in (0, 1):
        body = {"max_tokens": new, "echo": True, "logprobs": 2, **GREEDY}
        check_scores(served.plain(PROMPTS[1], **body)["choices"][0], PROMPTS[1], new)


@pytest.mark.slow
@pytest.mark.parametrize("new", [0, 5])
def test_prompts_are_scored(served, new):
    """In chunks of 16 tokens, again where their pages are there already, and several at once."""
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
