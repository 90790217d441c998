import torch

from rocket_core.calibration.experts import with_another_token

MODULE = "model.layers.0.mlp.experts"


def test_an_unused_expert_gets_an_average_token():
    diagonals = {
        f"{MODULE}.0.up_proj": torch.tensor([1.0, 2.0]),
        f"{MODULE}.1.up_proj": torch.tensor([3.0, 0.0]),
        f"{MODULE}.2.up_proj": torch.tensor([0.0, 0.0]),
        f"{MODULE}.0.down_proj": torch.tensor([8.0]),
        "model.layers.0.self_attn.q_proj": torch.tensor([5.0]),
        "model.layers.0.mlp.shared_experts.up_proj": torch.tensor([7.0]),
    }
    found = with_another_token(diagonals, [MODULE], tokens=100)
    assert list(found) == list(diagonals)
    torch.testing.assert_close(found[f"{MODULE}.2.up_proj"], torch.tensor([0.04, 0.02]))
    torch.testing.assert_close(found[f"{MODULE}.0.up_proj"], torch.tensor([1.04, 2.02]))
    torch.testing.assert_close(found[f"{MODULE}.0.down_proj"], torch.tensor([8.08]))
    for name in list(diagonals)[4:]:
        assert found[name] is diagonals[name]


def test_a_model_without_experts_is_unchanged():
    diagonals = {"a.0.up_proj": torch.ones(2)}
    assert with_another_token(diagonals, [], tokens=3) == diagonals
