"""Messages of the API in the words of the pages: where the API names a request, a page names the page."""

import re
from collections.abc import Mapping

_PLACES: Mapping[str, str] = {
    "jobs": "the page Jobs",
    "profiles": "the page Profiles",
    "webhooks": "the page Webhooks",
    "models": "the form of a new job",
    "calibrations": "the form of a new job",
}
_REQUEST = re.compile(r"GET /(\w+)((?:/[\w{}]+)*)")


def page_words(message: str) -> str:
    """Return a message with the name of a page in place of each request that lists something.

    Requests that no page corresponds to are left as they are.
    """
    return _REQUEST.sub(_place, message)


def _place(request: re.Match[str]) -> str:
    noun, rest = request.groups()
    if noun == "jobs" and rest:
        return "the job's page"
    return _PLACES.get(noun, request[0]) if not rest else request[0]
