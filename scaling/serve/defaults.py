"""The defaults of sampling, from a model's own generation_config.json. No torch."""

from pathlib import Path
from typing import Any, NamedTuple

from scaling.common.arguments import table_if_any
from scaling.models.text import GENERATION, home_of
from scaling.serve.requests import SAMPLING, Sampling

UNSERVED = {  # settings that would change tokens and are not computed here, with the value that changes nothing
    "repetition_penalty": 1, "no_repeat_ngram_size": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "num_beams": 1, "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "penalty_alpha": 0, "top_h": None,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None,
}  # fmt: skip


class ModelDefaults(NamedTuple):
    """The sampling that a model asks for.

    Attributes:
        sampling: How its tokens are drawn; None if it does not ask to sample.
        unserved: Settings that it asks for and that are not computed here.
    """

    sampling: Sampling | None = None
    unserved: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the line that commands print; "" if there is nothing to say."""
        names = SAMPLING if self.sampling else ()
        drawn = [f"{name} {value:g}" for name in names if (value := getattr(self.sampling, name)) is not None]
        parts = ["sampling by " + ", ".join(drawn)] if drawn else []
        parts += ["not computed here: " + ", ".join(self.unserved)] if self.unserved else []
        return f"{GENERATION}: {'; '.join(parts)}" if parts else ""


NO_DEFAULTS = ModelDefaults()


def defaults_of(folder: "str | Path") -> ModelDefaults:
    """Return the defaults in the generation_config.json of a model's folder, or of a run's.

    As in transformers, its temperature and filters count if it says `do_sample`; otherwise it is greedy. Only
    the file's own keys count: transformers would add a top_k of 50.

    Raises:
        ValueError: No token can be drawn with a value.
    """
    table = table_if_any(path := home_of(folder) / GENERATION)
    unserved = [f"{key} {table[key]!r:.40}" for key, none in UNSERVED.items() if table.get(key) not in (None, none)]
    return ModelDefaults(_sampling(path, table) if table.get("do_sample") is True else None, tuple(unserved))


def _sampling(path: Path, table: dict[str, Any]) -> Sampling:
    given: dict[str, Any] = {name: table[name] for name in SAMPLING if table.get(name) is not None}
    if given.get("top_k") in (0, -1):  # no filter, in transformers and in vLLM
        del given["top_k"]
    try:
        return Sampling(**{"temperature": 1.0, **given})
    except ValueError as error:
        what = str(error).partition("\n")[0]
        raise ValueError(f"{path}: {what}\n  fix: mend the file, or give --no-generation-config") from None
