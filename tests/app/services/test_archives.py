"""Archives of stored files, read by Python's tarfile."""

import hashlib
import io
import tarfile
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.archives import TarArchive
from app.services.outputs import Download
from app.shared.models import Artifact


def stored(name, content):
    def read(start, stop):
        assert 0 <= start < stop <= len(content)
        yield from (content[at : min(at + 7, stop)] for at in range(start, stop, 7))

    artifact = Artifact(
        name=name,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    return Download(artifact=artifact, read=read, url=None)


def content_of(archive):
    return b"".join(archive.read(0, archive.size))


@given(
    st.dictionaries(
        st.sampled_from(["rocket/a", "rocket/model.safetensors", f"rocket/{'x' * 200}", "rocket/naïve"]),
        st.binary(max_size=1500),
    )
)
def test_the_archive_has_the_files_and_the_size(files):
    archive = TarArchive([stored(name, content) for name, content in files.items()], "tiny")
    packed = content_of(archive)
    assert len(packed) == archive.size
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        found = {member.name: opened.extractfile(member).read() for member in opened}
    assert found == {f"tiny/{name}": content for name, content in files.items()}


def test_any_part_of_it_can_be_read():
    archive = TarArchive([stored("a", bytes(range(200)) * 5), stored("b", b"x")], "tiny")
    packed = content_of(archive)
    for start, stop in ((0, 1), (500, 530), (511, 1600), (archive.size - 1, archive.size)):
        assert b"".join(archive.read(start, stop)) == packed[start:stop]


def test_other_contents_have_another_hash():
    one, other = (TarArchive([stored("a", content)], "tiny").sha256 for content in (b"1", b"2"))
    assert one != other
    assert TarArchive([stored("a", b"1")], "tiny").sha256 == one


@pytest.mark.parametrize("size", [8 * 2**30 - 1, 8 * 2**30, 9 * 2**30 + 1])
def test_files_beyond_the_range_of_old_headers_have_their_size(size):
    file = stored("a", b"")
    file.artifact.size = size
    archive = TarArchive([file], "tiny")
    # What comes before the content: one header, or one with an extended header before it.
    start = io.BytesIO(b"".join(archive.read(0, 512 if size < 8 * 2**30 else 3 * 512)))
    with tarfile.open(fileobj=start) as opened:
        assert opened.next().size == size
