"""What a method is: it turns a layer's weight and statistics into candidates, and a chosen candidate into factors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rocket_core.candidates import Candidate, SharedCandidate
from rocket_core.config import PROFILE_RATIOS, CompressionConfig
from rocket_core.methods.layer_problem import Compressed, LayerProblem


class Method(ABC):
    """One way to compress layers. Adding one is a file with a subclass, its name in `config.Method` and a table row.

    Args:
        config: all settings.
        itemsize: bytes of a stored number.
    """

    uniform: ClassVar[bool] = False
    """Whether every layer is compressed at the same ratio, so that the allocation has nothing to choose."""

    def __init__(self, config: CompressionConfig, itemsize: int) -> None:
        self.config = config
        self.itemsize = itemsize

    @property
    def needs_input_gram(self) -> bool:
        """Whether the Gram matrix of each layer's input is needed, even where that of its output is the smaller one."""
        return False

    @property
    def shares(self) -> bool:
        """Whether `share` finds candidates for layers that read one input."""
        return False

    @property
    def ratios(self) -> Sequence[float]:
        """Compression ratios at which a layer gets candidates."""
        if not self.uniform:
            return PROFILE_RATIOS
        assert self.config.ratio is not None, "the settings refuse such a method without a ratio"
        return (self.config.ratio,) if self.config.ratio > 0 else ()

    @property
    def budget_itemsize(self) -> int | None:
        """Bytes of a number where ratios are of bytes; None where they are of parameters."""
        return self.itemsize if self.config.budget == "bytes" else None

    @abstractmethod
    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Candidates of a layer beside the dense one, by kind and falling size.

        Raises:
            IllConditionedGramError: the layer's Gram matrix cannot be factorized.
        """

    @abstractmethod
    def compress(self, problem: LayerProblem, candidate: Candidate) -> Compressed:
        """Compresses a layer as a candidate says.

        Args:
            problem: the layer, not necessarily with the weight and the statistics of its profile.
            candidate: kind, rank and nnz, not necessarily one that `profile` gave.

        Returns:
            The factors, in the problem's precision and on its device, and their errors.
        """

    def share(self, problem: LayerProblem, owner: str, alone: Sequence[Sequence[Candidate]]) -> list[SharedCandidate]:
        """Candidates for the layers of an input group together, by falling size; asked for only where it `shares`.

        Args:
            problem: the members' weights side by side.
            owner: name of the first member, which owns the dictionary.
            alone: what `profile` gave for each member.
        """
        raise NotImplementedError(owner)

    def compress_shared(self, problem: LayerProblem, rank: int, nnz: int) -> Compressed:
        """Compresses the layers of an input group together; asked for only where it `shares`.

        Args:
            problem: the members' weights side by side.
            rank: atoms of their dictionary.
            nnz: nonzero coefficients of all.

        Returns:
            The dictionary, with the members' coefficients side by side.
        """
        raise NotImplementedError((rank, nnz))
