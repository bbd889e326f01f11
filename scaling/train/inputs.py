"""What a run reads: the sequences to train on and those held out, of one corpus or of several by weight."""

from pathlib import Path

from scaling.train import corpus
from scaling.train.batches import Batches, Mixture, hold_out
from scaling.train.settings import Settings
from scaling.train.text import tokenizer


def inputs(settings: Settings) -> tuple[Batches | Mixture, tuple[Batches, ...]]:
    """(what to train on, the held-out end of each corpus). ValueError for tokens outside the vocabulary."""
    by, parts, weights = tokenizer(settings.tokenizer), [], []
    for path, weight in weighted_paths(settings.data):
        read = corpus.open_corpus(path, by)
        if read.top >= (V := settings.model.V):
            raise ValueError(
                f"{path}: token {read.top} lies outside the vocabulary of {settings.model.name}, 0..{V - 1}\n"
                "  fix: a model with a greater vocabulary, or the tokenizer that belongs to this one (--tokenizer)"
            )
        parts.append(hold_out(read, settings.batch, settings.seq, settings.seed))
        weights.append(weight)
    train, valid = zip(*parts, strict=True)
    return (train[0] if len(train) == 1 else Mixture(train, tuple(weights))), valid


def weighted_paths(data: str) -> list[tuple[str, float]]:
    """ "A:3,B" -> [("A", 3.0), ("B", 1.0)]: paths and their weights. ValueError for a weight that is no number."""
    if Path(data).exists() or ("," not in data and ":" not in data):
        return [(data, 1.0)]
    found = []
    for part in data.split(","):
        path, colon, weight = part.rpartition(":")
        try:
            found.append((path if colon else part, float(weight) if colon else 1.0))
        except ValueError:
            raise ValueError(
                f"{data}: the weight {weight!r} is not a number\n  fix: write --data as PATH:WEIGHT,PATH:WEIGHT"
            ) from None
        if not 0 < found[-1][1] < float("inf"):
            raise ValueError(
                f"{data}: the weight {weight} is not above 0\n  fix: give a positive number, or leave the file out"
            )
    return found
