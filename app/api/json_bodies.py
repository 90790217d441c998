"""JSON bodies of requests: UTF-8, with unique names in each object."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

DUPLICATE_NAME = "an object has two members with the same name"
"""The parser's error message for duplicate names."""


class JsonRoute(APIRoute):
    """Route whose JSON body is read strictly; for every router with endpoints that take JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler, called with a request that parses its body strictly."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body())
        return self._json


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text (RFC 8259).

    Duplicate names are refused: a proxy may check the first member and the service use the second.

    Raises:
        json.JSONDecodeError: not JSON, not UTF-8, nested too deeply, or an object has two members with the same name.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise json.JSONDecodeError("the body is not valid UTF-8", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("the body is nested too deeply", "", 0) from None


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(members)
    if len(document) < len(members):
        raise json.JSONDecodeError(DUPLICATE_NAME, "", 0)
    return document
