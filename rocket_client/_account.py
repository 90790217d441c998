"""Methods of the clients for uploaded texts and models, and for webhooks."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rocket_client import _endpoints
from rocket_client._defaults import LASTING_PATIENCE, noop
from rocket_client._model_upload import UploadProgress, advance, upload_steps
from rocket_client._transport import AsyncTransport, Transport, in_thread
from rocket_client.models import Delivery, NamedModel, NewWebhook, Upload, UploadedModel, Webhook, WebhookDetails


class Account:
    """Methods of `Rocket`."""

    _transport: Transport

    def upload(self, file: Path) -> Upload:
        """Upload a calibration file to the server; uploading the same content again returns the same upload.

        Args:
            file: a `.txt` file, or a `.jsonl` file whose lines are objects with a string `text`.

        Raises:
            InvalidArgumentError: the file is of another type.
            ProblemError: the server refuses the file.
            OSError: the file cannot be read.
        """
        return self._transport.call(_endpoints.upload(file))

    def upload_model(
        self,
        folder: Path,
        *,
        name: str | None = None,
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[UploadProgress], None] = noop,
    ) -> UploadedModel:
        """Upload a model, for `submit` as `upload/NAME`; called again with the same folder, it resumes.

        Small files and the headers of the weights are sent first, and the server judges them before the weights follow.

        Args:
            folder: a transformers checkpoint: config.json, safetensors, the files of the tokenizer.
            name: its name on the server, letters, digits, dots, dashes and underscores; None takes that of the folder.
            patience: seconds without an answer before giving up.
            on_progress: called after each piece.

        Raises:
            InvalidArgumentError: the folder holds no such checkpoint, or another than was uploaded under this name.
            ProblemError: the server refuses the model; the message says why, and what to do.
            OSError: a file cannot be read.
        """
        steps, answer = upload_steps(folder, name, on_progress), None
        while not isinstance(step := advance(steps, answer), UploadedModel):
            answer = self._transport.call(step, patience=patience)
        return step

    def delete_model(self, model_id: str) -> None:
        """Delete an uploaded model, complete or not, that no job needs any longer.

        Args:
            model_id: `upload/NAME`.
        """
        self._transport.send(_endpoints.delete_model(model_id))

    def get_upload(self, upload_id: str) -> Upload:
        """Return an upload.

        Args:
            upload_id: `upload/ID`.
        """
        return self._transport.call(_endpoints.get_upload(upload_id))

    def delete_upload(self, upload_id: str) -> None:
        """Delete an upload that no job needs any longer.

        Args:
            upload_id: `upload/ID`.
        """
        self._transport.send(_endpoints.delete_upload(upload_id))

    def create_webhook(self, url: str, *, events: Sequence[str] | None = None) -> NewWebhook:
        """Create a webhook, which the ends of your jobs are reported to.

        Args:
            url: where deliveries are sent, `https://HOST/PATH`.
            events: `job.succeeded`, `job.failed`, `job.cancelled`; None for all.

        Returns:
            The webhook, with the secret that its deliveries are signed with; it cannot be read again.
        """
        return self._transport.call(_endpoints.create_webhook(url, events=events))

    def list_webhooks(self) -> tuple[Webhook, ...]:
        """Return your webhooks, oldest first."""
        return self._transport.call(_endpoints.list_webhooks()).data

    def get_webhook(self, webhook_id: str) -> WebhookDetails:
        """Return a webhook, and its newest deliveries."""
        return self._transport.call(_endpoints.get_webhook(webhook_id))

    def test_webhook(self, webhook_id: str) -> Delivery:
        """Send a test delivery to a webhook; once it has been attempted, `get_webhook` shows the outcome."""
        return self._transport.call(_endpoints.test_webhook(webhook_id))

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook, with what was not sent yet."""
        self._transport.send(_endpoints.delete_webhook(webhook_id))

    def list_models(self) -> tuple[NamedModel, ...]:
        """Return what the server's models folder contains, and your uploads, also what no job can use yet."""
        return self._transport.call(_endpoints.models()).data

    def models(self) -> list[str]:
        """Return the models in the server's folder and your uploads, as `submit` takes them."""
        return [named.id for named in self.list_models() if named.problem is None]

    def calibrations(self) -> list[str]:
        """Return the calibration datasets that the server offers."""
        return [named.id for named in self._transport.call(_endpoints.calibrations()).data]


class AsyncAccount:
    """Methods of `AsyncRocket`."""

    _transport: AsyncTransport

    async def upload(self, file: Path) -> Upload:
        """See `Rocket.upload`."""
        return await self._transport.call(_endpoints.upload(file))

    async def upload_model(
        self,
        folder: Path,
        *,
        name: str | None = None,
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[UploadProgress], None] = noop,
    ) -> UploadedModel:
        """See `Rocket.upload_model`; `on_progress` is called in a thread."""
        steps, answer = upload_steps(folder, name, on_progress), None
        while not isinstance(step := await in_thread(partial(advance, steps, answer)), UploadedModel):
            answer = await self._transport.call(step, patience=patience)
        return step

    async def delete_model(self, model_id: str) -> None:
        """See `Rocket.delete_model`."""
        await self._transport.send(_endpoints.delete_model(model_id))

    async def get_upload(self, upload_id: str) -> Upload:
        """See `Rocket.get_upload`."""
        return await self._transport.call(_endpoints.get_upload(upload_id))

    async def delete_upload(self, upload_id: str) -> None:
        """See `Rocket.delete_upload`."""
        await self._transport.send(_endpoints.delete_upload(upload_id))

    async def create_webhook(self, url: str, *, events: Sequence[str] | None = None) -> NewWebhook:
        """See `Rocket.create_webhook`."""
        return await self._transport.call(_endpoints.create_webhook(url, events=events))

    async def list_webhooks(self) -> tuple[Webhook, ...]:
        """See `Rocket.list_webhooks`."""
        return (await self._transport.call(_endpoints.list_webhooks())).data

    async def get_webhook(self, webhook_id: str) -> WebhookDetails:
        """See `Rocket.get_webhook`."""
        return await self._transport.call(_endpoints.get_webhook(webhook_id))

    async def test_webhook(self, webhook_id: str) -> Delivery:
        """See `Rocket.test_webhook`."""
        return await self._transport.call(_endpoints.test_webhook(webhook_id))

    async def delete_webhook(self, webhook_id: str) -> None:
        """See `Rocket.delete_webhook`."""
        await self._transport.send(_endpoints.delete_webhook(webhook_id))

    async def list_models(self) -> tuple[NamedModel, ...]:
        """See `Rocket.list_models`."""
        return (await self._transport.call(_endpoints.models())).data

    async def models(self) -> list[str]:
        """See `Rocket.models`."""
        return [named.id for named in await self.list_models() if named.problem is None]

    async def calibrations(self) -> list[str]:
        """See `Rocket.calibrations`."""
        return [named.id for named in (await self._transport.call(_endpoints.calibrations())).data]
