"""Batching policies (Part 7, "Designing an Effective Inference Engine") as pure functions: what runs in the next step.

    static         a batch is admitted when the one before is done; prompts first, then all decode together
    interleaved    a new request is admitted when a slot is free, and its whole prompt runs as a step of its own
    chunked        every step decodes all, and fills the rest of its token budget with chunks of prompts
    disaggregated  two workers, each with its own pages: prompts run on one, are moved, and decode on the other

A policy does not see pages: whether there is room is the scheduler's business.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

PREFILL, DECODE, ENGINE = "prefill", "decode", "engine"


class SlotProgress(NamedTuple):
    """A request in a slot: `todo` of its tokens are not in the cache yet. `started`: it has given a token.

    `proposals`: the tokens of a draft that are computed beside the one of a decode step.
    """

    id: int
    todo: int
    started: bool
    proposals: int = 0

    @property
    def decoding(self) -> bool:
        return self.started and self.todo == 1


Pick = Callable[[str, Sequence[SlotProgress], int], list[tuple[int, int]]]


class Policy(NamedTuple):
    """`admit(running, slots)`: how many more may enter. `pick(worker, running, budget)`: [(id, tokens)] of a step."""

    name: str
    workers: tuple[str, ...]
    admit: Callable[[int, int], int]
    pick: Pick


def _when_empty(running: int, slots: int) -> int:
    return 0 if running else slots


def _when_free(running: int, slots: int) -> int:
    return slots - running


def _all_prompts_first(worker: str, running: Sequence[SlotProgress], budget: int) -> list[tuple[int, int]]:
    prompts = [(r.id, r.todo) for r in running if not r.decoding]
    return prompts or [(r.id, 1) for r in running]


def _one_prompt_first(worker: str, running: Sequence[SlotProgress], budget: int) -> list[tuple[int, int]]:
    return _all_prompts_first(worker, [r for r in running if not r.decoding][:1] or running, budget)


def _decodes_and_chunks(worker: str, running: Sequence[SlotProgress], budget: int) -> list[tuple[int, int]]:
    picked = [(r.id, 1) for r in running if r.decoding]
    left = max(budget - sum(1 + r.proposals for r in running if r.decoding), 1)  # a prompt goes on however many decode
    for r in running:
        if not r.decoding and left:
            picked.append((r.id, min(r.todo, left)))
            left -= picked[-1][1]
    return picked


def _by_worker(worker: str, running: Sequence[SlotProgress], budget: int) -> list[tuple[int, int]]:
    some = running[:1] if worker == PREFILL else running
    return [(r.id, r.todo) for r in some]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("static", (ENGINE,), _when_empty, _all_prompts_first),
        Policy("interleaved", (ENGINE,), _when_free, _one_prompt_first),
        Policy("chunked", (ENGINE,), _when_free, _decodes_and_chunks),
        Policy("disaggregated", (PREFILL, DECODE), _when_free, _by_worker),
    )
}
