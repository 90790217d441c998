"""`rocket push`: push of a job's export to a repository on the Hugging Face Hub."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.commands.download import bytes_view, described
from rocket_cli.connection import Connection, hub_token
from rocket_cli.progress_view import print_line, progress_view
from rocket_core.report.formatting import bytes_text

if TYPE_CHECKING:
    from rocket_client._download import DownloadedFile


Export = Annotated[
    str | None,
    options.option(
        "KIND", "Export to push, such as rocket or gguf.", "the one made for the engine", **options.EXPORT_VALUE
    ),
]
Folder = Annotated[Path | None, options.option("DIR", "Folder for the download.", "a folder in the user's cache")]
Branch = Annotated[str, options.option("BRANCH", "Branch to push to; created if necessary.", name="--revision")]
Message = Annotated[str | None, options.option("TEXT", "Commit message.", "model, ratio and export")]
TokenVariable = Annotated[
    str | None,
    options.option(
        "VARIABLE",
        "Environment variable that holds a Hugging Face Hub token with write access.",
        "HF_TOKEN, or the token of `hf auth login`",
        name="--hub-token-env",
    ),
]


def push(
    *,
    job_id: options.JobId,
    repository: options.HubRepository,
    export: Export = None,
    folder: Folder = None,
    private: options.Private = False,
    revision: Branch = "main",
    message: Message = None,
    hub_token_env: TokenVariable = None,
    connection: Connection,
) -> None:
    """Push the compressed model of JOB to the Hugging Face Hub from this machine, and print the repository's address.

    The files are downloaded first; with `rocket push-job` the server sends them itself.
    Running the command again resumes and uploads nothing twice; the files appear in one commit.
    """
    token = hub_token(hub_token_env)
    with connection.client(job_id) as rocket:
        # Imported here because it is slow to load, and no other command needs it.
        from huggingface_hub.utils import disable_progress_bars

        from rocket_client.hub_push import Destination, push_export

        # They would be drawn over our own.
        disable_progress_bars()
        destination = Destination(
            repository=repository, private=private, revision=revision, message=message, token=token
        )
        with progress_view(quiet=connection.as_json) as view:
            show = bytes_view(view, connection.notice)

            def announce(files: "Sequence[DownloadedFile]") -> None:
                view.show("uploading", f"{_size(files)} to {repository}", 1.0, None)

            pushed = push_export(
                rocket,
                job_id,
                destination,
                export=export,
                folder=None if folder is None else folder.absolute(),
                on_progress=show,
                on_upload=announce,
            )
    if connection.as_json:
        files = [described(file) for file in pushed.files]
        typer.echo(json.dumps(asdict(pushed) | {"files": files}, indent=2))
        return
    done = "pushed in one commit" if pushed.is_new else "all of them already there"
    print_line(f"{pushed.export}: {len(pushed.files)} files of {_size(pushed.files)}, {done}")
    typer.echo(pushed.url if pushed.revision == "main" else f"{pushed.url}/tree/{pushed.revision}")


def _size(files: "Sequence[DownloadedFile]") -> str:
    return bytes_text(sum(file.artifact.size for file in files))
