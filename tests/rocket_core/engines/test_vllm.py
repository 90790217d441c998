"""Rules of vLLM's loader, as it checks them.

References:
    vLLM 0.33, `model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py`: `pack_factor
    = 32 // num_bits`, groups of -1, 32, 64 or 128 inputs (`MARLIN_SUPPORTED_GROUP_SIZES`), `input_size % group_size
    == 0`.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.engines import ENGINES, ROCKET, VLLM
from rocket_core.sizes.code_format import fewest_bytes, formats_for


def formats(d_in):
    return formats_for(d_in, VLLM.codes)


@given(st.integers(1, 20_000))
def test_formats_are_those_of_its_kernels(d_in):
    for code_format in formats(d_in):
        assert code_format.bits in {4, 8}
        assert code_format.group_size in {32, 64, 128, d_in}
        assert d_in % code_format.group_size == 0
        assert d_in % (32 // code_format.bits) == 0


@pytest.mark.parametrize("d_in", [64, 256, 4096])
def test_usual_layers_have_every_format(d_in):
    groups = {code_format.group_size for code_format in formats(d_in)}
    assert groups == {size for size in (32, 64, 128, d_in) if size <= d_in}


def test_odd_layers_have_none():
    assert formats(66) == ()
    assert fewest_bytes(66, 10, VLLM.codes) is None


def test_engines_are_named_as_they_are_asked_for():
    names = ["rocket", "vllm", "vllm-int8", "vllm-fp8", "vllm-nvfp4", "llama.cpp", "mlx", "onnx"]
    assert [engine.name for engine in ENGINES.values()] == list(ENGINES) == names
    assert all(set(engine.exports) <= set(engine.readable) for engine in ENGINES.values())
    assert {engine.runtime for engine in ENGINES.values()} == {"rocket", "vllm", "llama.cpp", "mlx", "onnx"}
    assert set(ROCKET.kinds) > set(VLLM.kinds)
