"""Report a run's progress: a printed line and a JSON record per step, and curves for TensorBoard."""

import json
import math
import os
import resource
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scaling.common.console import fold, significant
from scaling.cost import transformer as tm
from scaling.hardware import chip, chips
from scaling.models.lora import num_adapter_params
from scaling.spec.sizes import format_sizes
from scaling.train.durable import write_atomically
from scaling.train.settings import Settings

METRICS, NORMS = "metrics.jsonl", "norms.jsonl"  # files in a run's folder, with a line per step


@dataclass(frozen=True)
class Progress:
    """A reporter that writes metrics.jsonl, TensorBoard's files if `--tensorboard` is given, and rank 0's output."""

    settings: Settings
    mesh: Any

    @cached_property
    def board(self) -> Any:
        """The writer of TensorBoard's files, or None without `--tensorboard`."""
        if not self.settings.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.settings.tensorboard)

    @cached_property
    def flops(self) -> dict[str, float]:
        """The FLOPs of a step by two conventions, {"params", "attention"}.

        "params" counts six FLOPs per param and token. "attention" adds the products of attention, each query with every
        key, as PaLM counts them (arXiv:2204.02311, appendix B).

        With adapters both leave out the two FLOPs per param and token of the gradients of frozen params. They add four
        per param of the adapters, whose gradients are products of x A and of the cotangent times B.
        """
        s = self.settings
        tokens, forward = s.batch * s.seq, tm.forward_flops(s.model, s.batch, s.seq)
        found = {
            "params": tm.rule_of_thumb(s.model, tokens),
            "attention": sum(tm.train_flops(s.model, s.batch, s.seq).values()),
        }
        if not s.adapters:
            return found
        trained = 4 * tokens * num_adapter_params(s.model, s.adapters, active=True)
        frozen = forward["mlp"] + forward["projections"] + forward["unembed"]
        return {"params": found["params"] * 2 / 3 + trained, "attention": found["attention"] - frozen + trained}

    @cached_property
    def peak(self) -> float | None:
        """The peak FLOPs/s of all devices, from `--chip` or the book's table of GPUs; None if neither has it."""
        name = self.settings.chip or chip_name(self.mesh.device)
        rate = dict(chip(name).peaks).get(self.settings.dtype) if name else None
        return rate * self.mesh.size() if rate else None

    def drop_after(self, step: int) -> None:
        """Remove the records after `step`, whose steps will run again, from metrics.jsonl and norms.jsonl.

        Lines that are not records are removed too, and rank 0 warns of them.
        """
        if self.mesh.rank:
            return
        for path in (Path(self.settings.out) / name for name in (METRICS, NORMS)):
            if junk := cut_records(path, step):
                self.warn(f"{path}: {junk} of its lines are not records, and were removed")

    def record(self, step: int, loss: float, norm: float, seconds: float, waited: float | None) -> dict:
        """Return the metrics of a step.

        Args:
            step: The number of the step.
            loss: The loss.
            norm: The norm of the gradients; if it is not finite, the step was skipped, and its metric is None.
            seconds: The duration of the step.
            waited: The seconds that this rank waited in collectives; None if they were not measured.
        """
        found = {"step": step, "loss": loss, "grad_norm": norm if math.isfinite(norm) else None}
        found["seconds"] = round(seconds, 5)
        found["tokens_per_second"] = round(self.settings.batch * self.settings.seq / seconds, 1)
        found["flops_per_second"] = self.flops["params"] / seconds
        found["flops_per_second_with_attention"] = self.flops["attention"] / seconds
        if self.peak:
            found["mfu"] = self.flops["params"] / seconds / self.peak
            found["mfu_with_attention"] = self.flops["attention"] / seconds / self.peak
        if waited is not None:
            found["exposed"] = round(waited / seconds, 4)
        return found | {"memory": _memory(self.mesh.device)}

    def report(self, record: Mapping) -> None:
        """Write a step's record to metrics.jsonl, TensorBoard and the output, on rank 0."""
        if self.mesh.rank:
            return
        with open(Path(self.settings.out) / METRICS, "a") as log:
            log.write(json.dumps(record) + "\n")
        if self.board:
            for name, value in record.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, record["step"])
                elif isinstance(value, list):
                    self.board.add_scalars(name, {str(i): each for i, each in enumerate(value)}, record["step"])
                elif name != "step" and value is not None:
                    self.board.add_scalar(name, value, record["step"])
            self.board.flush()  # so that a run that is killed loses no step that it has printed
        print(fold(_line(record, self.settings.steps)), flush=True)
        if "sample" in record:
            text = self.settings.sample + record["sample"]
            text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # bytes may be any
            print(textwrap.indent(text, "    "), flush=True)

    def norms(self, step: int, leaves: Iterable[str], norms: Iterable[float]) -> None:
        """Append the norm of each leaf's gradient to norms.jsonl, on rank 0."""
        if self.mesh.rank == 0:
            with open(Path(self.settings.out) / NORMS, "a") as log:
                log.write(json.dumps({"step": step, "norms": dict(zip(leaves, norms, strict=True))}) + "\n")

    def warn(self, text: str) -> None:
        """Print a warning on rank 0, unless the text is empty."""
        if text and self.mesh.rank == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def cut_records(path: Path, step: int) -> int:
    """Remove the records after `step`, and lines that are not records, from a file of JSON lines.

    Returns:
        The number of whole lines that were not records; 0 if there is no such file.
    """
    if not path.is_file():
        return 0
    found = read_records(path)
    kept = b"".join(line for line, record in found if record and record["step"] <= step)
    if kept != path.read_bytes():
        write_atomically(path, kept)
    return sum(record is None and line.endswith(b"\n") for line, record in found)


def read_records(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return each line of a JSON-lines file with the record of a step that it holds.

    The record is None if the line holds none, such as a last line that was cut when the run was killed.
    """
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            record = None
        fits = isinstance(record, dict) and type(record.get("step")) is int
        found.append((line, record if fits else None))
    return found


def _line(record: Mapping, steps: int) -> str:
    """Return the printed line of a step's record."""
    rate = record["flops_per_second"]
    work = f"{significant(rate)} FLOPs/s"
    if "mfu" in record:
        work = f"MFU {record['mfu']:.1%} ({record['mfu_with_attention']:.1%} with attention)"
    parts = [f"step {record['step']:>6}/{steps}", f"loss {record['loss']:.4f}"]
    parts.append("skipped" if record["grad_norm"] is None else f"norm {record['grad_norm']:.2f}")
    parts += [f"scale {record['loss_scale']:g}"] if "loss_scale" in record else []
    parts += [f"{record['tokens_per_second']:,.0f} tokens/s", work, f"{record['memory'] / 1e9:.1f} GB"]
    parts += [f"comms {record['exposed']:.0%}"] if "exposed" in record else []
    parts += [f"valid {record['valid']:.4f}"] if "valid" in record else []
    return "  ".join(parts)


def _memory(device: torch.device) -> int:
    """Return the peak bytes of this rank: of its tensors on a GPU, of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def chip_name(device: torch.device) -> str:
    """Return the book's name of this device's chip, or "" if the book does not have it."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((each for each in chips() if each in name), "")


def describe(settings: Settings, sizes: Mapping[str, int]) -> str:
    """Return one line that describes the run: model, params, mesh, batch, learning rate, tokenizer and folder."""
    s = settings
    where = f"{s.batch} x {s.seq} tokens a step, peak learning rate {s.peak:g}, "
    where += f"tokenizer {s.tokenizer or 'not known'}, {os.path.abspath(s.out)}"
    zero = f" (ZeRO-{s.zero})" if s.zero != 3 and sizes.get("X", 1) > 1 else ""
    params = f"{tm.num_params(s.model):,} params"
    if lora := s.adapters:
        params += (
            f", {num_adapter_params(s.model, lora):,} of adapters trained (rank {lora.rank} on {', '.join(lora.on)})"
        )
    return f"{s.model.name}: {params} on {format_sizes(sizes)}{zero}, {where}"
