"""Artifacts in a bucket of S3, or of a compatible store.

Credentials are found as by all AWS tools: environment variables, configuration files, the machine's role. Uploads that
a crash has interrupted are invisible and are swept; a lifecycle rule of the bucket that aborts them after some days is
harmless, and useful for stores that cannot list them.
"""

import hashlib
import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import quote

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from app.shared.errors import DiskFullError, StorageError, StorageUnavailableError
from app.shared.storage.store import (
    CHUNK_BYTES,
    KEY,
    ArtifactStore,
    StoredFile,
    capped,
    check_key,
    check_regular,
    new_key,
    storage_errors,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef

_PART_BYTES = 8 * 2**20
_MOST_PARTS = 10_000
_UPLOADS_AT_ONCE = 4
_PRESIGNED_SECONDS = 300
# Timeout of a check for /readyz, which has about a second.
_CHECK_SECONDS = 0.8
_TRANSIENT = (BotoConnectionError, HTTPClientError, IncompleteReadError, CredentialRetrievalError)
_TRANSIENT_CODES = frozenset({"RequestTimeout", "SlowDown", "TooManyRequests", "Throttling", "ThrottlingException"})
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "ServiceQuotaExceeded"})
_MISSING_CODES = frozenset({"NoSuchKey", "404"})
_TAKEN_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
# Creating a session reads the descriptions of all services, which takes longer than everything else here.
_SESSION_LOCK = threading.Lock()


class S3Store(ArtifactStore):
    """Artifacts in a bucket.

    Args:
        bucket: name of an existing bucket.
        prefix: prefix of all keys; empty for none.
        endpoint_url: address of a store other than Amazon's.
        connect_seconds: timeout for connecting.
        answer_seconds: timeout for a silence within a response.
        attempts: how often a request without a response is sent.

    Raises:
        StorageError: the AWS configuration is not valid.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        connect_seconds: float = 5.0,
        answer_seconds: float = 20.0,
        attempts: int = 3,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/".removeprefix("/")
        self._folder = f"{self._prefix}artifacts/"
        with _errors():
            self._client = _client(endpoint_url, connect_seconds, answer_seconds, attempts)
            self._impatient = _client(endpoint_url, _CHECK_SECONDS / 2, _CHECK_SECONDS / 2, 1)

    def put(self, source: Path) -> StoredFile:
        """Store a file."""
        check_regular(source)
        with storage_errors(source), source.open("rb") as stream:
            return self._upload(iter(partial(stream.read, CHUNK_BYTES), b""), source.stat().st_size)

    def put_stream(self, chunks: Iterable[bytes], *, max_bytes: int) -> StoredFile:
        """Store a stream."""
        return self._upload(capped(chunks, max_bytes), max_bytes)

    def read(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        name = self._name(key)
        if start >= stop:
            # A range header cannot express an empty range.
            return
        with _errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{stop - 1}")
            left = stop - start
            with closing(answer["Body"]) as body:
                for chunk in body.iter_chunks(CHUNK_BYTES):
                    left -= len(chunk)
                    yield chunk
        if left != 0:
            raise StorageError(f"artifact file {key} has a wrong length in the store; restore it or retry the job")

    def remove(self, key: str) -> None:
        """Remove a file."""
        name = self._name(key)
        with _errors():
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def keys(self, *, before: float) -> list[str]:
        """Return the files stored before a time."""
        pages = self._client.get_paginator("list_objects_v2")
        with _errors():
            return [
                entry["Key"].removeprefix(self._folder)
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder)
                for entry in page.get("Contents", ())
                if self._is_ours(entry["Key"]) and entry["LastModified"].timestamp() < before
            ]

    def remove_unfinished(self, *, before: float) -> int:
        """Abort unfinished uploads to which nothing was added since a time."""
        pages = self._client.get_paginator("list_multipart_uploads")
        with _errors():
            old = [
                upload
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder)
                for upload in page.get("Uploads", ())
                if self._is_ours(upload["Key"]) and self._last_added(upload) < before
            ]
            for upload in old:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    def is_bound_to(self, database: str) -> bool:
        """Return whether the files belong to a database."""
        name = f"{self._prefix}database"
        with _errors():
            try:
                self._client.put_object(Bucket=self._bucket, Key=name, Body=database.encode(), IfNoneMatch="*")
            except ClientError as error:
                if error.response["Error"]["Code"] not in _TAKEN_CODES:
                    raise
            with closing(self._client.get_object(Bucket=self._bucket, Key=name)["Body"]) as body:
                return body.read() == database.encode()

    def check(self) -> None:
        """Write an empty object."""
        with _errors():
            self._impatient.put_object(Bucket=self._bucket, Key=f"{self._prefix}check", Body=b"")

    def presigned_url(self, key: str, *, filename: str, media_type: str) -> str:
        """Return an address where a client can read a file for a few minutes."""
        parameters = {
            "Bucket": self._bucket,
            "Key": self._name(key),
            "ResponseContentDisposition": f"attachment; filename*=utf-8''{quote(filename, safe='')}",
            "ResponseContentType": media_type,
        }
        with _errors():
            return self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=_PRESIGNED_SECONDS)

    def _upload(self, chunks: Iterator[bytes], max_bytes: int) -> StoredFile:
        part_bytes = max(_PART_BYTES, -(-max_bytes // _MOST_PARTS))
        tally = _Tally(chunks, part_bytes)
        key = new_key()
        config = TransferConfig(
            multipart_threshold=part_bytes, multipart_chunksize=part_bytes, max_concurrency=_UPLOADS_AT_ONCE
        )
        with _errors():
            # Large files are sent in parts with their hashes; visible once complete, and aborted on errors.
            self._client.upload_fileobj(
                cast("IO[bytes]", tally),
                self._bucket,
                self._name(key),
                ExtraArgs={"ChecksumAlgorithm": "SHA256"},
                Config=config,
            )
        self._verify(key, tally)
        return StoredFile(key=key, size=tally.size, sha256=tally.sha256)

    def _verify(self, key: str, tally: "_Tally") -> None:
        """Compare the stored content with what was sent.

        From stores that do not support SHA-256, the content is read back.
        """
        with _errors():
            head = self._client.head_object(Bucket=self._bucket, Key=self._name(key), ChecksumMode="ENABLED")
        checksum = head.get("ChecksumSHA256")
        if checksum is None:
            digest = hashlib.sha256()
            for chunk in self.read(key, 0, tally.size):
                digest.update(chunk)
            is_same = digest.hexdigest() == tally.sha256
        else:
            is_same = checksum.partition("-")[0] in tally.checksums
        if not is_same or head["ContentLength"] != tally.size:
            self.remove(key)
            raise StorageUnavailableError(
                "the artifact store received different bytes than were sent, which were removed; retry"
            )

    def _last_added(self, upload: "MultipartUploadTypeDef") -> float:
        """Return when something was last added to an unfinished upload, in seconds since the epoch."""
        pages = self._client.get_paginator("list_parts").paginate(
            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
        )
        times = [part["LastModified"] for page in pages for part in page.get("Parts", ())]
        return max([upload["Initiated"], *times]).timestamp()

    def _name(self, key: str) -> str:
        return self._folder + check_key(key)

    def _is_ours(self, name: str) -> bool:
        return KEY.fullmatch(name.removeprefix(self._folder)) is not None


class _Tally:
    """A file-like object that hashes what is read from it, as a whole and in the parts that it is sent in.

    Args:
        chunks: the content.
        part_bytes: length of every part but the last.
    """

    def __init__(self, chunks: Iterator[bytes], part_bytes: int) -> None:
        self._chunks = chunks
        self._part_bytes = part_bytes
        self._ahead = bytearray()
        self._digest = hashlib.sha256()
        self._part_digest = hashlib.sha256()
        self._parts = b""
        self.size = 0

    @property
    def sha256(self) -> str:
        """Hash of everything read, hexadecimal."""
        return self._digest.hexdigest()

    @property
    def checksums(self) -> set[str]:
        """SHA-256 checksums that a store may report: of the whole content, or of the hashes of its parts."""
        parts = self._parts + (self._part_digest.digest() if self.size % self._part_bytes else b"")
        return {b64encode(digest).decode() for digest in (self._digest.digest(), hashlib.sha256(parts).digest())}

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer than requested only at the end; all if the size is negative."""
        while (size < 0 or len(self._ahead) < size) and (chunk := next(self._chunks, None)) is not None:
            self._ahead += chunk
        end = len(self._ahead) if size < 0 else size
        piece = bytes(self._ahead[:end])
        del self._ahead[:end]
        self._count(piece)
        return piece

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        rest = memoryview(piece)
        while rest:
            fitting = rest[: self._part_bytes - self.size % self._part_bytes]
            self._part_digest.update(fitting)
            self.size += len(fitting)
            rest = rest[len(fitting) :]
            if self.size % self._part_bytes == 0:
                self._parts += self._part_digest.digest()
                self._part_digest = hashlib.sha256()


def _client(endpoint_url: str | None, connect_seconds: float, answer_seconds: float, attempts: int) -> "S3Client":
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=answer_seconds,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=64,
        signature_version="s3v4",
        # At Amazon, bucket names are subdomains; elsewhere they usually do not resolve.
        s3={"addressing_style": "auto" if endpoint_url is None else "path"},
        # Hashes are requested explicitly; many stores do not support those that would be added by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    # Clients are thread-safe; creating them is not.
    with _SESSION_LOCK:
        return _session().client("s3", endpoint_url=endpoint_url, config=config)


@cache
def _session() -> boto3.Session:
    return boto3.Session()


@contextmanager
def _errors(key: str | None = None) -> Iterator[None]:
    """Convert errors of the AWS library to ours, without bucket or address, as clients may read them."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StorageError(
            "no credentials were found for the artifact store; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "configure them in another way that the AWS tools support"
        ) from error
    except _TRANSIENT as error:
        raise _unavailable(type(error).__name__) from error
    except ClientError as error:
        raise _refusal(error, key) from error
    except BotoCoreError as error:
        raise StorageError(f"cannot use the artifact store ({type(error).__name__}): {error}") from error


def _refusal(error: ClientError, key: str | None) -> StorageError:
    code = error.response["Error"]["Code"]
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    if key is not None and code in _MISSING_CODES:
        return StorageError(f"artifact file {key} is missing from the artifact store; restore it or retry the job")
    if key is not None and code == "InvalidRange":
        return StorageError(f"artifact file {key} has a wrong length in the store; restore it or retry the job")
    if code in _FULL_CODES:
        return DiskFullError("the artifact store is full; free some space and retry")
    if status >= 500 or code in _TRANSIENT_CODES:
        return _unavailable(code)
    return StorageError(
        f"the artifact store refuses {error.operation_name} ({code}); check ROCKET_STORAGE_URL, "
        "ROCKET_S3_ENDPOINT_URL and the permissions of the credentials"
    )


def _unavailable(reason: str) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"the artifact store does not respond ({reason}); if retries fail too, check that it is running, "
        "ROCKET_STORAGE_URL and ROCKET_S3_ENDPOINT_URL"
    )
