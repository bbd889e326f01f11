"""Speculative decoding: a draft proposes k tokens, and the model checks them in one pass.

The rule: at each place the model draws as it would without a draft, by the request's seed and the place; a proposal is
kept if it is that token. So what is proposed changes no token, greedy or sampled: not how much is proposed either, or
where a step begins. A draft draws with the same uniform numbers, and so often the same token. The book's rule
(`scaling.book.speculative`) has the same distribution and keeps more of a draft that is unlike the model, but what it
gives depends on where a step begins: a request that is preempted would go on with other tokens.
"""

from collections.abc import Sequence


def as_proposed(proposed: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens of a step: of those drawn at the k proposed places and the one after, up to the first that is not what
    was proposed."""
    same = next((n for n, (a, b) in enumerate(zip(proposed, drawn, strict=False)) if a != b), len(proposed))
    return list(drawn[: same + 1])


def ngram(tokens: Sequence[int], k: int, longest: int = 3) -> list[int]:
    """k proposals out of the request's own tokens: what followed the last n tokens when they stood there before.

    The longest n up to `longest` that is found, at its latest place; the last token again where nothing is found.
    """
    tokens = list(tokens)
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                after = tokens[start + n : start + n + k]
                return after + [after[-1]] * (k - len(after))
    return tokens[-1:] * k
