"""The service as tools for agents, over the Model Context Protocol."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Annotated

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from rocket_cli.agent_messages import (
    CompressionRequest,
    Downloaded,
    JobState,
    ModelRequest,
    ReachableSizes,
    Result,
    ShortReport,
    compared_result,
    job_state,
    profile_of,
    reachable_sizes,
    short_report,
)
from rocket_client import AsyncRocket
from rocket_client._defaults import COMMAND_PATIENCE
from rocket_client.errors import ClientError
from rocket_client.models import Estimate, Job, NamedModel, Progress
from rocket_core.config import stage_label
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import CompressionReport
from rocket_core.version import __version__

INSTRUCTIONS = """\
Rocket makes transformer models smaller without training. A compression is a job: `estimate` says what it takes,
`submit` starts it, `watch` waits for it, `report` has size and measured loss, `compare` shows several results, and
`download` or `push` takes the files. To choose a size by its predicted quality first, call `profile`, `watch` it and
call `frontier`. Sizes are bytes, ratios and shares are fractions of 1, losses are nats per token, times are seconds."""

_PROFILE = "prof_"
_MOST_COMPARED = 6
_READS = ToolAnnotations(read_only_hint=True)
_CREATES = ToolAnnotations(read_only_hint=False, destructive_hint=False)

JobId = Annotated[str, Field(description="id of a job, `job_...`, as `submit` returned it")]
Export = Annotated[str | None, Field(description="one of the report's `exports`, such as rocket or gguf; null: all")]
OneExport = Annotated[
    str | None, Field(description="one of the report's `exports`; null: the one for the engine of the job")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools, each a method with the description that agents read.

    Attributes:
        server: address of the service.
        over_http: whether the callers send their own API key and Hub token in headers; otherwise the key is that of the
            environment.
        hub_token: token of the Hugging Face Hub for callers that do not send theirs.
    """

    server: str
    over_http: bool
    hub_token: str | None = None

    async def models(self, context: Context) -> list[NamedModel]:
        """List the models that the service has; models on the Hugging Face Hub can be named as well."""
        async with self._rocket(context) as rocket:
            return list(await rocket.list_models())

    async def estimate(self, request: CompressionRequest, context: Context) -> Estimate:
        """Estimate size, memory, disk and time of a compression without starting it. Next: submit the same request."""
        async with self._rocket(context) as rocket:
            return await rocket.estimate(**request.arguments(), hub_token=self._hub_token(context))

    async def profile(self, request: ModelRequest, context: Context) -> JobState:
        """Start a job that measures a model's layers but writes no files. Next: watch it, then frontier.

        A later submit with target_bytes or bits and the same other settings reuses its measurements.
        """
        async with self._rocket(context) as rocket:
            arguments = request.profile_arguments()
            return job_state(await rocket.profile(**arguments, hub_token=self._hub_token(context)))

    async def frontier(
        self,
        job_or_profile: Annotated[str, Field(description="id of a profile, or of a job that has profiled its layers")],
        context: Context,
    ) -> ReachableSizes:
        """List the sizes that a profiled model can have, in bytes, each with its predicted error. Next: submit."""
        async with self._rocket(context) as rocket:
            is_profile = job_or_profile.startswith(_PROFILE)
            profile_id = job_or_profile if is_profile else profile_of(await rocket.get_job(job_or_profile))
            model_id = (await rocket.get_profile(profile_id)).model_id
            return reachable_sizes(profile_id, model_id, await rocket.frontier(profile_id))

    async def submit(
        self,
        request: CompressionRequest,
        context: Context,
        idempotency_key: Annotated[
            str | None, Field(description="a second submission with the same key returns the first job")
        ] = None,
    ) -> JobState:
        """Start a job that compresses a model. Next: watch it."""
        token = self._hub_token(context)
        async with self._rocket(context) as rocket:
            return job_state(
                await rocket.submit(**request.arguments(), idempotency_key=idempotency_key, hub_token=token)
            )

    async def watch(
        self,
        job_id: JobId,
        context: Context,
        wait_seconds: Annotated[
            float, Field(ge=0, le=300, description="longest wait, in seconds; 0 returns the state at once")
        ] = 45,
    ) -> JobState:
        """Wait until a job has ended or the time is up, and return its state; call it again while the job runs."""
        async with self._rocket(context) as rocket:
            job = await rocket.get_job(job_id)
            if job.has_ended or wait_seconds == 0:
                return job_state(job)
            with anyio.move_on_after(wait_seconds):
                async for news in rocket.events(job_id):
                    if isinstance(news, Progress):
                        await context.report_progress(news.progress, 1.0, stage_label(news.stage or news.status))
            return job_state(await rocket.get_job(job_id))

    async def report(self, job_id: JobId, context: Context) -> ShortReport:
        """Return what a finished compression achieved: verdict, bytes, measured loss, and the layers that cost most."""
        async with self._rocket(context) as rocket:
            return short_report(*await _found(rocket, job_id))

    async def compare(
        self,
        job_ids: Annotated[
            list[str], Field(min_length=2, max_length=_MOST_COMPARED, description="ids of finished compressions")
        ],
        context: Context,
    ) -> list[Result]:
        """Return what several finished compressions achieved, in the given order, to choose one.

        Compare `kl_divergence` and perplexities only where `quality` names the same text.
        """
        async with self._rocket(context) as rocket:
            return [compared_result(*await _found(rocket, job_id)) for job_id in job_ids]

    async def download(
        self,
        job_id: JobId,
        folder: Annotated[str, Field(description="absolute path of a folder; created if necessary")],
        context: Context,
        export: Export = None,
    ) -> Downloaded:
        """Download the files of a finished job to this machine; called again, it resumes."""
        target = Path(folder).expanduser()
        if not target.is_absolute():
            raise ToolError(f"{folder!r} is not an absolute path; give one, such as /home/me/models/smaller")
        async with self._rocket(context) as rocket:
            try:
                files = await rocket.download(job_id, target, exports=() if export is None else (export,))
            except OSError as error:
                raise ToolError(f"cannot write to {folder}: {error.strerror or error}") from error
        return Downloaded(folder=str(target), files={file.artifact.name: file.artifact.size for file in files})

    async def push(
        self,
        job_id: JobId,
        repository: Annotated[str, Field(description="`namespace/name` on the Hugging Face Hub; created if necessary")],
        context: Context,
        export: OneExport = None,
        private: Annotated[bool, Field(description="whether the repository must be private")] = True,
    ) -> JobState:
        """Start a job that pushes the files of a finished job to the Hugging Face Hub. Next: watch it."""
        settings = {"private": private, "export": export}
        token = self._hub_token(context)
        async with self._rocket(context) as rocket:
            return job_state(await rocket.push(job_id, repository, settings, hub_token=token))

    @asynccontextmanager
    async def _rocket(self, context: Context) -> AsyncIterator[AsyncRocket]:
        """Yield a client with the caller's key, whose errors are those of the tool."""
        # An empty key sends none: over HTTP no caller acts with the key of this process.
        key = _bearer(self._header(context, "Authorization")) if self.over_http else None
        try:
            async with AsyncRocket(self.server, api_key=key, patience=COMMAND_PATIENCE) as rocket:
                yield rocket
        except ClientError as error:
            raise ToolError(str(error)) from error

    def _hub_token(self, context: Context) -> str | None:
        return (self._header(context, "Hub-Token") or None) if self.over_http else self.hub_token

    def _header(self, context: Context, name: str) -> str:
        return (context.headers or {}).get(name.lower(), "")


def create_server(tools: Tools) -> MCPServer:
    """Return the server of the tools; over HTTP, without the one that writes to its disk."""
    server = MCPServer(
        "rocket",
        title="Rocket",
        instructions=INSTRUCTIONS,
        version=__version__,
        log_level="WARNING",
        subscriptions=False,
    )
    for read in (tools.models, tools.estimate, tools.frontier, tools.watch, tools.report, tools.compare):
        server.add_tool(read, description=getdoc(read), annotations=_READS)
    creating = (tools.profile, tools.submit, tools.push)
    for create in creating if tools.over_http else (*creating, tools.download):
        server.add_tool(create, description=getdoc(create), annotations=_CREATES)
    return server


async def _found(rocket: AsyncRocket, job_id: str) -> tuple[Job, CompressionReport, EvaluationReport | None]:
    """Return a job, its report, and what was measured of its result, by the job or by a later one."""
    job, report = await rocket.get_job(job_id), await rocket.report(job_id)
    if report.evaluation is not None:
        return job, report, report.evaluation
    later = (evaluation.report for evaluation in await rocket.evaluations(job_id))
    return job, report, next((measured for measured in later if measured is not None), None)


def _bearer(header: str) -> str:
    """Return the key of an `Authorization` header; empty if it has none."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
