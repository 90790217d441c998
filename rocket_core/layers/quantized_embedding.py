"""Token embeddings made of integer codes, and embeddings and output heads that are tied to them."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.errors import RocketError
from rocket_core.layers.code_tensors import check_codes, empty_codes, unpack_codes, unpack_outputs
from rocket_core.layers.quantized_linear import QuantizedLinear
from rocket_core.layers.scaled_embedding import rounds_scale
from rocket_core.sizes.code_format import CodeFormat


class QuantizedEmbedding(nn.Embedding):
    """A token embedding that unpacks the rows that are looked up, and never the whole table.

    The table is stored as the weight of a `QuantizedLinear` with an input for every dimension of the embedding and an
    output for every token. It stays packed, whatever form linear layers take.

    Args:
        num_embeddings: number of tokens.
        embedding_dim: numbers for each token.
        code_format: bits of codes and scales, and the size of groups.
        scale_exponent: see `Scales.exponent`.
        padding_idx: see `nn.Embedding`; it only matters for training, and is kept for `dequantize`.
        stock_class: class of the embedding that this one replaces, which only scales; kept for `dequantize`.
        scale: what the rows are multiplied by, rounded to their dtype if the stock class does so.
        layer_name: name for messages.
        device: device of the tensors.
        dtype: dtype of the embeddings; torch's default if None.

    Attributes:
        code_format: bits of codes and scales, and the size of groups.
        scale_exponent: see `Scales.exponent`.
        layer_name: name for messages.
        stock_class: class of the embedding that this one replaces.
        scale: what the rows are multiplied by.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        code_format: CodeFormat,
        scale_exponent: int,
        padding_idx: int | None = None,
        stock_class: type[nn.Embedding] = nn.Embedding,
        scale: float = 1.0,
        layer_name: str = "this embedding",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding would allocate a dense weight
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.code_format, self.scale_exponent, self.layer_name = code_format, scale_exponent, layer_name
        self.stock_class, self.scale, self._rounds_scale = stock_class, scale, rounds_scale(stock_class)
        self._dtype = dtype or torch.get_default_dtype()
        self._checked = False
        self.weight, self.weight_scale = empty_codes(self._shape, code_format, device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embeddings."""
        return self._dtype

    @property
    def offloaded(self) -> bool:
        """Whether its tensors are offloaded until a forward loads them."""
        return self.weight.is_meta

    def reset_parameters(self) -> None:
        """Do nothing, as a stored weight has no useful random initialisation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Embedding may name it)
        """Return the embedding of each token.

        Raises:
            CorruptCheckpointError: the stored tensors are inconsistent.
        """
        self._check()
        with torch.no_grad():
            rows = unpack_outputs(
                self.weight,
                self.weight_scale,
                input.reshape(-1).long(),
                self.embedding_dim,
                self.code_format,
                self.scale_exponent,
            ).rows(self.dtype)
        found = rows.view(*input.shape, self.embedding_dim)
        if self.scale == 1:
            return found
        return found * (torch.tensor(self.scale, dtype=found.dtype) if self._rounds_scale else self.scale)

    @torch.no_grad()
    def dense_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, "tokens hidden"]:
        """Return the dense table, not scaled, in new memory, rounded once to the given dtype or to its own.

        Raises:
            RocketError: it is offloaded.
        """
        if self.offloaded:
            raise RocketError(f"{self.layer_name}: its weight is offloaded; load the model without offloading")
        self._check()
        rounded = unpack_codes(self.weight, self.weight_scale, self._shape, self.code_format, self.scale_exponent)
        return rounded.rows(dtype or self.dtype)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, bits={self.code_format.bits}, "
            f"group_size={self.code_format.group_size}, scale_bits={self.code_format.scale_bits}"
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.embedding_dim, self.num_embeddings

    def _check(self) -> None:
        # Only once, as it waits for the device and cannot be compiled.
        if not self._checked and not torch.compiler.is_compiling():
            check_codes(self.weight, self.weight_scale, self._shape, self.code_format, self.layer_name)
            self._checked = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedEmbedding":
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.weight.device)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._checked = False
        super()._load_from_state_dict(*args, **kwargs)


class TiedEmbedding(QuantizedEmbedding):
    """An embedding that looks up the table of another one, as encoder and decoder of T5 and BART do.

    Args:
        embedding: the other one.
        stock: the embedding that this one replaces.
        scale: what the rows are multiplied by.
        layer_name: name for messages.
    """

    def __init__(self, embedding: QuantizedEmbedding, stock: nn.Embedding, *, scale: float, layer_name: str) -> None:
        super().__init__(
            embedding.num_embeddings,
            embedding.embedding_dim,
            code_format=embedding.code_format,
            scale_exponent=embedding.scale_exponent,
            padding_idx=stock.padding_idx,
            stock_class=type(stock),
            scale=scale,
            layer_name=layer_name,
            device="meta",
            dtype=embedding.dtype,
        )
        # In a tuple, as otherwise it would be registered as a submodule.
        self._embedding = (embedding,)
        self.weight, self.weight_scale = embedding.weight, embedding.weight_scale

    @property
    def embedding(self) -> QuantizedEmbedding:
        """The embedding whose table it looks up."""
        return self._embedding[0]


class TiedLinear(QuantizedLinear):
    """An output head that multiplies with the table of a quantized embedding.

    Both have the same tensors, also where the head is prepared for computing on a CPU.

    Args:
        embedding: the embedding.
        bias: its bias; None if it has none.
        layer_name: name for messages.
    """

    def __init__(
        self, embedding: QuantizedEmbedding, *, bias: nn.Parameter | None = None, layer_name: str = "this head"
    ) -> None:
        super().__init__(
            embedding.embedding_dim,
            embedding.num_embeddings,
            code_format=embedding.code_format,
            scale_exponent=embedding.scale_exponent,
            layer_name=layer_name,
            device="meta",
            dtype=embedding.dtype,
        )
        # In a tuple, as otherwise it would be registered as a submodule.
        self._embedding = (embedding,)
        self.weight, self.weight_scale = embedding.weight, embedding.weight_scale
        self.register_parameter("bias", bias)

    @property
    def embedding(self) -> QuantizedEmbedding:
        """The embedding whose table it multiplies with."""
        return self._embedding[0]

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers ties weights again whenever it is asked to.
        if name == "weight" and not self.packed and value is self.embedding.weight:
            return
        super().__setattr__(name, value)

    def _packed_codes(self) -> Tensor:
        return self.embedding.weight

    def _to_disk(self, unpacked: Tensor) -> Tensor:  # noqa: ARG002 (of the base class)
        return self.embedding.weight.detach()
