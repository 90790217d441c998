import torch

from rocket_core.calibration.samples import CalibrationInputs, RowCounts


def test_evenly_spaced_samples_come_last():
    inputs = CalibrationInputs(tensors={"input_ids": torch.arange(10)[:, None]}, rows=RowCounts(chats=3))
    found = inputs.spread_last(3)
    assert found.tensors["input_ids"][:, 0].tolist() == [1, 2, 4, 5, 7, 8, 9, 0, 3, 6]
    assert found.rows == inputs.rows


def test_all_samples_keep_their_order():
    inputs = CalibrationInputs.of_text(torch.arange(8).view(4, 2))
    assert inputs.spread_last(4).equals(inputs)


def test_samples_of_different_shapes_are_reordered_as_a_whole():
    samples = [{"input_ids": torch.full((1, length), length)} for length in (1, 2, 3, 4)]
    found = CalibrationInputs.separate(samples).spread_last(2)
    assert [ids.shape[1] for ids in found.token_ids] == [2, 4, 1, 3]
