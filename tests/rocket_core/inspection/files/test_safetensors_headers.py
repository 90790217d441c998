"""Forged headers, and the choice of files; `checkpoint/test_reader.py` reads real headers."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.checkpoint.reader import DTYPES
from rocket_core.errors import AlreadyQuantizedError, CheckpointFormatError, CorruptCheckpointError
from rocket_core.inspection.files import safetensors_headers
from rocket_core.inspection.files.safetensors_headers import FLOAT_DTYPES, header_length, parse_header, weight_files
from rocket_core.inspection.headers import weight_summary
from rocket_core.inspection.headers.weight_summary import WeightSummary, storage_dtype, summarize, summarize_files
from tests.reference.safetensors_files import ITEM_BITS, header_of, safetensors_bytes


def parse(raw, data=0):
    return parse_header(raw, 8 + len(raw) + data, "f.safetensors")


def one(**fields):
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}).encode()


def test_sizes_of_dtypes_match_torch():
    assert {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} == {
        name: safetensors_headers._BITS[name] for name in DTYPES
    }
    assert all(DTYPES[name].is_floating_point for name in FLOAT_DTYPES)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda key: key != "__metadata__"),
        st.tuples(
            st.sampled_from([name for name in ITEM_BITS if name != "F4"]),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
        ),
        max_size=6,
    )
)
def test_tensors_are_found_where_they_were_written(tensors):
    raw, size = header_of(tensors)
    found = parse(raw, size)
    assert {header.key: (header.dtype, header.shape) for header in found} == tensors
    fields = json.loads(raw)
    for header in found:
        start, stop = fields[header.key]["data_offsets"]
        assert (header.start, header.stop) == (8 + len(raw) + start, 8 + len(raw) + stop)


def test_sub_byte_numbers_are_counted_in_bits():
    raw, size = header_of({"a": ("F4", (3, 4))})
    assert parse(raw, size)[0].nbytes == 6


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        one(dtype=32),
        one(dtype="float32"),
        one(dtype="F" * 100),
        one(shape=2),
        one(shape=[2.0]),
        one(shape=[True, 2]),
        one(shape=[-2]),
        one(shape=[2**63]),
        one(shape=[[2]]),
        one(shape=[3]),
        one(data_offsets=[0]),
        one(data_offsets=[8, 0]),
        one(data_offsets=[0, "8"]),
        one(data_offsets=[-8, 0]),
        one(shape=[2, *[1] * 8]),
        one(shape=[2**62] * 8),
        one(shape=[0, 2**62], data_offsets=[0, 0]),
        one()[:-1] + b"," + one()[1:],
    ],
)
def test_an_inconsistent_header_is_refused(raw):
    with pytest.raises(CorruptCheckpointError, match=r"f\.safetensors"):
        parse(raw, 8)


def test_gaps_and_overlaps_are_refused():
    fields = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    for start in (3, 5):
        both = fields | {"b": {"dtype": "U8", "shape": [4], "data_offsets": [start, start + 4]}}
        with pytest.raises(CorruptCheckpointError, match="offsets"):
            parse(json.dumps(both).encode(), start + 4)


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(
        CheckpointFormatError, match=r"f\.safetensors: tensor 'a' has dtype F2_X, which is not supported"
    ):
        parse(one(dtype="F2_X"), 8)


def test_every_dtype_of_the_format_is_known():
    from safetensors.torch import _TYPES

    assert set(_TYPES) <= set(safetensors_headers._BITS)


def test_eight_dimensions_are_accepted():
    assert parse(one(shape=[1, 1, 1, 2, 1, 1, 1, 1]), 8)[0].numbers == 2


@pytest.mark.parametrize("characters", [511, 512, 513])
def test_tensor_names_have_a_maximum_length(characters):
    raw, size = header_of({"a" * characters: ("U8", (1,))})
    if characters <= 512:
        assert len(parse(raw, size)) == 1
        return
    with pytest.raises(CorruptCheckpointError, match="513 characters") as caught:
        parse(raw, size)
    assert "aaaa" not in str(caught.value)


def test_empty_tensors_do_not_count():
    tensors = {"h.0.w.weight": ("F32", (4, 6)), "h.0.x.weight": ("F32", (0, 9)), "h.1.y.weight": ("F32", (0, 0))}
    summary = summarize(parse(*header_of(tensors)))
    assert summary.matrices == (("h.0.w", (4, 6)),)
    assert dict(summary.block_shapes) == {(4, 6): 1}
    assert (summary.tensors, summary.largest_dimension, summary.largest_tensor) == (3, 6, 24)
    assert set(summary.block_parameters) == {"h.0"}


def test_the_tensor_limit_applies_to_all_files_together(monkeypatch):
    monkeypatch.setattr(weight_summary, "MAX_TENSORS", 3)
    file = parse(*header_of({"a": ("U8", (1,)), "b": ("U8", (1,))}))
    with pytest.raises(CheckpointFormatError, match="org/m has more than 3 tensors"):
        summarize_files([file, file], "org/m")


def test_too_many_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(safetensors_headers, "MAX_TENSORS", 1)
    raw, size = header_of({"a": ("U8", (1,)), "b": ("U8", (1,))})
    with pytest.raises(CorruptCheckpointError, match="2 tensors, more than 1"):
        parse(raw, size)


@pytest.mark.parametrize("length", [0, 1, 93, 25_000_001, 2**63])
def test_a_header_longer_than_its_file_or_the_limit_is_refused(length):
    size = 100 if length < 1000 else 2**64
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        header_length(struct.pack("<Q", length), size, "f.safetensors")


def test_only_matrices_inside_numbered_blocks_count_as_layers():
    tensors = {
        "embed.weight": ("F32", (9, 4)),
        "h.0.w.weight": ("F32", (4, 6)),
        "0.w.weight": ("F32", (4, 6)),
        "h.0.conv.weight": ("F32", (4, 1, 3)),
        "h.0.norm": ("I8", (4,)),
        "layer1.w": ("I8", (4, 6)),
    }
    raw, size = header_of(tensors)
    file = parse(raw, size)
    summary = summarize(file)
    assert dict(summary.block_shapes) == {(4, 6): 2}
    assert dict(summary.dtype_bytes) == {"F32": 4 * (36 + 24 + 24 + 12), "I8": 24}
    assert summarize_files([file, file]).dtype_bytes["F32"] == 2 * 384


@pytest.mark.parametrize("sizes", [{}, {"I8": 2, "F32": 1}, {"F8_E4M3": 5, "BF16": 4}, {"F4": 1}])
def test_mostly_non_float_weights_count_as_quantized(sizes):
    with pytest.raises(AlreadyQuantizedError, match="most weights in the model"):
        storage_dtype(WeightSummary(dtype_bytes=sizes, block_shapes={}), "the model")


def test_the_dtype_is_that_of_most_bytes():
    assert storage_dtype(WeightSummary(dtype_bytes={"I8": 1, "BF16": 3, "F32": 2}, block_shapes={}), "m") == "BF16"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.safetensors", "model.safetensors", "model.safetensors.index.json"], ("model.safetensors",)),
        (["b.safetensors", "a.safetensors"], ("a.safetensors", "b.safetensors")),
        (["x.safetensors", "y.safetensors", "z.safetensors", "model.safetensors.index.json"], ("x.safetensors",)),
    ],
)
def test_weight_files_are_chosen_as_in_transformers(names, chosen):
    index = json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}).encode()
    assert weight_files(names, lambda: index, "folder") == chosen


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../x"}}',
        b"[" * 10**5,
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'{"weight_map": {"a": "' + b"x" * 10**6 + b'"}}',
        json.dumps({"weight_map": {str(index): f"{index}.safetensors" for index in range(5000)}}).encode(),
    ],
)
def test_a_damaged_index_is_refused(index):
    with pytest.raises(CorruptCheckpointError, match=r"folder/model\.safetensors\.index\.json") as caught:
        weight_files(["x", "model.safetensors.index.json"], lambda: index, "folder")
    assert len(str(caught.value)) < 200


def test_an_empty_index_is_refused():
    with pytest.raises(CorruptCheckpointError, match="no files"):
        weight_files(["model.safetensors.index.json"], lambda: b'{"weight_map": {}}', "folder")


def test_a_folder_is_named_as_the_caller_names_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": ("U8", (1,))})[:-1])
    (file,) = safetensors_headers.local_weight_files(tmp_path, "local/x")
    with pytest.raises(CorruptCheckpointError) as caught:
        safetensors_headers.read_header(file, f"local/x/{file.name}")
    assert str(tmp_path) not in str(caught.value)
    assert "local/x/model.safetensors" in str(caught.value)
