import pytest
import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.errors import CorruptCheckpointError
from rocket_core.layers import LayerEntry, layer_tensors
from rocket_core.pipeline.stages.stored_weight import read_dense_weight
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from tests.reference.stored_layers import (
    ALL_KINDS,
    D_IN,
    D_OUT,
    EXPONENT,
    QUANTIZED,
    RANK,
    dense_weight,
    make_factors,
    make_rounded,
)

NAME = "layers.3.q_proj"


@pytest.fixture
def work(tmp_path):
    work = WorkFolder(tmp_path / "work")
    nothing = CalibrationInputs.of_text(torch.zeros(1, 1, dtype=torch.int64))
    work.claim(RunIdentity(rocket_version="1", model="m", revision="r", settings={}), nothing)
    yield work
    work.release()


def codes_of(kind):
    return LayerEntry.of_codes(QUANTIZED[kind], EXPONENT) if kind in QUANTIZED else None


def read(work, kind, dtype=torch.float64):
    rank = RANK if kind in ("factored", "low rank", "follower") else None
    return read_dense_weight(work, NAME, (D_IN, D_OUT), rank=rank, dictionary_owner="dictionary_owner", dtype=dtype)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_weight_of_every_kind_is_read(work, kind):
    stored = make_rounded(QUANTIZED[kind]) if kind in QUANTIZED else make_factors(kind, torch.float64)
    work.save_factors("dictionary_owner", layer_tensors(make_factors("factored", torch.float64), torch.float64))
    work.save_factors(NAME, layer_tensors(stored, torch.float64), codes=codes_of(kind))
    torch.testing.assert_close(read(work, kind), dense_weight(stored), rtol=1e-13, atol=1e-13)
    assert read(work, kind, torch.bfloat16).dtype == torch.bfloat16
    assert work.codes(NAME) == codes_of(kind)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("part", ["weight", "weight_scale"])
def test_damaged_codes_are_refused_by_the_layers_name(work, kind, part):
    tensors = layer_tensors(make_rounded(QUANTIZED[kind]), torch.float32)
    tensors[part] = tensors[part][:-1]
    work.save_factors(NAME, tensors, codes=codes_of(kind))
    with pytest.raises(CorruptCheckpointError, match=rf"^{NAME}: {part} is"):
        read(work, kind)
