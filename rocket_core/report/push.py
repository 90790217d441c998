"""The outcome of a push to the Hub."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from rocket_core.engines import NamedExport
from rocket_core.schema import FrozenModel

_URL = re.compile(r"https?://[!-~]+")
_COMMIT = re.compile(r"[0-9a-f]{1,64}")


def _address(text: str) -> str:
    # Pages link to it.
    if not _URL.fullmatch(text):
        raise ValueError("is not the address of a page")
    return text


def _hash(text: str) -> str:
    if not _COMMIT.fullmatch(text):
        raise ValueError("is not a commit")
    return text


class PushReport(FrozenModel):
    """An export in a repository of the Hub."""

    repository: Annotated[str, Field(min_length=1, max_length=256)]
    """`namespace/name`."""
    url: Annotated[str, Field(max_length=2048), AfterValidator(_address)]
    """address of the repository's page."""
    commit: Annotated[str, AfterValidator(_hash)]
    """the commit that has all files."""
    is_new: bool
    """whether the push created that commit; false if the repository already had all files."""
    export: NamedExport
    """the export."""
    files: Annotated[int, Field(ge=0, lt=2**31)]
    """number of files."""
    size: Annotated[int, Field(ge=0, lt=2**63)]
    """bytes of all files."""
