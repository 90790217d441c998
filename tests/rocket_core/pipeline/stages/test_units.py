"""Bytes of entropy-coded layers, and what becomes of those that earlier layers leave."""

import pytest

from rocket_core.candidates import Candidate
from rocket_core.pipeline.stages.units import CodedSizes, CompressionUnit
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerOutcome


def unit(name, stored_bytes, kind="entropy_coded"):
    errors = {"reconstruction_error": 0.1, "weight_error": 0.1}
    candidate = Candidate(kind=kind, kept_parameters=100, nnz=None, stored_bytes=stored_bytes, **errors)
    return CompressionUnit(names=(name,), input_group=name, candidates=(candidate,))


UNITS = [unit("a", 100), unit("b", 100), unit("pruned", 50, kind="sparse"), unit("c", 200), unit("d", 100)]


@pytest.fixture
def sizes(tmp_path):
    """Return the sizes and what notes the bytes that a layer is compressed to."""
    work = WorkFolder(tmp_path)
    (tmp_path / "outcomes").mkdir()

    def finish(name, taken):
        work.save_outcome(name, LayerOutcome(nnz=1, kept_parameters=1, stored_bytes=taken, achieved_error=0.1))

    return CodedSizes(work, UNITS, 0), finish


def allowed(sizes, index):
    return sizes.sized(UNITS[index]).candidates[0].stored_bytes


def test_what_a_layer_leaves_is_divided_by_bytes(sizes):
    sizes, finish = sizes
    assert allowed(sizes, 0) == 100
    finish("a", 60)
    assert allowed(sizes, 1) == 100 + 40 * 100 // 400
    assert sizes.sized(UNITS[2]) == UNITS[2]


def test_a_block_depends_on_no_other_block(sizes, tmp_path):
    _, finish = sizes
    finish("a", 60)
    blocks = [CodedSizes.of_block(WorkFolder(tmp_path), block, UNITS, 50) for block in (UNITS[:3], UNITS[3:])]
    # 50 bytes are divided as 200 to 300; of the first block's 20, and the 40 that layer a has left, b gets all.
    assert allowed(blocks[0], 1) == 100 + 20 + 40
    assert [allowed(blocks[1], index) for index in (3, 4)] == [200 + 30 * 200 // 300, 100 + 30 * 100 // 300]


@pytest.mark.parametrize("refined_first", [False, True])
def test_what_refinement_leaves_goes_to_later_blocks(sizes, refined_first):
    sizes, finish = sizes
    for name, taken in (("a", 100), ("b", 100), ("pruned", 50)):
        finish(name, taken)
    if not refined_first:
        assert allowed(sizes, 3) == 200
    sizes.note_refined({"a": 90, "b": 80, "pruned": 50})
    assert allowed(sizes, 3) == 200 + 30 * 200 // 300
    assert allowed(sizes, 4) == 100 + 30 * 100 // 300


def test_no_layer_gets_less_than_it_was_given(sizes):
    sizes, finish = sizes
    finish("a", 100)
    sizes.note_refined({"a": 130})
    assert allowed(sizes, 1) == 100
