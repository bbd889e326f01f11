"""What a run reads: the sequences to train on and those held out, of one corpus or of several by weight."""

from scaling.train import corpus
from scaling.train.batches import Batches, Mixture, hold_out
from scaling.train.origin import tokenizer_in, weighted_paths
from scaling.train.settings import Settings


def inputs(settings: Settings) -> tuple[Batches | Mixture, tuple[Batches, ...]]:
    """(what to train on, the held-out end of each corpus). ValueError for tokens outside the vocabulary."""
    by, parts, weights = tokenizer_in(settings), [], []
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
