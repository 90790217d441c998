"""Features of the asynchronous client only, and its equivalence with the blocking one."""

import asyncio
import inspect
import threading
import typing
from collections.abc import AsyncIterator, Iterator

import pytest

from rocket_client import AsyncRocket, Rocket
from rocket_client._connections import AsyncConnections
from rocket_client.models import Event
from tests.loopback_service import wait_for

WEIGHTS = bytes(range(256)) * 4096 * 16
ASYNC_NAMES = {"__enter__": "__aenter__", "__exit__": "__aexit__"}
SPECIAL = {"__init__", *ASYNC_NAMES, *ASYNC_NAMES.values()}


def offered(kind):
    members = inspect.getmembers_static(kind)
    return {name: member for name, member in members if not name.startswith("_") or name in SPECIAL}


def awaited(annotation):
    """Return what the blocking client returns where the asynchronous one has this annotation."""
    if typing.get_origin(annotation) is AsyncIterator:
        return Iterator[typing.get_args(annotation)]
    return annotation


def signature(function):
    parameters = list(inspect.signature(function).parameters.values())
    return parameters, awaited(typing.get_type_hints(function)["return"])


def test_both_clients_have_the_same_methods_and_signatures():
    blocking, asynchronous = offered(Rocket), offered(AsyncRocket)
    assert {ASYNC_NAMES.get(name, name) for name in blocking} == set(asynchronous)
    for name, member in blocking.items():
        twin = asynchronous[ASYNC_NAMES.get(name, name)]
        if isinstance(member, property):
            assert signature(member.fget) == signature(twin.fget), name
        else:
            assert signature(member) == signature(twin), name
        assert name.startswith("_") or member.__doc__ == twin.__doc__, name


def test_every_async_client_method_is_awaitable_or_an_iterator():
    for name, member in offered(AsyncRocket).items():
        if not isinstance(member, property) and name != "__init__":
            is_iterator = typing.get_origin(typing.get_type_hints(member)["return"]) is AsyncIterator
            assert is_iterator or inspect.iscoroutinefunction(member), name


def test_several_jobs_can_be_followed_concurrently(server, service):
    jobs = [service.submit() for _ in range(3)]
    leases = [service.claim(job_id) for job_id in jobs]

    async def follow():
        async with AsyncRocket(server.url) as rocket:
            waiting = [asyncio.create_task(rocket.wait(job_id)) for job_id in jobs]
            await asyncio.sleep(0.3)
            # While those three are open, this one is requested.
            assert (await rocket.get_job(jobs[0])).status == "running"
            for lease in leases:
                await asyncio.to_thread(service.fail, lease)
            return await asyncio.gather(*waiting)

    assert [(job.id, job.status) for job in asyncio.run(follow())] == [(job_id, "failed") for job_id in jobs]


def test_a_stream_can_be_left_early(server, service):
    job_id = service.submit()

    async def first():
        async with AsyncRocket(server.url) as rocket:
            async for news in rocket.events(job_id):
                return news
        return None

    assert isinstance(asyncio.run(first()), Event)


def test_the_blocking_client_works_while_an_event_loop_runs(server, service):
    job_id = service.submit()

    async def called():
        with Rocket(server.url) as rocket:
            first = next(rocket.events(job_id))
            return first, rocket.get_job(job_id)

    event, job = asyncio.run(called())
    assert isinstance(event, Event)
    assert job.id == job_id


def test_a_cancelled_download_releases_the_folder_and_is_resumed(server, service, tmp_path):
    job_id = service.succeeded({"model.safetensors": WEIGHTS})
    told = []

    async def broken_off():
        async with AsyncRocket(server.url) as rocket:
            started = asyncio.Event()

            def note(progress):
                if 0 < progress.received < len(WEIGHTS):
                    started.set()

            download = asyncio.create_task(rocket.download(job_id, tmp_path, on_progress=note))
            await started.wait()
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download
            left = (tmp_path / "model.safetensors.part").stat().st_size
            await rocket.download(job_id, tmp_path, on_progress=told.append)
            return left

    left = asyncio.run(broken_off())
    assert 0 < left < len(WEIGHTS)
    assert told[-1].received == len(WEIGHTS) - left
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_slow_disk_does_not_block_the_event_loop(server, service, tmp_path, monkeypatch):
    job_id = service.succeeded({"a": b"1"})
    end, asked = threading.Event(), []

    def slow(file):
        asked.append(threading.current_thread())
        assert end.wait(30)
        return "other"

    (tmp_path / "a").write_bytes(b"2")
    monkeypatch.setattr("rocket_client._download._sha256", slow)

    async def download():
        async with AsyncRocket(server.url) as rocket:
            task = asyncio.create_task(rocket.download(job_id, tmp_path))
            await asyncio.to_thread(wait_for, lambda: asked)
            assert (await rocket.get_job(job_id)).status == "succeeded"
            end.set()
            with pytest.raises(Exception, match="has the SHA-256 other"):
                await task

    asyncio.run(download())
    assert threading.main_thread() not in asked


def test_disk_work_completes_before_a_cancelled_call_returns():
    started, end, done = threading.Event(), threading.Event(), []

    def write():
        started.set()
        assert end.wait(30)
        done.append(1)
        raise OSError("what came of it matters no more")

    async def cancelled():
        work = asyncio.create_task(AsyncConnections({}).in_thread(write))
        await asyncio.to_thread(started.wait)
        work.cancel()
        asyncio.get_running_loop().call_later(0.1, end.set)
        with pytest.raises(asyncio.CancelledError):
            await work
        return list(done)

    assert asyncio.run(cancelled()) == [1]
