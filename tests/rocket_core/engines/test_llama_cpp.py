import pytest

from rocket_core.config import compression_config
from rocket_core.engines import LLAMA_CPP
from rocket_core.errors import InvalidConfigError
from rocket_core.exports.gguf_families import FAMILIES
from rocket_core.exports.gguf_projector import VISION_FAMILIES
from rocket_core.sizes.block_types import BLOCK_FORMATS
from rocket_core.sizes.code_format import fewest_bytes, formats_for


def test_families_are_those_that_can_be_written():
    assert set(LLAMA_CPP.classes) == {*FAMILIES, *VISION_FAMILIES}


def test_the_smallest_size_is_that_of_a_block_type():
    assert fewest_bytes(512, 10, LLAMA_CPP.codes) == BLOCK_FORMATS["Q2_K"].stored_bytes(512, 10)
    assert fewest_bytes(96, 10, LLAMA_CPP.codes) == BLOCK_FORMATS["Q4_0"].stored_bytes(96, 10)
    assert fewest_bytes(50, 10, LLAMA_CPP.codes) is None
    assert formats_for(512, LLAMA_CPP.codes) == ()


def test_the_engine_decides_kinds_and_exports():
    config = compression_config(engine="llama.cpp", target_bytes=10**6)
    assert (config.kinds, config.export, config.budget) == (("quantized",), ("gguf",), "bytes")
    assert config.decides_tables


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"code_bits": 4}, "engine llama.cpp has types of blocks instead of code_bits"),
        ({"export": ("rocket",)}, "engine llama.cpp does not read export rocket"),
        ({"kinds": ("quantized", "entropy_coded")}, "engine llama.cpp does not read entropy_coded"),
    ],
)
def test_what_it_does_not_read_is_refused(settings, said):
    with pytest.raises(InvalidConfigError, match=said):
        compression_config(**({"engine": "llama.cpp", "bits": 5} | settings))
