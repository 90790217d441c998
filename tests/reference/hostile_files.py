"""Safetensors files and config.json as an attacker writes them, each with a name, created on demand.

`HEADERS` are whole files, `CONFIGS` are contents of config.json for the weights of `safetensors_files.save_llama`. All
are to be refused with an error of this library, in time that grows with their size and no faster.
"""

import json
import struct
from collections.abc import Callable

from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

# The model into which the hostile values are inserted.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
HUGE = 10**9


def file_of(header: bytes, data: int = 0) -> bytes:
    """Return a file with this header, and this number of bytes of data."""
    return struct.pack("<Q", len(header)) + header + bytes(data)


def one_tensor(key: str = "model.layers.0.mlp.up_proj.weight", data: int | None = None, **fields: object) -> bytes:
    """Return a file with one tensor, of two numbers unless the fields say otherwise."""
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}
    return file_of(json.dumps({key: tensor}).encode(), 8 if data is None else data)


def with_tensor(key: str, **fields: object) -> bytes:
    """Return a tiny Llama's file with one more tensor, without data unless the fields say otherwise."""
    whole = safetensors_bytes(llama_tensors())
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    header[key] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)], **fields}
    return file_of(json.dumps(header).encode(), len(data))


def many_dimensions(count: int = 100_000) -> bytes:
    """Return one empty tensor whose dimensions multiply to a number with millions of digits."""
    return with_tensor("model.layers.0.mlp.extra.weight", shape=[2**62] * count)


def many_shapes(count: int = 2000) -> bytes:
    """Return matrices that each have a different shape, for each of which a naive judge computes a profile."""
    shapes = [(1 + index % 50, 1 + index // 50) for index in range(count)]
    tensors = {f"model.layers.0.m{index}.weight": ("F32", shape) for index, shape in enumerate(shapes)}
    return safetensors_bytes({**llama_tensors(), **tensors})


def many_tensors(count: int) -> bytes:
    """Return empty tensors in one block, as short as they can be written."""
    tensors = ",".join(f'"b.0.{index}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for index in range(count))
    return file_of(b"{" + tensors.encode() + b"}")


def with_metadata(text: str) -> bytes:
    """Return a file whose header has this metadata."""
    return file_of(f'{{"__metadata__":{text},"a.0.w":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}'.encode())


HEADERS: dict[str, Callable[[], bytes]] = {
    "many_dimensions": many_dimensions,
    "nine_dimensions": lambda: one_tensor(shape=[2, *[1] * 8]),
    "product_beyond_the_file": lambda: one_tensor(shape=[2**62] * 8),
    "empty_with_a_huge_dimension": lambda: one_tensor(shape=[0, 2**62], data_offsets=[0, 0], data=0),
    "dimension_of_many_digits": lambda: file_of(
        b'{"a.0.w":{"dtype":"F32","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,0]}}'
    ),
    "dimension_beyond_conversion": lambda: file_of(
        b'{"a.0.w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'
    ),
    "integers_of_many_digits": lambda: file_of(
        b'{"a.0.w":{"dtype":"F32","shape":[' + b",".join([b"9" * 4299] * 900) + b'],"data_offsets":[0,0]}}'
    ),
    "fraction": lambda: file_of(b'{"a.0.w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,0]}}'),
    "unknown_dtype": lambda: one_tensor(dtype="F99"),
    "unknown_dtype_among_others": lambda: with_tensor("model.layers.0.mlp.extra.weight", dtype="F99"),
    "only_empty_matrices": lambda: one_tensor(shape=[0, 0], data_offsets=[0, 0], data=0),
    "half_a_byte": lambda: one_tensor(dtype="F4", shape=[3], data_offsets=[0, 1], data=1),
    "long_name": lambda: one_tensor("model.layers.0." + "x" * 1_000_000),
    "metadata_of_a_number": lambda: with_metadata('{"format": 1}'),
    "metadata_of_a_list": lambda: with_metadata("[]"),
    "large_metadata": lambda: with_metadata(json.dumps({"x": "y" * 2**21})),
    "duplicate_tensor": lambda: file_of(
        b'{"a.0.w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a.0.w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "duplicate_field": lambda: file_of(b'{"a.0.w":{"dtype":"U8","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "deep_nesting": lambda: file_of(b'{"a":' * 100_000),
    "list_of_lists": lambda: one_tensor(shape=[[2]]),
    "tensor_of_a_list": lambda: file_of(b'{"a.0.w":[]}'),
    "too_many_tensors": lambda: many_tensors(250_001),
    "many_shapes": many_shapes,
}
"""Whole safetensors files, each for a model.safetensors next to a valid config.json of a Llama."""


def config_with(**fields: object) -> Callable[[], bytes]:
    """Return a Llama's config.json with other values in some fields."""
    return lambda: json.dumps(LLAMA | fields).encode()


CONFIGS: dict[str, Callable[[], bytes]] = {
    "huge_num_hidden_layers": config_with(num_hidden_layers=HUGE),
    "one_layer_too_many": config_with(num_hidden_layers=3),
    "layers_under_another_name": config_with(n_layer=HUGE),
    "huge_hidden_size": config_with(hidden_size=HUGE),
    "hidden_size_beyond_64_bits": config_with(hidden_size=2**70),
    "huge_intermediate_size": config_with(intermediate_size=HUGE),
    "huge_vocabulary": config_with(vocab_size=HUGE),
    "vocabulary_times_hidden_size": config_with(vocab_size=320, hidden_size=320),
    "huge_positions": config_with(max_position_embeddings=HUGE),
    "huge_num_attention_heads": config_with(num_attention_heads=HUGE),
    "huge_num_labels": config_with(num_labels=HUGE),
    "huge_num_experts": config_with(model_type="mixtral", num_local_experts=HUGE),
    "huge_layers_of_a_tower": config_with(model_type="llava", vision_config={"num_hidden_layers": HUGE}),
    "huge_layers_of_a_nested_text_model": config_with(model_type="llava", text_config={"num_hidden_layers": HUGE}),
    "huge_attention_types": config_with(model_type="gpt_neo", attention_types=[[["global"], HUGE]]),
    "huge_depths": config_with(model_type="levit", depths=[2, HUGE]),
    "negative_heads": config_with(n_head=-1),
    "negative_layers": config_with(num_hidden_layers=-1),
    "negative_positions": config_with(max_position_embeddings=-64),
    "model_type_of_a_list": config_with(model_type=["llama"]),
    "model_type_of_an_object": config_with(model_type={"llama": 1}),
    "quantization_config_of_a_number": config_with(quantization_config=1),
    "text_config_of_a_list": config_with(text_config=[]),
    "text_config_of_text": config_with(text_config="llama"),
    "patch_size_of_text": config_with(patch_size="16"),
    "image_size_of_flags": config_with(image_size=True),
    "negative_image_size": config_with(image_size=[-1, -1]),
    "num_mel_bins_of_a_list": config_with(num_mel_bins=[80]),
    "num_channels_of_an_object": config_with(num_channels={}),
    "max_position_embeddings_of_text": config_with(max_position_embeddings="64"),
    "max_position_embeddings_of_a_flag": config_with(max_position_embeddings=True),
    "max_position_embeddings_with_a_fraction": config_with(max_position_embeddings=64.5),
    "max_position_embeddings_of_infinity": lambda: json.dumps(LLAMA)[:-1].encode() + b', "n_positions": 1e400}',
    "vocab_size_of_text": config_with(vocab_size="320"),
    "hidden_size_of_a_list": config_with(hidden_size=[32]),
    "is_encoder_decoder_of_text": config_with(is_encoder_decoder="no"),
    "sliding_window_of_text": config_with(sliding_window="x"),
    "sliding_window_of_nothing": config_with(sliding_window=0),
    "attention_chunk_size_of_a_list": config_with(attention_chunk_size=[8]),
    "attention_chunk_size_beyond_64_bits": config_with(attention_chunk_size=2**70),
    "is_causal_of_text": config_with(is_causal="x"),
    "kv_sharing_modes_of_text": config_with(kv_sharing_modes="x"),
    "token_of_text": config_with(eos_token_id="x"),  # noqa: S106 - no secret
    "token_of_a_flag": config_with(bos_token_id=True),
    "token_beyond_64_bits": config_with(eos_token_id=[2, 2**70]),
    "duplicate_key": lambda: b'{"model_type": "llama", "num_hidden_layers": 2, "num_hidden_layers": 3}',
    "duplicate_key_in_an_object": lambda: b'{"model_type": "llama", "text_config": {"a": 1, "a": 2}}',
    "integer_of_many_digits": lambda: b'{"model_type": "llama", "num_hidden_layers": ' + b"9" * 5000 + b"}",
    "deep_list": lambda: b'{"model_type": "llama", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deeper_than_the_stack": lambda: b'{"model_type": "llama", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not_utf8": lambda: b'{"model_type": "\xff"}',
    "lone_number": lambda: b"1e400",
    "no_model_type": lambda: b"{}",
}
"""Contents of config.json next to the valid weights of a tiny Llama, all of which must be refused."""

LARGE_CONFIGS: dict[str, Callable[[], bytes]] = {
    "distinct_keys": lambda: json.dumps(LLAMA | {f"k{index}": 0 for index in range(300_000)}).encode(),
    "long_list": lambda: json.dumps(LLAMA | {"layer_types": [0] * 1_000_000}).encode(),
    "many_objects": lambda: json.dumps(LLAMA | {"objects": [{}] * 1_000_000}).encode(),
    "most_layers": lambda: json.dumps(LLAMA | {"x_layers": [0] * 90_000}).encode(),
    "most_fields": lambda: json.dumps(LLAMA | {"x": [{"n_layers": 0}] * 45_000}).encode(),
    "long_key": lambda: json.dumps(LLAMA | {"a" * 4_000_000 + "_layers": HUGE}).encode(),
    "long_text": lambda: json.dumps(LLAMA | {"_name_or_path": "x" * 4_000_000}).encode(),
}
"""Configs as large as allowed, refused or not, which must be judged in bounded time."""


def ignore_patterns() -> dict[str, list[str]]:
    """Return patterns that would take long to compare, each list for one request."""
    return {
        "long": ["q" * 100_000],
        "many": ["*.q_proj"] * 10_000,
        "stars": ["*a" * 127 + "b"],
        "chunks": ["*" + "a" * 254 + "b"] * 256,
        "classes": ["*[" + "a-z" * 80 + "]b"] * 256,
    }


def long_names(count: int) -> bytes:
    """Return matrices with names of maximum length, almost all of which every pattern of stars matches."""
    name = "model.layers.0." + "a" * 480
    return safetensors_bytes({f"{name}{index:05d}.weight": ("F32", (1, 1)) for index in range(count)})


__all__ = [
    "CONFIGS",
    "HEADERS",
    "LARGE_CONFIGS",
    "LLAMA",
    "config_with",
    "file_of",
    "ignore_patterns",
    "long_names",
    "many_dimensions",
    "many_shapes",
    "many_tensors",
    "one_tensor",
    "with_metadata",
    "with_tensor",
]
