"""Continuous batching as a state machine: `step(state, events) -> (state, actions)`, a pure function. No torch.

The engine, the simulator and the planner drive the same function, so their steps are the same, and only the times
differ. This is the life of a request:

    Arrive -> waiting -> (Admit: it gets pages, some by a prefix hit) -> Run, Run, ... -> Finish
                 ^                                                        |
                 +------ no page is left: the youngest is preempted ------+

A request has tokens (its prompt and its output so far), and the first `computed` of them are in the cache. A step
computes some of the others, and the step that reaches the last one gives the next token. So prefill, a chunk of it,
decode, and prefill again after a preemption are one thing. With a draft, a decode step computes its proposals as well,
and afterwards the pages of rejected ones are free again.

Requests are served in the order of arrival: an older request never waits for a page that a younger one holds, so none
starves. If there are groups of ranks, each with its own pages, a request is admitted to one of them, and a step has
works of all groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral

from scaling.common.arguments import WORDS
from scaling.serve.pages import Pool, WindowPool
from scaling.serve.requests import NOT_FINITE, Request
from scaling.serve.states import (
    DECODE,
    POLICIES,
    PREFILL,
    Action,
    Admit,
    Arrive,
    Cancel,
    Done,
    Finish,
    Live,
    Move,
    Options,
    Preempt,
    Run,
    SchedulerEvent,
    State,
    Work,
)


def initial(options: Options) -> State:
    """Return a state without requests, with all pages free.

    Only the worker that prefills keeps pages for prefix hits.
    """

    def pools(worker: str) -> tuple[Pool, ...]:
        prefix = options.prefix and worker != DECODE
        size, window = options.page, options.window
        few = options.window_pages
        windowed = [WindowPool(few, size, prefix, window) if window else None for _ in range(options.groups)]
        return tuple(Pool(options.pages, size, prefix, each) for each in windowed)

    return State(options, pools={worker: pools(worker) for worker in POLICIES[options.policy].workers})


def step(state: State, events: Sequence[SchedulerEvent]) -> tuple[State, list[Action]]:
    """Return the next state and the actions to take now, after these events.

    There is a Run for each worker that is idle and has work.

    Raises:
        ValueError: The id of a new request is in use, or a Done or a Moved ends nothing that runs.
    """
    new = replace(
        state,
        live=state.live.copy(),
        pools={worker: tuple(pool.copy() for pool in pools) for worker, pools in state.pools.items()},
        busy=state.busy.copy(),
    )
    actions: list[Action] = []
    for event in events:
        if isinstance(event, Arrive):
            _arrive(new, event.request, actions)
        elif isinstance(event, Cancel):
            _cancel(new, event.id, actions)
        elif isinstance(event, Done):
            _done(new, event, actions)
        else:
            _moved(new, event.id, actions)
    _admit(new, actions)
    _move(new, actions)
    for worker in new.policy.workers:
        if worker not in new.busy and (works := _works(new, worker, actions)):
            new.busy[worker] = works
            actions.append(Run(worker, works))
    return new, actions


def refusal(request: Request, options: Options) -> str | None:
    """Return why a request can never be served, or None if it can."""
    for name, kind, of in (("prompt", tuple, Integral), ("stop", frozenset, Integral), ("stops", tuple, str)):
        value = getattr(request, name)
        if not isinstance(value, kind) or not all(issubclass(each, of) for each in dict.fromkeys(map(type, value))):
            return f"{name}={value!r:.40}, which must be a {kind.__name__} of {WORDS[of].removeprefix('a ')}s"
    if not request.prompt:
        return "an empty prompt"
    if not isinstance(request.max_new_tokens, Integral) or request.max_new_tokens < 1:
        return f"max_new_tokens={request.max_new_tokens!r}, which must be {WORDS[Integral]} of at least 1"
    if (length := len(request.prompt) + request.max_new_tokens) > options.length:
        return f"{length} tokens with the completion, but only {options.length} fit"
    return None


def _arrive(state: State, request: Request, actions: list[Action]) -> None:
    if request.id in state.live:
        raise ValueError(f"request {request.id} has been given already\n  fix: give each request an id of its own")
    if why := refusal(request, state.options):
        actions.append(Finish(request.id, (), f"refused: {why}"))
    else:
        state.live[request.id] = Live(request)


def _cancel(state: State, id: int, actions: list[Action]) -> None:
    """Cancel a request, at once or when its step or move is over; unknown ids are done already."""
    if id not in state.live:
        return
    live = state.live[id]
    if live.target is not None or any(work.id == id for works in state.busy.values() for work in works):
        state.live[id] = live._replace(cancelled=True)
    else:
        _finish(state, id, "cancelled", actions)


def _release(state: State, live: Live) -> None:
    if live.where is not None:
        state.pool(live).release(live.pages)
        if windowed := state.pool(live).windowed:
            windowed.give_back(live.window_pages)


def _finish(state: State, id: int, reason: str, actions: list[Action]) -> None:
    live = state.live.pop(id)
    _release(state, live)
    actions.append(Finish(id, live.out, reason))


def _done(state: State, event: Done, actions: list[Action]) -> None:
    if event.worker not in state.busy:
        raise ValueError(
            f"{event.worker} is idle: it has no work to complete"
            "\n  fix: give one Done for each Run that step has returned"
        )
    for work in state.busy.pop(event.worker):
        live, pool = state.live[work.id], state.pools[event.worker][work.group]
        if work.id in event.failed:  # none of the pages that this step wrote are kept for other requests
            _finish(state, work.id, "cancelled" if live.cancelled else f"failed: {NOT_FINITE}", actions)
            continue
        given = _given(work, live, event.tokens)
        kept = max(0, len(given) - 1)  # accepted proposals, which are in the cache; the last given token is not
        computed, pages = work.start + len(work.tokens) + kept, pool.count(live.length + kept + 1)
        pool.release(work.pages[pages:])
        out = live.out + given
        live, first = live._replace(out=out, computed=computed), work.start // pool.size
        full = live.text(first * pool.size, computed) if pool.prefix else ()
        shared, kept = pool.share(work.pages[:pages], full, first), live.window_pages
        if pool.windowed:
            pool.windowed.give_back(kept[pages:])
            kept = pool.windowed.keep(kept[:pages], shared, first, computed)
        state.live[work.id] = live = live._replace(pages=shared, window_pages=kept)
        if live.cancelled:
            _finish(state, work.id, "cancelled", actions)
        elif work.sample and (out[-1] in live.request.stop or work.id in event.stopped):
            _finish(state, work.id, "stop", actions)
        elif len(out) == live.request.max_new_tokens:
            _finish(state, work.id, "length", actions)


def _given(work: Work, live: Live, tokens: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the tokens of a work that samples: at least one, and at most its proposals and the one after them."""
    if not work.sample or live.cancelled:
        return ()
    given = live.request.until_stop(tokens.get(work.id, ()))
    if not 1 <= len(given) <= 1 + work.proposals:
        raise ValueError(
            f"request {work.id} gives {len(given)} tokens, with {work.proposals} proposals\n"
            "  fix: give Done the tokens of each work that samples, one and those of its proposals that are right"
        )
    return given


def _moved(state: State, id: int, actions: list[Action]) -> None:
    live = state.live.get(id)
    if live is None or live.target is None:
        raise ValueError(f"request {id} is not being moved\n  fix: give the id of a request whose cache is on its way")
    _release(state, live)
    state.live[id] = live._replace(where=DECODE, pages=live.target, slot=live.next_slot, target=None)
    if live.cancelled:
        _finish(state, id, "cancelled", actions)


def _move(state: State, actions: list[Action]) -> None:
    """Move computed prompts to the worker that decodes, in the order of arrival, while there is room."""
    if DECODE not in state.pools:
        return
    taken = {live.slot for live in state.live.values() if live.where == DECODE}
    taken |= {live.next_slot for live in state.live.values() if live.target is not None}
    free = _free_slots(state, taken)
    for id, live in state.live.items():
        if live.where != PREFILL or live.target is not None or not live.decoding:
            continue
        pool = state.pools[DECODE][live.group]
        if not free or pool.room() < (need := pool.count(live.computed + 1)):
            break
        slot, pages = free.pop(0), tuple(pool.take(need))
        state.live[id] = live._replace(target=pages, next_slot=slot)
        actions.append(Move(id, live.computed, live.pages, pages, live.group, (live.slot, slot)))


def _free_slots(state: State, taken: set[int]) -> list[int]:
    return [slot for slot in range(state.options.slots) if slot not in taken]


def _admit(state: State, actions: list[Action]) -> None:
    """Admit the oldest waiting requests, while the policy has slots and there are pages for all their tokens.

    The pages that requests in slots need for their next token are left to them. Of the groups with room, a request goes
    to the one that has most of its prompt cached, then to the one with the fewest requests.
    """
    worker = state.policy.workers[0]
    running = [live for live in state.live.values() if live.where == worker]
    pools, count = state.pools[worker], Counter(live.group for live in running)
    kept, free = Counter[int](), _free_slots(state, {live.slot for live in running})
    for live in running if worker != PREFILL else ():
        kept[live.group] += max(0, pools[live.group].count(live.length) - len(live.pages))
    waiting = [live for live in state.live.values() if live.where is None]
    for live in waiting[: state.policy.admit(len(running), state.options.slots)]:
        hits = [[] if live.request.scored else pool.match(live.tokens) for pool in pools]
        needs = [pool.count(live.length) - len(hit) for pool, hit in zip(pools, hits, strict=True)]
        roomy = [g for g, pool in enumerate(pools) if pool.room(hits[g]) >= needs[g] + kept[g]]
        if not roomy:
            return
        group = min(roomy, key=lambda g: (needs[g], count[g]))
        pool, hit = pools[group], hits[group]
        pool.hold(hit)
        seen = pool.windowed.hit(hit) if pool.windowed else ()
        cached, pages = len(hit) * pool.size, (*hit, *pool.take(needs[group]))
        state.live[live.id] = live._replace(
            computed=cached, pages=pages, where=worker, group=group, slot=free.pop(0), window_pages=seen
        )
        count[group] += 1
        actions.append(Admit(live.id, cached))


def _works(state: State, worker: str, actions: list[Action]) -> tuple[Work, ...]:
    """Return the works that the policy picks on this worker, once each has its pages.

    The youngest are preempted to make room for older ones.
    """
    mine = [live for live in state.live.values() if live.where == worker and live.target is None]
    if worker == PREFILL:  # a request whose prompt is computed waits to be moved
        mine = [live for live in mine if not live.decoding]
    picked = dict(state.policy.pick(worker, mine, state.options))
    arriving = {live.group for live in state.live.values() if live.target is not None} if worker == DECODE else set()
    for id in list(picked):
        group = state.live[id].group
        while id in picked and not _has_pages(state, id, picked[id]):
            youngest = next(live for live in reversed(mine) if live.group == group)
            if group in arriving and youngest.id == id:  # a younger one is moving here with its pages: wait for it
                del picked[id]
                break
            mine.remove(youngest)
            picked.pop(youngest.id, None)
            _preempt(state, youngest.id, actions)
    return tuple(_work(state, id, count) for id, count in picked.items())


def _work(state: State, id: int, count: int) -> Work:
    """Return a Work of the request's next `count` tokens, with as many proposals as there are pages for.

    Without proposals it gets the page of the token that follows them, so that an engine may go on before it has read
    that token. No request is preempted to make room for proposals or for that page.
    """
    wanted = state.live[id].proposals(state.options.proposals)
    while wanted and not _has_pages(state, id, count + wanted):
        wanted -= 1
    if not wanted and len(state.live[id].out) + 1 < state.live[id].request.max_new_tokens:
        _has_pages(state, id, count + 1)
    live = state.live[id]
    end = live.computed + count
    before = live.text(0, live.computed) if wanted else ()
    return Work(
        live.request, live.computed, live.text(live.computed, end), live.pages, end == live.length, wanted, before,
        live.group, live.slot, live.window_pages,
    )  # fmt: skip


def _has_pages(state: State, id: int, count: int) -> bool:
    """Give a request the pages for its next tokens; return whether there is room."""
    live = state.live[id]
    pool = state.pool(live)
    count = pool.count(live.computed + count)
    more = max(0, count - len(live.pages))
    more_windowed = max(0, count - len(live.window_pages)) if pool.windowed else 0
    if (more and pool.room() < more) or (pool.windowed and more_windowed and pool.windowed.room() < more_windowed):
        return False
    if more:
        state.live[id] = live = live._replace(pages=(*live.pages, *pool.take(more)))
    if pool.windowed and more_windowed:
        state.live[id] = live._replace(window_pages=(*live.window_pages, *pool.windowed.take(more_windowed)))
    return True


def _preempt(state: State, id: int, actions: list[Action]) -> None:
    """Put a request back to waiting, in order of age; its full pages may still be cached when it is admitted again."""
    live = state.live[id]
    _release(state, live)
    state.live[id] = live._replace(computed=0, pages=(), window_pages=(), where=None)
    actions.append(Preempt(id))
