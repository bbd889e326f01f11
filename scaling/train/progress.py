"""What a run says of itself: a line and a JSON record a step; its curves as TensorBoard shows them, too."""

import importlib.util
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

from scaling.common.console import fold
from scaling.cost import transformer as tm
from scaling.cost.units import significant
from scaling.hardware import chip, chips
from scaling.models.lora import adapter_specs, sizes_of
from scaling.spec import parse
from scaling.spec.sizes import format_sizes
from scaling.train.durable import replaced
from scaling.train.settings import Settings

METRICS, NORMS = "metrics.jsonl", "norms.jsonl"  # of a run's folder: a line a step


@dataclass(frozen=True)
class Progress:
    """Writes metrics.jsonl in the run's folder, TensorBoard's files where they are asked for, and lines on rank 0's
    output."""

    settings: Settings
    mesh: Any

    @cached_property
    def board(self) -> Any:
        """What writes TensorBoard's files, if they are asked for."""
        if not self.settings.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.settings.tensorboard)

    @cached_property
    def flops(self) -> dict[str, float]:
        """FLOPs of a step by both conventions: six per param and token; and with the products of attention, each query
        with every key (as PaLM counts, arXiv:2204.02311, appendix B)."""
        s = self.settings
        return {
            "params": tm.rule_of_thumb(s.model, s.batch * s.seq),
            "attention": sum(tm.train_flops(s.model, s.batch, s.seq).values()),
        }

    @cached_property
    def peak(self) -> float | None:
        """FLOPs/s of all devices, of the chip given or of a GPU that the book's tables know; None if they have none."""
        name = self.settings.chip or known(self.mesh.device)
        rate = dict(chip(name).peaks).get(self.settings.dtype) if name else None
        return rate * self.mesh.size() if rate else None

    def cut(self, step: int) -> None:
        """Take the records of steps after this one, which will be done again, out of metrics.jsonl and norms.jsonl; and
        what is no record."""
        if self.mesh.rank:
            return
        for path in (Path(self.settings.out) / name for name in (METRICS, NORMS)):
            if path.is_file():
                found = read_records(path)
                kept = b"".join(line for line, record in found if record and record["step"] <= step)
                if kept != path.read_bytes():
                    replaced(path, kept)
                if junk := sum(record is None and line.endswith(b"\n") for line, record in found):
                    self.warn(f"{path}: {junk} of its lines were no records, and are left out")

    def record(self, step: int, loss: float, norm: float, seconds: float, stood: float | None) -> dict:
        """The metrics of a step. `norm`: not finite in a step that was skipped, and then None. `stood`: seconds of
        this rank in collectives; None where that is not seen."""
        found = {"step": step, "loss": loss, "grad_norm": norm if math.isfinite(norm) else None}
        found["seconds"] = round(seconds, 5)
        found["tokens_per_second"] = round(self.settings.batch * self.settings.seq / seconds, 1)
        found["flops_per_second"] = self.flops["params"] / seconds
        found["flops_per_second_with_attention"] = self.flops["attention"] / seconds
        if self.peak:
            found["mfu"] = self.flops["params"] / seconds / self.peak
            found["mfu_with_attention"] = self.flops["attention"] / seconds / self.peak
        if stood is not None:
            found["exposed"] = round(stood / seconds, 4)
        return found | {"memory": _memory(self.mesh.device)}

    def say(self, record: Mapping) -> None:
        """All of them, from rank 0."""
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
            self.board.flush()  # a run that is killed has written what it said
        print(fold(_line(record, self.settings.steps)), flush=True)
        if "sample" in record:
            text = self.settings.sample + record["sample"]
            text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # bytes may be any
            print(textwrap.indent(text, "    "), flush=True)

    def norms(self, step: int, leaves: Iterable[str], norms: Iterable[float]) -> None:
        """The norm of each leaf's gradient, as a line of norms.jsonl."""
        if self.mesh.rank == 0:
            with open(Path(self.settings.out) / NORMS, "a") as log:
                log.write(json.dumps({"step": step, "norms": dict(zip(leaves, norms, strict=True))}) + "\n")

    def warn(self, text: str) -> None:
        if text and self.mesh.rank == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def read_records(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Return the lines of a file of JSON lines, each with the record of a step that it is; None for one that is none,
    such as a last line that a kill has cut."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            record = None
        fits = isinstance(record, dict) and type(record.get("step")) is int
        found.append((line, record if fits else None))
    return found


def check_installed(settings: Settings) -> None:
    """ValueError if TensorBoard's files are asked for, and what writes them is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard: tensorboard is not installed\n  fix: pip install 'scaling-book-torch[tensorboard]'"
        )


def _line(record: Mapping, steps: int) -> str:
    """One line of progress."""
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
    """The most bytes that this rank has held: on a GPU of tensors, on a CPU of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def known(device: torch.device) -> str:
    """The name of the book's chip that this device is, if it is one."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((each for each in chips() if each in name), "")


def describe(settings: Settings, sizes: Mapping[str, int]) -> str:
    """What is about to run, in a line."""
    s = settings
    where = f"{s.batch} x {s.seq} tokens a step, tokenizer {s.tokenizer or 'not known'}, {os.path.abspath(s.out)}"
    zero = f" (ZeRO-{s.zero})" if s.zero != 3 and sizes.get("X", 1) > 1 else ""
    params = f"{tm.num_params(s.model):,} params"
    if lora := s.adapters:
        types = [parse(text) for each in adapter_specs(s.model, lora).values() for text in each.values()]
        own = sum(math.prod(spec.global_shape(sizes_of(s.model, lora))) for spec in types)
        params += f", {own:,} of adapters trained (rank {lora.rank} on {', '.join(lora.on)})"
    return f"{s.model.name}: {params} on {format_sizes(sizes)}{zero}, {where}"
