import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from rocket_core.checkpoint import checkpoint_bytes, open_checkpoint, plan_copy, plan_tensor, write_checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int64]


def plans(tensors):
    return [plan_tensor(key, value.dtype, value.shape, lambda value=value: value) for key, value in tensors.items()]


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{index}.w": (100 * torch.rand(3, index + 1, generator=generator)).to(DTYPES[index % len(DTYPES)])
        for index in range(12)
    }


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(DTYPES)), max_size=8),
    limit=st.integers(1, 300),
)
def test_the_safetensors_library_reads_back_every_tensor(shapes, limit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    tensors = {
        f"layer.{index}": (10 * torch.rand(rows, columns)).to(dtype)
        for index, (rows, columns, dtype) in enumerate(shapes)
    }
    size = write_checkpoint(folder, plans(tensors), max_shard_bytes=limit)
    files = sorted(folder.glob("*.safetensors"))
    assert size == sum(file.stat().st_size for file in files)
    read = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensor) and read[key].dtype == tensor.dtype for key, tensor in tensors.items())


def test_metadata_is_exactly_the_format(tmp_path):
    write_checkpoint(tmp_path, plans(some_tensors()), max_shard_bytes=10**9)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_respect_the_limit_and_are_indexed(tmp_path):
    tensors = some_tensors()
    write_checkpoint(tmp_path, plans(tensors), max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted({file.name for file in tmp_path.glob("*.safetensors")})
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name in names:
        held = load_file(tmp_path / name)
        assert all(index["weight_map"][key] == name for key in held)
        assert sum(tensor.nbytes for tensor in held.values()) <= 100 or len(held) == 1


def test_the_size_of_files_is_known_beforehand(tmp_path):
    for limit in (100, 150, 10**9):
        folder = tmp_path / str(limit)
        folder.mkdir()
        expected = checkpoint_bytes(plans(some_tensors()), limit)
        assert write_checkpoint(folder, plans(some_tensors()), max_shard_bytes=limit) == expected
        assert expected == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_files_do_not_depend_on_the_order_of_the_plans(tmp_path):
    tensors = some_tensors()
    contents = []
    for number, ordered in enumerate([tensors, dict(reversed(tensors.items()))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_checkpoint(folder, plans(ordered), max_shard_bytes=150)
        contents.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert contents[0] == contents[1]


def test_a_copied_tensor_is_identical_and_may_be_renamed(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    weight = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    write_checkpoint(source, plans({"old": weight}), max_shard_bytes=10**9)
    entry = open_checkpoint(source).entries["old"]
    write_checkpoint(target, [plan_copy(entry, key="new")], max_shard_bytes=10**9)
    copied = open_checkpoint(target).entries["new"]
    assert b"".join(copied.chunks()) == b"".join(entry.chunks()) == weight.numpy().tobytes()


def test_only_one_tensor_is_created_at_a_time(tmp_path):
    alive = []

    def make(value):
        assert not alive
        alive.append(value)
        return torch.full((4,), float(value))

    made = [plan_tensor(f"t{i}", torch.float32, (4,), lambda i=i: make(i)) for i in range(5)]
    write_checkpoint(tmp_path, made, max_shard_bytes=10**9, on_tensor=lambda _key: alive.clear())
    assert len(load_file(tmp_path / "model.safetensors")) == 5
