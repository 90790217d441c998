"""The outcome of a push to the Hub."""

from typing import Annotated

from pydantic import Field

from rocket_core.engines import ExportKind
from rocket_core.schema import FrozenModel


class PushReport(FrozenModel):
    """An export in a repository of the Hub."""

    repository: Annotated[str, Field(min_length=1, max_length=256)]
    """`namespace/name`."""
    url: Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=2048)]
    """address of the repository's page."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    """the commit that has all files."""
    is_new: bool
    """whether the push created that commit; false if the repository already had all files."""
    export: ExportKind
    """the export."""
    files: Annotated[int, Field(ge=0, lt=2**31)]
    """number of files."""
    size: Annotated[int, Field(ge=0, lt=2**63)]
    """bytes of all files."""
