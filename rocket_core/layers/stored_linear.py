"""Base class of stored layers, packed or unpacked, with a read-only weight."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rocket_core.errors import RocketError

TENSOR_NAMES = ("weight", "weight_mask", "weight_scale", "weight_u", "weight_u_scale", "bias")
"""Names of the tensors that stored layers have in files, in the order of state dicts."""


class LayerOptions(TypedDict, total=False):
    """The options of a stored layer that any linear layer has.

    Attributes:
        bias: whether it has a bias; False by default.
        transposed: whether the stock layer that it replaces stores its weight as [d_in, d_out] (`Conv1D` of GPT-2).
        layer_name: name for messages.
        device: device of the tensors.
        dtype: dtype of the dense weight and the bias.
    """

    bias: bool
    transposed: bool
    layer_name: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class StoredLinear(nn.Linear):
    """A linear layer with another form of its weight than a dense one; subclasses say which.

    It is an `nn.Linear` so that peft and others treat it as one. Its state dict contains the tensors of the disk format
    in both of its states:

    - packed, as constructed: the parameter `weight` contains the stored form, which every forward expands;
    - unpacked, after `unpack_`: a parameter with another name replaces it, and `weight` is a read-only view of the
      dense weight.

    Args:
        in_features: d_in.
        out_features: d_out.
        weight: the parameter of the packed state, one-dimensional.
        options: see `LayerOptions`.

    Attributes:
        in_features: d_in.
        out_features: d_out.
        transposed: whether the stock layer that it replaces stores its weight as [d_in, d_out].
        layer_name: name for messages.
    """

    _UNPACKED_NAME: ClassVar[str]
    """the parameter that replaces `weight` while unpacked."""

    def __init__(self, in_features: int, out_features: int, *, weight: nn.Parameter, options: LayerOptions) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.transposed = options.get("transposed", False)
        self.layer_name = options.get("layer_name", "this layer")
        self._checked = False
        self.weight = weight
        self.register_parameter("bias", None)
        if options.get("bias", False):
            bias = torch.empty(out_features, device=options.get("device"), dtype=options.get("dtype"))
            self.bias = nn.Parameter(bias)

    @property
    def packed(self) -> bool:
        """Whether the weight is in the form stored on disk."""
        return self._UNPACKED_NAME not in self._parameters

    @property
    def stored(self) -> Tensor:
        """The parameter that contains the weight in the current state."""
        return self.weight if self.packed else self.get_parameter(self._UNPACKED_NAME)

    @property
    def offloaded(self) -> bool:
        """Whether its tensors are offloaded until a forward loads them."""
        return self.stored.is_meta

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the dense weight, in which it computes."""
        return self.stored.dtype

    @property
    def unpacking_bytes(self) -> int:
        """Bytes that `unpack_` adds in memory."""
        raise NotImplementedError

    @property
    def preparing_bytes_on_cpu(self) -> int:
        """Bytes that `prepare_` adds in memory on a CPU; elsewhere it adds `unpacking_bytes`."""
        return self.unpacking_bytes

    def unpack_(self) -> "StoredLinear":
        """Expand the weight permanently: faster, at the cost of `unpacking_bytes` more in memory.

        Raises:
            CorruptCheckpointError: the stored tensors are inconsistent.
        """
        raise NotImplementedError

    def prepare_(self) -> "StoredLinear":
        """Take the form that computes fastest on its device, or as fast in less memory; unpacked if nothing else.

        Raises:
            CorruptCheckpointError: the stored tensors are inconsistent.
        """
        return self.unpack_()

    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "d_out d_in"]:
        """Return the dense weight in new memory, rounded once to the given dtype or to the layer's own.

        Raises:
            RocketError: a part of it is offloaded.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Do nothing, as a stored weight has no useful random initialisation."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self._UNPACKED_NAME in self.__dict__.get("_parameters", ()):
            return DenseView(self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self._UNPACKED_NAME in self.__dict__.get("_parameters", ()):
            raise _read_only(self.layer_name)
        super().__setattr__(name, value)

    def _to_disk(self, unpacked: Tensor) -> Tensor:
        """Return the packed form of the parameter of the unpacked state."""
        raise NotImplementedError

    def _from_disk(self, weight: Tensor, state: Mapping[str, Any], prefix: str) -> Tensor:
        """Return the unpacked form of `weight`, which is in a state dict together with the layer's other tensors."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.packed:
            unpacked = destination.pop(prefix + self._UNPACKED_NAME)
            destination[prefix + "weight"] = self._to_disk(unpacked.detach())
        for key in (prefix + name for name in TENSOR_NAMES):
            if key in destination:  # always in this order, as the contents of shards depend on it
                destination[key] = destination.pop(key)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self._checked = False
        if not self.packed:
            state_dict = dict(self._unpacked_state(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _unpacked_state(self, state_dict: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the state dict's entries in unpacked form, so that loading writes into the existing parameters."""
        for key, tensor in state_dict.items():
            if key == prefix + "weight":
                yield prefix + self._UNPACKED_NAME, self._from_disk(tensor, state_dict, prefix)
            elif key.startswith(prefix):
                yield key, tensor


class DenseView(Tensor):
    """The value of `StoredLinear.weight` while unpacked: shape, dtype and device of the dense weight, without memory.

    peft, among others, reads `weight.device` of every linear layer. Computing with the view composes the dense weight;
    writing to it, which would change a copy and be lost, raises an error.
    """

    _layer: StoredLinear

    def __new__(cls, layer: StoredLinear) -> "DenseView":
        """Create a tensor without storage."""
        shape, device = (layer.out_features, layer.in_features), layer.stored.device
        view: DenseView = Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=device)
        return view

    def __init__(self, layer: StoredLinear) -> None:
        super().__init__()
        self._layer = layer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
        for argument, value in zip(arguments, values, strict=True):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise _read_only(value._layer.layer_name)
        args, kwargs = tree_map(cls._composed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _composed(cls, value: Any) -> Any:
        return value._layer.dense_weight() if isinstance(value, cls) else value

    @property
    def data(self) -> Tensor:
        """The composed dense weight."""
        return self._layer.dense_weight()

    @data.setter
    def data(self, _value: Tensor) -> None:
        raise _read_only(self._layer.layer_name)


def _read_only(layer: str) -> RocketError:
    return RocketError(
        f"{layer}: the weight of a compressed layer is computed from what is stored and cannot be written; "
        "call model.dequantize() first"
    )
