"""Downloads of artifacts into a folder: existing files are kept, partial ones resumed, and all are verified."""

from collections.abc import Sequence
from functools import partial

from rocket_client._download_state import DownloadedFile, DownloadRequest, open_session
from rocket_client._transport import AsyncTransport, Transport, in_thread
from rocket_client.errors import ClientError, NothingToDownloadError
from rocket_client.models import Artifact, Job


def fetch_artifacts(transport: Transport, download: DownloadRequest) -> list[DownloadedFile]:
    """Download artifacts into a folder, which is created if necessary.

    Args:
        transport: connection to the server.
        download: which artifacts, and where to.

    Returns:
        The files, each verified by its hash, in the given order.

    Raises:
        UnsafeNameError: a name leads out of the folder.
        FolderBusyError: another download writes to the folder.
        NotEnoughDiskError: the artifacts do not fit on the disk.
        DigestMismatchError: a file is not what the server announced.
        ClientError: the server cannot be reached, or refuses.
        OSError: a file cannot be written.
    """
    with open_session(transport, download) as session:
        for file in session.files:
            file.check_existing()
            session.report(file)
        for file in session.missing():
            while (request := file.next_request()) is not None:
                try:
                    with transport.open_file(request) as response:
                        file.expect(response)
                        for piece in response.iter_raw():
                            file.write(piece)
                            session.report(file)
                    file.check_complete()
                except ClientError as error:
                    transport.wait_out(error, file.retry_budget)
            session.report(file)
        return session.results()


async def fetch_artifacts_async(transport: AsyncTransport, download: DownloadRequest) -> list[DownloadedFile]:
    """Do the same asynchronously, reading and writing files in threads."""
    with open_session(transport, download) as session:
        for file in session.files:
            await in_thread(file.check_existing)
            session.report(file)
        for file in session.missing():
            while (request := await in_thread(file.next_request)) is not None:
                try:
                    async with transport.open_file(request) as response:
                        file.expect(response)
                        async for piece in response.aiter_raw():
                            await in_thread(partial(file.write, piece))
                            session.report(file)
                    file.check_complete()
                except ClientError as error:
                    await transport.wait_out(error, file.retry_budget)
            session.report(file)
        return session.results()


def nothing_to_download(job: Job) -> NothingToDownloadError:
    """Return the error for a job without artifacts."""
    return NothingToDownloadError(f"{job.id} is {job.status}; only a job that has succeeded has artifacts")


def choose_artifacts(job_id: str, artifacts: Sequence[Artifact], exports: Sequence[str]) -> list[Artifact]:
    """Return the artifacts of some exports, and those outside of any export; all artifacts if no export is named.

    Raises:
        NothingToDownloadError: the job has no such export.
    """
    available = {artifact.name.partition("/")[0] for artifact in artifacts if "/" in artifact.name}
    for export in exports:
        if export not in available:
            raise NothingToDownloadError(
                f"{job_id} has no export {export!r}; it has {' and '.join(sorted(available)) or 'none'}"
            )
    chosen = set(exports or available)
    return [artifact for artifact in artifacts if "/" not in artifact.name or artifact.name.split("/")[0] in chosen]
