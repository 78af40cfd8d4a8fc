"""A time limit that stands still while the engine is waited for."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.agents.agent import TimeLimit


def test_what_is_paused_does_not_count():
    async def work():
        limit, reached = TimeLimit(0.5), False
        with pytest.raises(TimeoutError):
            async with limit:
                for _ in range(3):
                    with limit.paused():
                        await asyncio.sleep(0.4)
                reached = True  # 1.2 s of pauses are no time
                await asyncio.sleep(600)
        assert reached and limit.expired() and limit.left <= 0.0

    asyncio.run(asyncio.wait_for(work(), 60))


def test_pauses_of_other_tasks_overlap():
    async def work():
        limit = TimeLimit(0.5)

        async def pause(seconds):
            with limit.paused():
                await asyncio.sleep(seconds)

        async with limit:
            await asyncio.gather(pause(0.3), pause(0.9), pause(0.6))
            late = asyncio.create_task(pause(0.2))
            await asyncio.sleep(0)
        assert not limit.expired() and 0 < limit.left <= 0.5
        await late  # a pause that is longer than the body

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_error_of_the_body_is_its_own():
    async def work():
        limit = TimeLimit(60.0)
        with pytest.raises(KeyError):
            async with limit:
                with limit.paused():
                    raise KeyError
        assert not limit.expired() and limit.left > 0

    asyncio.run(asyncio.wait_for(work(), 60))
