"""Random lives of a scheduler and its memory: from a seed, or from hypothesis, which shrinks them."""

from __future__ import annotations

import random

from block_contents import Life, Request, Setting
from dgemma.engine.kv_cache_manager import max_window_blocks
from dgemma.engine.scheduler import SchedulerConfig

_WORDS = 9
_CHANCE = random.Random(0)
_TEXTS = [[_CHANCE.randrange(_WORDS) for _ in range(60)] for _ in range(3)]


def random_setting(rng: random.Random) -> Setting:
    """From one slot with hardly a block to more than everybody can use."""
    block_size, encode_block = rng.choice([2, 4, 8]), rng.choice([1, 2, 4])
    window = rng.choice([1, 2, 5, 9, 16])
    per_slot = max_window_blocks(window, block_size)
    full_blocks = rng.randint(40 // block_size, 200 // block_size)
    return Setting(
        limits=SchedulerConfig(
            max_num_seqs=rng.randint(1, 6),
            chunk_size=rng.choice([encode_block, 4 * encode_block, 40]),
            encode_block=encode_block,
            patience_s=3.0,
            rows_add_up=rng.random() < 0.5,
        ),
        block_size=block_size,
        window=window,
        full_blocks=full_blocks,
        window_blocks=rng.randint(per_slot, 8 * per_slot),
        max_gathered=rng.choice([None, full_blocks * block_size, 2 * full_blocks * block_size]),
        reuse=rng.random() < 0.95,
    )


def random_request(rng: random.Random, life: Life) -> Request:
    """Begins like others, or goes on from where an earlier one ended."""
    ended = [request for _, request in life.gone.values()][-8:]
    if ended and rng.random() < 0.3:
        earlier = rng.choice(ended)
        tokens, root = earlier.context[:70], earlier.root
    else:
        tokens = rng.choice(_TEXTS)[: rng.randint(0, 50)]
        root = rng.choice([b"", b"", b"adapter a"])
    tokens = tokens + [rng.randrange(_WORDS) for _ in range(rng.randint(0 if tokens else 1, 6))]
    num_steps = rng.randint(0, 3)
    # Canvases that are alike: texts may meet again behind them.
    many, length = (rng.randint(0, 2), 4) if num_steps else (rng.randint(0, 8), 1)
    return Request(
        tokens=tokens,
        commits=[[rng.randrange(2)] * length for _ in range(many)],
        num_steps=num_steps,
        spare=rng.choice([0, 0, 5]),
        root=root,
        turns=[rng.randint(1, len(tokens)) for _ in range(rng.randint(0, 2))],
        priority=rng.randint(-1, 2),
        deadline=life.now + rng.randint(0, 30) if rng.random() < 0.2 else None,
    )


def random_step(rng: random.Random, life: Life) -> None:
    """A plan, and what may happen to those in it."""
    paused = [request_id for request_id in life.running if rng.random() < 0.05]
    failing = [request_id for request_id in life.running if rng.random() < 0.02]
    life.step(rng.randint(0, 8) / 4, paused=paused, failing=failing)


def live_on(rng: random.Random, life: Life, *, plans: int) -> None:
    """Requests come and go."""
    rush, end = rng.choice([0.2, 0.5]), life.plans + plans
    while life.plans < end:
        while len(life.waiting) < 12 and rng.random() < rush:
            if life.submit(random_request(rng, life)) is None:
                life.met["refused"] += 1
        for request_id in [*life.waiting, *life.running]:
            if rng.random() < 0.01:
                life.cancel(request_id)
        if rng.random() < 0.005 and life.setting.max_gathered is None:
            life.ensure([rng.randint(1, 80)])
            life.met["grown"] += 1
        random_step(rng, life)


def run_life(seed: int, *, plans: int) -> Life:
    """A life to its end, at which everybody is let finish."""
    rng = random.Random(seed)
    life = Life(random_setting(rng))
    live_on(rng, life, plans=plans)
    life.drain()
    life.check_rest()
    return life
