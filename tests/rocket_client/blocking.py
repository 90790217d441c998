"""The asynchronous client with the methods of the blocking one, so that one test checks the behaviour of both."""

import asyncio
import inspect

from rocket_client import AsyncRocket


class BlockingAsyncRocket:
    """A client that runs each call of an `AsyncRocket` in a separate event loop until it has an answer."""

    def __init__(self, *arguments, **options) -> None:
        self._client = AsyncRocket(*arguments, **options)
        self._runner = asyncio.Runner()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name):
        found = getattr(self._client, name)
        if not inspect.ismethod(found):
            return found

        def call(*arguments, **options):
            answer = found(*arguments, **options)
            return self._runner.run(answer) if inspect.iscoroutine(answer) else self._iterate(answer)

        return call

    def _iterate(self, iterator):
        while True:
            try:
                # `anext` itself is not a coroutine.
                yield self._runner.run(_next(iterator))
            except StopAsyncIteration:
                return


async def _next(iterator):
    return await anext(iterator)
