"""Methods of the asynchronous client for uploaded texts and models, and for webhooks."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rocket_client._defaults import LASTING_PATIENCE, noop
from rocket_client._model_upload import advance, upload_steps
from rocket_client._requests import calibration_upload, upload_path, uploaded_model_path, webhook_path
from rocket_client._transport import Transport
from rocket_client._wire import TransferProgress
from rocket_client.models import (
    Delivery,
    NamedList,
    NamedModel,
    NamedModelList,
    NewWebhook,
    Upload,
    UploadedModel,
    Webhook,
    WebhookDetails,
    WebhookList,
)


class Account:
    """Methods of `AsyncRocket`."""

    _transport: Transport

    async def upload(self, file: Path) -> Upload:
        """Upload a calibration file to the server; uploading the same content again returns the same upload.

        Args:
            file: a `.txt` file, or a `.jsonl` file whose lines are objects with a string `text`.

        Raises:
            InvalidArgumentError: the file is of another type.
            ProblemError: the server refuses the file.
            OSError: the file cannot be read.
        """
        return await self._transport.call(calibration_upload(file))

    async def upload_model(
        self,
        folder: Path,
        *,
        name: str | None = None,
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[TransferProgress], None] = noop,
    ) -> UploadedModel:
        """Upload a model, for `submit` as `upload/NAME`; called again with the same folder, it resumes.

        Small files and the headers of the weights are sent first, and the server judges them before the weights follow.

        Args:
            folder: a transformers checkpoint: config.json, safetensors, the files of the tokenizer.
            name: its name on the server, letters, digits, dots, dashes and underscores; None takes that of the folder.
            patience: seconds without an answer before giving up.
            on_progress: called after each piece; by the asynchronous client in a thread.

        Raises:
            InvalidArgumentError: the folder holds no such checkpoint, or another than was uploaded under this name.
            ProblemError: the server refuses the model; the message says why, and what to do.
            OSError: a file cannot be read.
        """
        steps, answer = upload_steps(folder, name, on_progress), None
        while not isinstance(
            step := await self._transport.connections.in_thread(advance, steps, answer), UploadedModel
        ):
            answer = await self._transport.call(step, patience=patience)
        return step

    async def delete_model(self, model_id: str) -> None:
        """Delete an uploaded model, complete or not, that no job needs any longer.

        Args:
            model_id: `upload/NAME`.
        """
        await self._transport.delete(uploaded_model_path(model_id))

    async def get_upload(self, upload_id: str) -> Upload:
        """Return an upload.

        Args:
            upload_id: `upload/ID`.
        """
        return await self._transport.get(Upload, upload_path(upload_id))

    async def delete_upload(self, upload_id: str) -> None:
        """Delete an upload that no job needs any longer.

        Args:
            upload_id: `upload/ID`.
        """
        await self._transport.delete(upload_path(upload_id))

    async def create_webhook(self, url: str, *, events: Sequence[str] | None = None) -> NewWebhook:
        """Create a webhook, which the ends of your jobs are reported to.

        Args:
            url: where deliveries are sent, `https://HOST/PATH`.
            events: `job.succeeded`, `job.failed`, `job.cancelled`; None for all.

        Returns:
            The webhook, with the secret that its deliveries are signed with; it cannot be read again.
        """
        body = {"url": url} | ({} if events is None else {"events": list(events)})
        # If the answer is lost, so is the secret.
        return await self._transport.post(NewWebhook, "/webhooks", body, is_idempotent=False)

    async def list_webhooks(self) -> tuple[Webhook, ...]:
        """Return your webhooks, oldest first."""
        return (await self._transport.get(WebhookList, "/webhooks")).data

    async def get_webhook(self, webhook_id: str) -> WebhookDetails:
        """Return a webhook, and its newest deliveries."""
        return await self._transport.get(WebhookDetails, webhook_path(webhook_id))

    async def test_webhook(self, webhook_id: str) -> Delivery:
        """Send a test delivery to a webhook; once it has been attempted, `get_webhook` shows the outcome."""
        # A second one would send another delivery.
        return await self._transport.post(Delivery, webhook_path(webhook_id, "test"), is_idempotent=False)

    async def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook, with what was not sent yet."""
        await self._transport.delete(webhook_path(webhook_id))

    async def list_models(self) -> tuple[NamedModel, ...]:
        """Return what the server's models folder contains, and your uploads, also what no job can use yet."""
        return (await self._transport.get(NamedModelList, "/models")).data

    async def models(self) -> list[str]:
        """Return the models in the server's folder and your uploads, as `submit` takes them."""
        return [named.id for named in await self.list_models() if named.problem is None]

    async def calibrations(self) -> list[str]:
        """Return the calibration datasets that the server offers."""
        return [named.id for named in (await self._transport.get(NamedList, "/calibrations")).data]
