"""Formats of ids as clients send them, and the messages for ids of another format."""

import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import Query

JOB_ID = r"^job_[0-9a-z]{26}$"
PROFILE_ID = r"^prof_[0-9a-z]{26}$"

FORMS: Mapping[str, str] = {
    JOB_ID: "is not a job id; expected `job_` followed by 26 lowercase letters or digits, such as "
    "job_0123456789abcdefghjkmnpqrs: use `last_id` of the previous page, or an `id` from GET /jobs",
    PROFILE_ID: "is not a profile id; expected `prof_` followed by 26 lowercase letters or digits, such as "
    "prof_0123456789abcdefghjkmnpqrs: use `last_id` of the previous page, or an `id` from GET /profiles",
}
"""Messages in place of the regular expression that a text does not match."""

AfterJob = Annotated[str | None, Query(pattern=JOB_ID, description="Id of a job: return only jobs created before it.")]
AfterProfile = Annotated[
    str | None, Query(pattern=PROFILE_ID, description="Id of a profile: return only profiles created before it.")
]
PageSize = Annotated[int, Query(ge=1, le=100, description="Maximum number of items.")]


def is_job_id(text: str) -> bool:
    """Return whether a text has the form of a job's id."""
    return re.fullmatch(JOB_ID, text) is not None


def is_profile_id(text: str) -> bool:
    """Return whether a text has the form of a profile's id."""
    return re.fullmatch(PROFILE_ID, text) is not None
