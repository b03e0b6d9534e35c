import asyncio
import threading

import pytest
import torch

from moetta.serve import Settings
from moetta.serve.jobs import Batch, JobQueue, Ticket, deliver
from moetta.serve.refusal import Refusal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner


def queue(clock, **settings):
    defaults = {"max_batch": 4, "max_wait_ms": 10, "max_queue": 8, "max_images": 8}
    return JobQueue(Settings(**{**defaults, **settings}), clock)


def put(loop, waiting, images=1, tenant="default"):
    async def make():
        return Ticket(tenant, images, 1, False)

    ticket = loop.run(make())
    return waiting.put(ticket, [(i, torch.full((1,), i)) for i in range(images)])


def test_a_batch_waits_for_company_but_not_for_long(loop, clock):
    waiting = queue(clock)
    first = put(loop, waiting)
    assert waiting.take(timeout=0) == []
    clock.now += 0.009
    second = put(loop, waiting)
    assert waiting.take(timeout=0) == []
    clock.now += 0.0011
    batch = waiting.take(timeout=0)
    assert batch == Batch("default", first + second)
    assert waiting.size == 0


def test_a_full_batch_does_not_wait(loop, clock):
    waiting = queue(clock)
    jobs = put(loop, waiting, 6)
    batch = waiting.take(timeout=0)
    assert batch.jobs == jobs[:4]
    assert waiting.size == 2


def test_batches_never_mix_tenants_and_tenants_take_turns(loop, clock):
    waiting = queue(clock, max_queue=100)
    put(loop, waiting, 8, "busy")
    put(loop, waiting, 8, "busy")
    put(loop, waiting, 2, "quiet")
    clock.now += 1
    taken = [waiting.take(timeout=0) for _ in range(5)]
    assert [batch.tenant for batch in taken] == ["busy", "quiet", "busy", "busy", "busy"]
    for batch in taken:
        assert {job.ticket.tenant for job in batch.jobs} == {batch.tenant}


def test_beyond_the_bound_all_of_a_request_is_refused_at_once(loop, clock):
    waiting = queue(clock)
    put(loop, waiting, 5)
    with pytest.raises(Refusal, match="the queue is full") as refused:
        put(loop, waiting, 4)
    assert refused.value.status == 503
    assert refused.value.retry_after >= 1
    assert waiting.size == 5
    put(loop, waiting, 3)


def test_one_tenant_cannot_fill_the_queue(loop, clock):
    waiting = queue(clock, max_queue_per_tenant=3)
    put(loop, waiting, 3, "busy")
    with pytest.raises(Refusal) as refused:
        put(loop, waiting, 1, "busy")
    assert refused.value.status == 429
    put(loop, waiting, 3, "quiet")


def test_retry_after_follows_the_queue(loop, clock):
    waiting = queue(clock)
    put(loop, waiting, 8)
    waiting.seconds_per_image = 0.5
    assert waiting.retry_after() == 4
    waiting.seconds_per_image = 100
    assert waiting.retry_after() == 60


def test_what_waits_too_long_is_handed_back_without_its_neighbours(loop, clock):
    waiting = queue(clock, queue_timeout=1.0)
    late = put(loop, waiting, 2)
    clock.now += 0.9
    fresh = put(loop, waiting, 1)
    clock.now += 0.2
    assert waiting.take(timeout=0) == late
    assert waiting.take(timeout=0) == Batch("default", fresh)


def test_withdrawn_images_cost_nothing_and_only_once(loop, clock):
    waiting = queue(clock)
    left, stays = put(loop, waiting), put(loop, waiting)
    assert waiting.withdraw(left) == left
    assert waiting.withdraw(left) == []
    assert waiting.size == 1
    clock.now += 1
    assert waiting.take(timeout=0).jobs == stays
    assert waiting.withdraw(stays) == []  # a batch has them now
    assert waiting.size == 0


def test_commands_come_before_batches(loop, clock):
    waiting = queue(clock)
    put(loop, waiting, 4)
    waiting.command(lambda: None)
    assert callable(waiting.take(timeout=0))
    assert isinstance(waiting.take(timeout=0), Batch)


def test_closing_refuses_newcomers_and_lets_the_rest_out(loop, clock):
    waiting = queue(clock)
    jobs = put(loop, waiting, 5)
    waiting.close()
    with pytest.raises(Refusal, match="shutting down"):
        put(loop, waiting)
    assert waiting.take().jobs == jobs[:4]
    assert waiting.take().jobs == jobs[4:]
    assert waiting.take() is None


def test_a_waiting_engine_is_woken(loop):
    waiting = JobQueue(Settings(max_wait_ms=0))
    taken = []
    engine = threading.Thread(target=lambda: taken.append(waiting.take(timeout=5)))
    engine.start()
    jobs = put(loop, waiting)
    engine.join(5)
    assert taken[0].jobs == jobs


def test_a_ticket_is_done_when_every_image_has_one_result(loop):
    waiting = JobQueue(Settings())

    async def request():
        ticket = Ticket("default", 2, 1, False)
        jobs = waiting.put(ticket, [(0, torch.zeros(1)), (1, torch.ones(1))])
        worker = threading.Thread(target=deliver, args=([(jobs[1], {"labels": [1]}, 7)],))
        worker.start()
        worker.join()
        await asyncio.sleep(0.01)
        assert not ticket.done.done()
        deliver([(jobs[0], {"labels": [0]}, 7), (jobs[1], {"labels": ["again"]}, 7)])
        await asyncio.wait_for(ticket.done, 1)
        assert ticket.results == [{"labels": [0]}, {"labels": [1]}]
        assert ticket.step == 7

    loop.run(request())


def test_the_clock_of_the_queue_is_monotonic():
    import time

    assert JobQueue(Settings())._now is time.monotonic
