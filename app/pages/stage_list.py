"""The stages of a job in order, according to its events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Literal

from app.api.resources import JobView
from app.shared.models import JobEvent
from app.shared.requests import LOCAL, UPLOAD
from app.shared.works import WORKS
from rocket_core.config import STAGES, Stage, stage_label


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStep:
    """One stage of a job.

    Attributes:
        name: name of the stage, as people see it.
        state: whether it is done, current, or pending.
        began_at: when it started; None if it has not.
        seconds: how long it took; None unless it is done.
    """

    name: str
    state: Literal["done", "current", "pending"]
    began_at: datetime | None = None
    seconds: float | None = None


def stage_list(job: JobView, events: Sequence[JobEvent]) -> Iterator[StageStep]:
    """Yield past, current and future stages of a job; those of earlier attempts count as well."""
    stages = [(str(event.data["stage"]), event.created_at) for event in events if event.type == "stage"]
    times: dict[str, float] = {}
    for (name, began), (_, ended) in pairwise([*stages, ("", job.finished_at or datetime.max)]):
        if ended is not datetime.max:
            times[name] = times.get(name, 0.0) + (ended - began).total_seconds()
    began_at = dict(reversed(stages))
    for name in dict.fromkeys([*_expected(job), *began_at]):
        is_over = name in began_at and (job.stage != name or job.status.is_terminal)
        if is_over:
            yield StageStep(name=stage_label(name), state="done", began_at=began_at[name], seconds=times.get(name))
        elif job.stage == name and not job.status.is_terminal:
            yield StageStep(name=stage_label(name), state="current", began_at=began_at.get(name))
        elif not job.status.is_terminal:
            yield StageStep(name=stage_label(name), state="pending")


def _expected(job: JobView) -> Sequence[str]:
    work = WORKS.get(job.kind)
    if work is not None:
        return work.stages
    left_out: set[Stage] = set()
    if job.options.heal_tokens is None:
        left_out.add("healing")
    if job.model_id.startswith((LOCAL, UPLOAD)):
        left_out.add("downloading")
    if job.options.objective != "fisher":
        left_out.add("differentiating")
    if job.evaluate is None:
        left_out.add("evaluating")
    if not job.benchmark:
        left_out.add("benchmarking")
    last = "calibrating" if job.kind == "profile" else STAGES[-1]
    return [stage for stage in STAGES[: STAGES.index(last) + 1] if stage not in left_out]
