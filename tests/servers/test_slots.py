"""Requests in flight over several event loops."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from megatron_rl.servers.request_slots import RequestSlots


def test_never_more_than_the_limit_over_threads():
    limit, slots, lock = random.randint(3, 9), RequestSlots(10**9), threading.Lock()
    slots.limit = limit
    now, most, alone = 0, 0, []

    async def one(count: int) -> None:
        nonlocal now, most
        async with slots.take(count):
            with lock:
                now += count
                most = max(most, now if count <= limit else 0)
                alone.append(now == count or count <= limit)
            await asyncio.sleep(random.uniform(0, 0.003))
            with lock:
                now -= count

    async def many() -> None:
        await asyncio.gather(*(one(random.choice([1, 1, 2, 3, limit + 4])) for _ in range(60)))

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "nobody waits for ever"
    assert now == 0 and 0 < most <= limit and all(alone)


def test_who_came_first_is_served_first_and_who_gives_up_holds_nothing():
    async def main() -> list[int]:
        slots, order = RequestSlots(2), []

        async def one(number: int, count: int) -> None:
            async with slots.take(count):
                order.append(number)
                await asyncio.sleep(0.01)

        first = asyncio.create_task(one(0, 2))
        await asyncio.sleep(0.001)
        large, given_up = asyncio.create_task(one(1, 2)), asyncio.create_task(one(2, 1))
        small = asyncio.create_task(one(3, 1))
        await asyncio.sleep(0.001)
        given_up.cancel()
        await asyncio.gather(first, large, small)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        async with asyncio.timeout(20), slots.take(2):
            pass
        return order

    assert asyncio.run(main()) == [0, 1, 3], "the small one would have fit before the large one, and waits its turn"


def test_one_that_is_canceled_as_it_is_served_gives_back():
    """The grant comes from another thread while the loop cancels."""
    for _ in range(200):
        slots = RequestSlots(1)

        async def loser(slots: RequestSlots = slots) -> None:
            async def take() -> None:
                async with slots.take(1):
                    await asyncio.sleep(10)

            task = asyncio.create_task(take())
            await asyncio.sleep(random.uniform(0, 0.0005))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def holder(slots: RequestSlots = slots) -> None:
            async with slots.take(1):
                time.sleep(random.uniform(0, 0.0005))

        threads = [threading.Thread(target=lambda work=work: asyncio.run(work())) for work in (holder, loser)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        async def last(slots: RequestSlots = slots) -> None:
            async with asyncio.timeout(20), slots.take(1):
                pass

        asyncio.run(last())


def test_the_earliest_step_is_served_first():
    async def main() -> list[tuple[int, int]]:
        slots, order = RequestSlots(1), []

        async def one(step: int, number: int) -> None:
            async with slots.take(1, step):
                order.append((step, number))
                await asyncio.sleep(0)

        async with slots.take(1, 99):
            asked = [(random.randint(-1, 4), number) for number in range(40)]
            tasks = [asyncio.create_task(one(*each)) for each in asked]
            await asyncio.sleep(0)
            gone = random.sample(range(40), 10)
            for index in gone:
                tasks[index].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == sorted(each for index, each in enumerate(asked) if index not in gone)
        return order

    assert len(asyncio.run(main())) == 30
