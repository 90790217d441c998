import gguf
import pytest

from rocket_core.sizes.block_types import BLOCK_FORMATS, BLOCK_TYPES, block_types_for


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sizes_of_blocks_are_those_of_llama_cpp(name):
    block_format = BLOCK_FORMATS[name]
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (block_format.block_size, block_format.block_bytes) == expected
    assert block_format.stored_bytes(768, 5) == 5 * 768 // expected[0] * expected[1]


def test_types_are_sorted_by_falling_bits():
    bits = [BLOCK_FORMATS[name].bits_per_weight for name in BLOCK_TYPES]
    assert bits == sorted(bits, reverse=True)


def test_rows_are_whole_blocks():
    assert block_types_for(512) == BLOCK_TYPES
    assert block_types_for(96) == ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
    assert block_types_for(172) == ()
    assert block_types_for(0) == ()
