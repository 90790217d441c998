"""The same view of every kind of store: its content, read by other means than the store's own."""

import pytest

from app.shared.settings import Settings
from app.shared.storage import open_store


class LocalView:
    """A local store's folder."""

    def __init__(self, tmp_path):
        self.settings = {"storage_url": f"file://{tmp_path}/store"}
        self._folder = tmp_path / "store" / "artifacts"

    def keys(self):
        return sorted(file.name for file in self._folder.iterdir() if file.suffix != ".tmp")

    def has_begun(self):
        return bool(self.unfinished())

    def unfinished(self):
        return sorted(file.stem for file in self._folder.glob("*.tmp"))

    def read(self, key):
        return (self._folder / key).read_bytes()

    def write(self, key, content):
        (self._folder / key).write_bytes(content)

    def break_down(self):
        self._folder.rename(self._folder.with_name("elsewhere"))


class S3View:
    """An S3 store's bucket."""

    def __init__(self, settings, bucket):
        self.settings = settings
        self._bucket = bucket
        self._prefix = "rocket/test/artifacts/"

    def keys(self):
        return [key.removeprefix(self._prefix) for key in self._bucket.names() if key.startswith(self._prefix)]

    def has_begun(self):
        return self._bucket.has_parts()

    def unfinished(self):
        return [key.removeprefix(self._prefix) for key in self._bucket.unfinished()]

    def read(self, key):
        return self._bucket.read(self._prefix + key)

    def write(self, key, content):
        self._bucket.write(self._prefix + key, content)

    def break_down(self):
        for key in self._bucket.names():
            self._bucket.remove(key)
        self._bucket.client.delete_bucket(Bucket=self._bucket.name)


@pytest.fixture(params=["local", "s3"])
def view(request, tmp_path):
    if request.param == "local":
        return LocalView(tmp_path)
    return S3View(request.getfixturevalue("s3_settings"), request.getfixturevalue("bucket"))


@pytest.fixture
def another_store(view, tmp_path):
    """Open the store once more, as another process does."""
    return lambda: open_store(Settings(data_dir=tmp_path / "data", **view.settings))


@pytest.fixture
def store(another_store):
    return another_store()


@pytest.fixture
def source(tmp_path):
    def source(content):
        file = tmp_path / "source"
        file.write_bytes(content)
        return file

    return source
