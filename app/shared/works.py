"""Kinds of work on the result of a finished job; each is done by a job that refers to that one.

A row has everything about a kind but its request (`app.shared.requests`), what is checked before it is accepted
(`app.services.works`), and what its process does (`worker.confined`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

WorkKind = Literal["healing", "evaluation", "export", "push"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A kind of work.

    Attributes:
        kind: its name.
        path: the end of the path of its endpoints.
        endpoint: name of the endpoint that submits it.
        about: description of that endpoint.
        verb: what it does to the result, in the present tense.
        stages: its stages, in order.
        tag: group of that endpoint in the OpenAPI document.
        listed: description of the endpoint that lists the jobs which do it; None if it has none.
        reads_model: whether it reads the original model, and not only the artifact.
        reads_calibration: whether it reads the calibration data.
        makes_result: whether it publishes a report and files.
        converts: whether these are the earlier result in another form, with its report.
        pushes: whether it sends files to the Hub as they are, with a token that may write.
    """

    kind: WorkKind
    path: str
    endpoint: str
    about: str
    verb: str
    stages: Sequence[str]
    tag: str = "results"
    listed: str | None = None
    reads_model: bool = False
    reads_calibration: bool = False
    makes_result: bool = False
    converts: bool = False
    pushes: bool = False

    @property
    def makes_model(self) -> bool:
        """Whether it publishes another model than the earlier job."""
        return self.makes_result and not self.converts


_HEALING = Work(
    kind="healing",
    path="healings",
    endpoint="heal_job",
    about="""
    Submit a job that heals the `rocket` artifact of a succeeded job, and publishes it in the same format and size.

    The numbers that its layers store are trained on text towards the predictions of the original. The artifact is kept
    until the new job ends, even if it expires before; the job that made it cannot be deleted before that.
    """,
    verb="heals",
    stages=("downloading", "preflight", "healing", "exporting"),
    tag="jobs",
    reads_model=True,
    reads_calibration=True,
    makes_result=True,
)
_EVALUATION = Work(
    kind="evaluation",
    path="evaluations",
    endpoint="evaluate_job",
    about="""
    Submit a job that compares the artifact of a succeeded compression with its original.

    It reads a text, zero-shot tasks, and prompts that both models answer. An empty object takes all defaults.
    """,
    verb="evaluates",
    stages=("downloading", "preflight", "evaluating"),
    listed="""
    List the latest 100 evaluations of a job's artifact, newest first; its own evaluation is in its report.

    Only the newest 3 have `answers`.
    """,
    reads_model=True,
)
_EXPORT = Work(
    kind="export",
    path="exports",
    endpoint="export_job",
    about="""
    Submit a job that writes the `rocket` artifact of a succeeded job in another format, with the same weights.

    Every artifact has a dense export. The other formats hold only some of the ways in which layers are stored; where
    they do not, the request is refused, and the message says how to compress for them instead. The files are artifacts
    of the new job.
    """,
    verb="exports",
    stages=("downloading", "exporting"),
    listed="List the latest 100 jobs that write the result of a job in other formats, newest first.",
    makes_result=True,
    converts=True,
)
_PUSH = Work(
    kind="push",
    path="pushes",
    endpoint="push_job",
    about="""
    Submit a job that pushes the files of a succeeded job to a repository on the Hub, in one commit.

    The header `Hub-Token` has a token with write access; without it the server uses its own, which only the user of a
    server without API keys may do. Files that the repository has already are not sent again.
    """,
    verb="pushes",
    stages=("downloading", "uploading"),
    listed="List the latest 100 pushes of a job's files to the Hub, newest first.",
    pushes=True,
)
WORKS: Mapping[str, Work] = {work.kind: work for work in (_EVALUATION, _EXPORT, _PUSH, _HEALING)}
CONVERSIONS: frozenset[str] = frozenset(kind for kind, work in WORKS.items() if work.converts)
"""The kinds whose report is that of the earlier job."""
