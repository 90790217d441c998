import torch

from rocket_core.models.held_states import HeldStates


def states(count=3):
    return list(torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(0)))


def test_states_are_rounded_once_and_read_in_their_own_dtype():
    held = HeldStates(torch.bfloat16)
    for tensor in states():
        held.append(tensor)
    assert len(held) == 3
    for found, tensor in zip(held, states(), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, tensor.bfloat16().float())
    held[0] = held[0]
    assert torch.equal(held[0], states()[0].bfloat16().float())


def test_the_memory_is_that_of_the_narrower_dtype():
    held = HeldStates(torch.bfloat16)
    held.append(states()[0])
    assert [tensor.dtype for tensor, _ in held._held] == [torch.bfloat16]


def test_parts_can_be_replaced_and_removed():
    held = HeldStates(torch.bfloat16)
    held[:] = states()
    held[1:] = [states()[0]]
    assert [bool(torch.equal(tensor, states()[0].bfloat16().float())) for tensor in held] == [True, True]
    assert len(held[1:]) == 1
    del held[0]
    held.clear()
    assert len(held) == 0
