import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from rocket_core.checkpoint import open_checkpoint
from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.mask": torch.tensor([[1, 2], [3, 255]], dtype=torch.uint8),
    "d.scalar": torch.tensor(3.5, dtype=torch.float64),
    "e.empty": torch.empty(0, 5),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_it_reads_what_the_safetensors_library_wrote(folder):
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.entries) == set(TENSORS)
    for key, tensor in TENSORS.items():
        read = checkpoint.entries[key].read()
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    assert checkpoint.stored_bytes == (folder / "model.safetensors").stat().st_size


def test_shards_are_found_through_the_index(tmp_path):
    save_file({"a": TENSORS["a.weight"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b.weight"]}, tmp_path / "two.safetensors")
    save_file({"c": TENSORS["c.mask"]}, tmp_path / "stray.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_checkpoint(tmp_path).entries) == {"a", "b"}


def test_a_missing_shard_is_named(tmp_path):
    save_file({"a": TENSORS["a.weight"]}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=r"lacks 1 of 2.*two\.safetensors"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    save_file({"a": TENSORS["a.weight"]}, tmp_path / "one.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="outside"):
        open_checkpoint(inner)


@pytest.mark.parametrize("cut", [1, 7, 60, 300])
def test_a_truncated_file_is_refused(folder, cut):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*fetch"):
        open_checkpoint(folder)


def test_appended_bytes_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_an_invalid_header_is_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(tmp_path)


def test_a_huge_header_is_not_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        open_checkpoint(tmp_path)


def test_pickles_are_named_and_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model\.bin.*never loaded"):
        open_checkpoint(tmp_path)


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    for name in ("one", "two"):
        save_file({"a": TENSORS["a.weight"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"one\.safetensors.*two\.safetensors"):
        open_checkpoint(tmp_path)
