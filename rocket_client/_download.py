"""Downloads of artifacts into a folder: existing files are kept, partial ones resumed, and all are verified."""

from collections.abc import Sequence
from functools import partial

from rocket_client._download_state import DownloadedFile, Order, begun
from rocket_client._transport import AsyncTransport, Transport, in_thread
from rocket_client.errors import ClientError, NothingToDownloadError
from rocket_client.models import Artifact, Job


def fetch_artifacts(transport: Transport, order: Order) -> list[DownloadedFile]:
    """Download artifacts into a folder, which is created if necessary.

    Args:
        transport: connection to the server.
        order: which artifacts, and where to.

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
    with begun(transport, order) as download:
        for target in download.targets:
            target.look()
            download.tell(target)
        for target in download.missing():
            while (request := target.next_request()) is not None:
                try:
                    with transport.open_file(request) as response:
                        target.expect(response)
                        for piece in response.iter_raw():
                            target.write(piece)
                            download.tell(target)
                    target.require_end()
                except ClientError as error:
                    transport.wait_out(error, target.left)
            download.tell(target)
        return download.files()


async def fetch_artifacts_async(transport: AsyncTransport, order: Order) -> list[DownloadedFile]:
    """Do the same asynchronously, reading and writing files in threads."""
    with begun(transport, order) as download:
        for target in download.targets:
            await in_thread(target.look)
            download.tell(target)
        for target in download.missing():
            while (request := await in_thread(target.next_request)) is not None:
                try:
                    async with transport.open_file(request) as response:
                        target.expect(response)
                        async for piece in response.aiter_raw():
                            await in_thread(partial(target.write, piece))
                            download.tell(target)
                    target.require_end()
                except ClientError as error:
                    await transport.wait_out(error, target.left)
            download.tell(target)
        return download.files()


def nothing_to_download(job: Job) -> NothingToDownloadError:
    """Return the error for a job without artifacts."""
    return NothingToDownloadError(f"{job.id} is {job.status}; only a job that has succeeded has artifacts")


def choose_artifacts(job_id: str, artifacts: Sequence[Artifact], exports: Sequence[str]) -> list[Artifact]:
    """Return the artifacts of some exports, and those outside of any export; all artifacts if no export is named.

    Raises:
        NothingToDownloadError: the job has no such export.
    """
    found = {artifact.name.partition("/")[0] for artifact in artifacts if "/" in artifact.name}
    for export in exports:
        if export not in found:
            raise NothingToDownloadError(
                f"{job_id} has no export {export!r}; it has {' and '.join(sorted(found)) or 'none'}"
            )
    wanted = set(exports or found)
    return [artifact for artifact in artifacts if "/" not in artifact.name or artifact.name.split("/")[0] in wanted]
