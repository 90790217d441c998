"""Safetensors files written by the specification, without torch and without the code under test."""

import json
import struct

ITEM_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8, "F4": 4}
LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (80, 32),
    "mlp.up_proj": (80, 32),
    "mlp.down_proj": (32, 80),
}


def llama_tensors(*, blocks=2, dtype="F32", linears=LINEARS):
    """Return names, dtypes and shapes of a tiny Llama's tensors, as they are stored."""
    tensors = {"model.embed_tokens.weight": (dtype, (320, 32)), "model.norm.weight": (dtype, (32,))}
    for block in range(blocks):
        for name, shape in linears.items():
            tensors[f"model.layers.{block}.{name}.weight"] = (dtype, shape)
    return tensors


def header_of(tensors):
    """Return the header and the number of bytes it describes."""
    header, position = {}, 0
    for key, (dtype, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        stop = position + count * ITEM_BITS[dtype] // 8
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    return json.dumps(header).encode(), position


def safetensors_bytes(tensors):
    """Return a whole file; all numbers are 0."""
    header, size = header_of(tensors)
    return struct.pack("<Q", len(header)) + header + bytes(size)


def save_llama(folder, *, config=None, **options):
    """Write a folder with config.json, weights and a tokenizer's file that can be judged without loading it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(llama_tensors(**options)))
    (folder / "tokenizer.json").write_text("{}")
    return folder
