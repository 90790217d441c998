import io

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.exports.gguf_file import GgufTensor, GgufValue, gguf_bytes, storage_bytes, write_gguf
from rocket_core.sizes.block_types import BLOCK_TYPES

STORAGES = ("F32", "F16", "BF16", *BLOCK_TYPES)
VALUES = {
    "uint32": st.integers(0, 2**32 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(max_size=12),
}
VALUE = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.builds(GgufValue, st.just(kind), VALUES[kind] | st.lists(VALUES[kind], min_size=1, max_size=4))
)
TENSOR = st.tuples(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 2), st.sampled_from(STORAGES))


def tensor(name, outer, blocks, storage, seed):
    shape = (*outer, blocks * 256)
    data = np.random.default_rng(seed).integers(0, 256, storage_bytes(shape, storage), dtype=np.uint8)
    return GgufTensor(name=name, shape=shape, storage=storage, chunks=lambda: [data.tobytes()]), data


@settings(max_examples=60, deadline=None)
@given(
    metadata=st.dictionaries(st.text(min_size=1, max_size=12), VALUE, max_size=6),
    tensors=st.lists(TENSOR, max_size=4),
)
def test_the_reader_finds_what_was_written(metadata, tensors, tmp_path_factory):
    made = [tensor(f"t{place}", *parts, place) for place, parts in enumerate(tensors)]
    written = [one for one, _ in made]
    stream = io.BytesIO()
    size = write_gguf(stream, metadata, written)
    raw = stream.getvalue()
    assert size == len(raw) == gguf_bytes(metadata, [(one.name, one.shape, one.storage) for one in written])
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    path.write_bytes(raw)
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        assert reader.get_field(key).contents() == value.content
    assert len(reader.tensors) == len(written)
    for found, (one, data) in zip(reader.tensors, made, strict=True):
        assert found.name == one.name
        assert found.tensor_type.name == one.storage
        assert tuple(reversed(found.shape.tolist())) == one.shape
        assert np.array_equal(found.data.reshape(-1).view(np.uint8), data)


def test_a_tensor_of_another_size_than_planned_is_noticed():
    short = GgufTensor(name="t", shape=(2, 32), storage="F32", chunks=lambda: [bytes(8)])
    with pytest.raises(AssertionError, match="t"):
        write_gguf(io.BytesIO(), {}, [short])
