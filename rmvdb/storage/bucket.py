"""A folder in an S3 bucket, for machines that share no disk. S3 writes each object whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from rmvdb.errors import ArtifactError, ConfigError, HomeUnreachable
from rmvdb.storage.folders import Entry, Folder, checked

R = TypeVar("R")

SCHEME = "s3://"
#: Seconds after which rmvdb gives up on a connection, and on an answer.
CONNECT, ANSWER = 5.0, 30.0
#: The most objects that S3 removes in one request.
_AT_ONCE = 1000
#: Codes of errors after which another try may succeed, although S3 gives them the status of a wrong request.
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "OperationAborted"}
_MISSING = {"NoSuchKey", "404", "NotFound"}


class Bucket(Folder):
    """A folder in a bucket. A user who may write there can do all that the owner of a local home can: see SECURITY.md.

    boto3 finds keys, region and endpoint as it always does: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws, the machine's role.
    """

    def __init__(self, address: str, *, patience: float, client: Any = None) -> None:
        """`address` is s3://bucket/folder. If the bucket does not answer, each call is tried again for `patience` seconds."""
        self.address, self._patience = address.rstrip("/"), patience
        self._bucket, _, folder = self.address.removeprefix(SCHEME).partition("/")
        self._prefix = f"{folder}/" if folder else ""
        self._client = client or _client(answer=min(ANSWER, patience or ANSWER))

    def folder(self, name: str) -> Bucket:
        """Return the folder of that name in this one."""
        return Bucket(f"{self.address}/{name}", patience=self._patience, client=self._client)

    def where(self, path: str) -> str:
        """Return the file's whole address."""
        return f"{self.address}/{checked(path, self.address)}"

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Write the whole file or nothing."""
        self._call(self.where(path), "put_object", Key=self._prefix + path, Body=bytes(data))

    def read(self, path: str) -> bytes:
        """Return the file's bytes."""

        def get() -> bytes:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + path)["Body"].read()
            return body

        return self._repeated(self.where(path), get)

    def entries(self, path: str = "", *, begins: str = "") -> Iterator[Entry]:
        """Yield all files below this path whose names begin so."""
        token: dict[str, str] = {}
        while True:
            answer = self._list(path, **token)
            for each in answer.get("Contents", ()):
                if not each["Key"].rpartition("/")[2].startswith(begins):
                    continue
                yield Entry(
                    path=each["Key"].removeprefix(self._prefix), bytes=each["Size"], written=each["LastModified"].timestamp()
                )
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def has(self, path: str) -> bool:
        """Return whether this folder holds a file."""
        return bool(self._list(path, MaxKeys=1).get("Contents"))

    def remove(self, path: str) -> None:
        """Remove one file. Do nothing if there is none."""
        self._call(self.where(path), "delete_object", Key=self._prefix + path)

    def clear(self, path: str = "") -> None:
        """Remove all files below this path."""
        keys = [{"Key": self._prefix + each.path} for each in self.entries(path)]
        for start in range(0, len(keys), _AT_ONCE):
            some = {"Objects": keys[start : start + _AT_ONCE], "Quiet": True}
            answer = self._call(f"{self.address}/{path}", "delete_objects", Delete=some)
            for each in answer.get("Errors", ()):
                raise ArtifactError(
                    f"{SCHEME}{self._bucket}/{each['Key']} cannot be removed ({each['Code']}); fix that and run it again"
                )

    def _list(self, path: str, **more: Any) -> Any:
        below = f"{self._prefix}{checked(path, self.address)}/" if path else self._prefix
        return self._call(f"{self.address}/{path}", "list_objects_v2", Prefix=below, **more)

    def _call(self, where: str, name: str, **arguments: Any) -> Any:
        return self._repeated(where, functools.partial(getattr(self._client, name), Bucket=self._bucket, **arguments))

    def _repeated(self, where: str, call: Callable[[], R]) -> R:
        """Make the call, and repeat it with back-off while the bucket does not answer. Translate its errors."""
        tries = Retrying(
            stop=stop_after_delay(self._patience),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            retry=retry_if_exception(_passes),
            reraise=True,
        )
        try:
            return tries(call)
        except Exception as exc:
            if _code(exc) in _MISSING:
                raise ArtifactError(f"{where} is missing; put it back from a backup or repeat the step that wrote it") from (
                    FileNotFoundError(where)
                )
            if _passes(exc):
                raise HomeUnreachable(
                    f"{where}: the bucket did not answer within {self._patience:g} s ({_said(exc)}); when it does, run the same "
                    "command again"
                ) from exc
            raise ArtifactError(f"{where} cannot be used ({_said(exc)}); {_remedy(exc)}, then run it again") from exc


def _client(*, answer: float) -> Any:
    try:
        import boto3
        from botocore import config
    except ImportError as exc:
        raise ConfigError(f"home is a bucket, and boto3 is not installed: pip install 'rmvdb[s3]' ({exc})") from exc
    session, settings = cast(Any, boto3.session.Session), cast(Any, config.Config)
    once = settings(
        connect_timeout=min(CONNECT, answer), read_timeout=answer, retries={"total_max_attempts": 1}, max_pool_connections=32
    )
    return session().client("s3", config=once)  # the default session is not safe to share between threads


def _passes(exc: BaseException) -> bool:
    """Return whether another try may succeed. The code of the answer tells that. Without an answer, it may."""
    from botocore import exceptions as boto

    if isinstance(exc, boto.ClientError):
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _code(exc) in _TRANSIENT_CODES or status >= 500 or status in (408, 429)
    return isinstance(exc, boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError)


def _code(exc: BaseException) -> str:
    """Return S3's code of a refusal, or "" for any other error."""
    answer: dict[str, Any] = getattr(exc, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def _said(exc: BaseException) -> str:
    """Return the error in a few words. An address in its text could hold a password."""
    return _code(exc) or type(exc).__name__


def _remedy(exc: BaseException) -> str:
    if _code(exc) == "NoSuchBucket":
        return "make that bucket, or correct home"
    if _code(exc) or type(exc).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return "give this machine keys (AWS_ACCESS_KEY_ID and so on, as for boto3) that may list, read, write and delete there"
    return "correct home, or the settings of boto3"
