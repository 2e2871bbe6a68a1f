"""Stores of backups: a directory, or a bucket of an S3-compatible service.

A store has objects by name. Each is put as a whole: after a crash it is there or not, never in
part. Names have at most one folder in front.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, cast
from urllib.parse import parse_qs, urlsplit

from convoymq.model.errors import Misuse, Unavailable
from convoymq.model.replaced_files import replace_file

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

UNFINISHED = ".new"
S3 = "s3://"


class Store(Protocol):
    """See the module text. Raises Unavailable for what the disk or the service refuses."""

    def put(self, name: str, content: bytes) -> None:
        """Makes an object, durably, or replaces it."""

    def get(self, name: str) -> bytes:
        """Returns an object. Raises LookupError."""

    def names(self, folder: str) -> set[str]:
        """Returns the names of the objects in a folder, with the folder."""

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""

    def alone(self) -> AbstractContextManager[None]:
        """Keeps other backups out, where the store can. Raises Unavailable: one is running."""


class DirectoryStore:
    """A directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, name: str, content: bytes) -> None:
        """See `Store`."""
        target = self._path / name
        try:
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, mode=0o700)
                _sync(target.parent.parent)
            replace_file(target, content, mode=0o600)
        except OSError as error:
            raise _refused(target, error) from error

    def get(self, name: str) -> bytes:
        """See `Store`."""
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            raise LookupError(name) from None
        except OSError as error:
            raise _refused(self._path / name, error) from error

    def names(self, folder: str) -> set[str]:
        """See `Store`."""
        try:
            found = os.listdir(self._path / folder)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _refused(self._path / folder, error) from error
        return {f"{folder}/{name}" for name in found if not name.endswith(UNFINISHED)}

    def remove(self, name: str) -> None:
        """See `Store`."""
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _refused(self._path / name, error) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `Store`. Files of a backup that was interrupted are removed."""
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(self._path, error) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Unavailable(f"another backup to {self._path} is running") from None
            for left in self._path.glob(f"*/*{UNFINISHED}"):
                left.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)


class BucketStore:
    """A bucket, or what is below a prefix in it."""

    def __init__(self, url: str) -> None:
        """`url`: s3://BUCKET/PREFIX, with ?endpoint=URL for a service other than Amazon's. The
        environment and files of boto3 have region and credentials."""
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            raise Misuse(
                "backups to S3 need boto3; it comes with the extra `s3` of convoymq"
            ) from None
        parts = urlsplit(url)
        if not parts.netloc:
            raise Misuse(f"{url!r} names no bucket; the form is s3://BUCKET/PREFIX")
        endpoint = parse_qs(parts.query).get("endpoint", [None])[0]
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._errors = (BotoCoreError, ClientError)
        try:
            self._client: object = boto3.client("s3", endpoint_url=endpoint)
        except (*self._errors, ValueError) as error:
            raise Misuse(f"s3://{self._bucket}: {error}") from None

    def put(self, name: str, content: bytes) -> None:
        """See `Store`."""
        self._ask("put_object", Key=self._prefix + name, Body=content)

    def get(self, name: str) -> bytes:
        """See `Store`."""
        found = self._ask("get_object", Key=self._prefix + name)
        with cast("IO[bytes]", found["Body"]) as body:
            return body.read()

    def names(self, folder: str) -> set[str]:
        """See `Store`."""
        made: set[str] = set()
        more: dict[str, str] = {}
        while True:
            found = self._ask("list_objects_v2", Prefix=f"{self._prefix}{folder}/", **more)
            rows = cast("list[dict[str, str]]", found.get("Contents", []))
            made |= {row["Key"][len(self._prefix) :] for row in rows}
            if not found.get("IsTruncated"):
                return made
            more = {"ContinuationToken": str(found["NextContinuationToken"])}

    def remove(self, name: str) -> None:
        """See `Store`."""
        self._ask("delete_object", Key=self._prefix + name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `Store`: a bucket has no locks."""
        yield

    def _ask(self, operation: str, **fields: object) -> dict[str, object]:
        try:
            found: dict[str, object]
            found = getattr(self._client, operation)(Bucket=self._bucket, **fields)
            return found
        except self._errors as error:
            code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
            if code in ("NoSuchKey", "404"):
                raise LookupError(str(fields.get("Key"))) from None
            raise Unavailable(f"s3://{self._bucket}: {error}") from None


def open_store(target: str) -> Store:
    """Returns the store at a path or an s3:// URL. Raises Misuse."""
    return BucketStore(target) if target.startswith(S3) else DirectoryStore(Path(target))


def _sync(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _refused(path: Path, error: OSError) -> Unavailable:
    with suppress(OSError):
        path.with_suffix(UNFINISHED).unlink(missing_ok=True)
    return Unavailable(f"{path}: {error.strerror or error}")
