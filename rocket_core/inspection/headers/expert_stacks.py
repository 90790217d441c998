"""Tensors that hold a matrix of every expert, judged from names and shapes. Loads no torch."""

from collections.abc import Iterable, Iterator

from rocket_core.inspection.files.safetensors_headers import TensorHeader

Stack = tuple[int, int, int]
"""Shape of a tensor that holds a matrix of every expert."""

# No known model has half as many; more would take long to describe.
MAX_EXPERTS = 4096
# By the last part of a tensor's name, the layers that read the hidden states, or that return them.
_READING = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "w1": ("gate_proj",),
    "v1": ("up_proj",),
}
_RETURNING = {"down_proj": "down_proj", "output_linear": "down_proj", "w2": "down_proj"}
# Tensors that have the experts one after the other on the first axis, by the ends of their names.
_JOINED = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")


def stack_of(name: str, shape: tuple[int, ...]) -> Stack | None:
    """Return the shape of a tensor in a block if it may hold the matrices of several experts."""
    if len(shape) != 3 or min(shape) < 2 or shape[0] > MAX_EXPERTS or not is_stack_name(name.rpartition(".")[2]):
        return None
    return shape[0], shape[1], shape[2]


def joined_stacks(tensors: Iterable[TensorHeader], experts: int | None) -> Iterator[tuple[str, Stack]]:
    """Yield names and shapes, with a first axis for the experts alone, of tensors that have no such axis."""
    for tensor in tensors:
        if experts and tensor.key.endswith(_JOINED) and len(tensor.shape) == 2 and tensor.shape[0] % experts == 0:
            yield tensor.key, (experts, tensor.shape[0] // experts, tensor.shape[1])


def is_stack_name(last: str) -> bool:
    """Return whether tensors that may hold the matrices of several experts have this as the last part of their name."""
    return last in _READING or last in _RETURNING


def possible_shapes(stack: Stack) -> set[tuple[int, int]]:
    """Return the shapes that the layers in a stack may have: gate and up may be joined, on either side."""
    _, rows, columns = stack
    return {(rows, columns), (rows // 2, columns), (rows, columns // 2)}


def expert_layers(name: str, stack: Stack, hidden_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and `(d_in, d_out)` of the layers in a stack; none if its shape does not fit the hidden states."""
    experts, rows, columns = stack
    if hidden_size not in (rows, columns):
        return
    width = columns if rows == hidden_size else rows
    parent, _, last = name.rpartition(".")
    parent = parent.removesuffix(".mlp") if name.endswith(_JOINED) else parent
    parent = parent if parent.endswith("experts") else f"{parent}.experts"
    reading = _READING.get(last, ())
    for expert in range(experts):
        for layer in reading:
            yield f"{parent}.{expert}.{layer}", (hidden_size, width // len(reading))
        if last in _RETURNING:
            yield f"{parent}.{expert}.{_RETURNING[last]}", (width, hidden_size)
