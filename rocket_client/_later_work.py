"""Methods of the asynchronous client for work on the result of a finished job."""

from collections.abc import Mapping

from pydantic import JsonValue

from rocket_client._requests import job_path, without_none
from rocket_client._transport import Transport
from rocket_client.models import EvaluationList, ExportList, Job, LaterEvaluation, LaterPush, Link, NewLink, PushList


class LaterWork:
    """Methods of `AsyncRocket`."""

    _transport: Transport

    async def heal(
        self,
        job_id: str,
        *,
        tokens: int,
        calibration: Mapping[str, JsonValue] | None = None,
        metadata: Mapping[str, str] | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
        hub_token: str | None = None,
    ) -> Job:
        """Submit a job that heals the result of another one: trains it towards the original, at the same size.

        `job_id` is a job that has succeeded and exported `rocket`, `tokens` how many to train on, `calibration` the
        text: `dataset`, `sequence_length`, `seed`, by default those of the job. Other arguments and errors are those of
        `submit`.
        """
        body = without_none({"tokens": tokens, "metadata": metadata, "queue": queue, **(calibration or {})})
        return await self._transport.create_job(job_path(job_id, "healings"), body, idempotency_key, hub_token)

    async def evaluate(
        self,
        job_id: str,
        settings: Mapping[str, JsonValue] | None = None,
        *,
        idempotency_key: str | None = None,
        hub_token: str | None = None,
    ) -> Job:
        """Submit a job that compares the artifact of a job that has succeeded with its original.

        Args:
            job_id: the job that has succeeded.
            settings: what both models read: `dataset`, `samples`, `sequence_length`, `stride`, `tasks`, `task_items`,
                `prompts`, `answer_tokens`; None takes all defaults.
            idempotency_key: as in `submit`.
            hub_token: as in `submit`.

        Returns:
            The job that evaluates; `evaluations` has the result once it has succeeded.

        Raises:
            ProblemError: the server refuses the request.
        """
        body = dict(settings or {})
        return await self._transport.create_job(job_path(job_id, "evaluations"), body, idempotency_key, hub_token)

    async def evaluations(self, job_id: str) -> tuple[LaterEvaluation, ...]:
        """Return the latest evaluations of a job's artifact, newest first; the job's own is in its report."""
        return (await self._transport.get(EvaluationList, job_path(job_id, "evaluations"))).data

    async def export(
        self,
        job_id: str,
        *,
        to: str,
        metadata: Mapping[str, str] | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Submit a job that writes the result of another one in another format, with exactly the same weights.

        Args:
            job_id: a job that has succeeded and exported `rocket`.
            to: `dense`, `gguf` (llama.cpp, Ollama, LM Studio) or `compressed-tensors` (vLLM).
            metadata: your own labels.
            queue: which workers run it, `cpu` or `gpu`; None takes that of the job.
            idempotency_key: a repetition with the same key returns the same job; None makes a new key.

        Raises:
            ProblemError: the format cannot hold what the result stores; the message says how to compress for it.
        """
        body = without_none({"to": to, "metadata": metadata, "queue": queue})
        return await self._transport.create_job(job_path(job_id, "exports"), body, idempotency_key)

    async def exports(self, job_id: str) -> tuple[Job, ...]:
        """Return the latest jobs that write the result of a job in other formats, newest first.

        `download` fetches the files of such a job.
        """
        return (await self._transport.get(ExportList, job_path(job_id, "exports"))).data

    async def push(
        self,
        job_id: str,
        repository: str,
        settings: Mapping[str, JsonValue] | None = None,
        *,
        idempotency_key: str | None = None,
        hub_token: str | None = None,
    ) -> Job:
        """Submit a job that pushes files of a job that has succeeded to the Hub; the server sends them.

        `rocket_client.hub_push.push_export` sends them from this machine instead.

        Args:
            job_id: the job that has succeeded.
            repository: `namespace/name` on the Hub, created if necessary.
            settings: `private` (whether the repository must be), `export` (which files), `metadata` and `queue`; None
                takes all defaults.
            idempotency_key: as in `submit`.
            hub_token: a token of the Hub with write access, deleted when the push ends; None takes that of the server,
                which only a server without API keys accepts.

        Returns:
            The job that pushes; `pushes` has the result once it has succeeded.

        Raises:
            ProblemError: the server refuses the request.
        """
        body = without_none({"repository": repository, **(settings or {})})
        return await self._transport.create_job(job_path(job_id, "pushes"), body, idempotency_key, hub_token)

    async def pushes(self, job_id: str) -> tuple[LaterPush, ...]:
        """Return the latest pushes of a job's files to the Hub, newest first."""
        return (await self._transport.get(PushList, job_path(job_id, "pushes"))).data

    async def create_link(self, job_id: str, *, with_files: bool = False) -> NewLink:
        """Create a link that shows a job that has succeeded to anyone who has it, and end the one that it has.

        Args:
            job_id: the job that has succeeded.
            with_files: whether the link also gives its files; otherwise only its report.

        Returns:
            The link, with its address, which cannot be read again.
        """
        return await self._transport.post(NewLink, job_path(job_id, "link"), {"with_files": with_files})

    async def get_link(self, job_id: str) -> Link:
        """Return the link of a job, without its address."""
        return await self._transport.get(Link, job_path(job_id, "link"))

    async def delete_link(self, job_id: str) -> None:
        """End the link of a job."""
        await self._transport.delete(job_path(job_id, "link"))
