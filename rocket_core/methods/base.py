"""Base class of compression methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rocket_core.candidates import Candidate, SharedCandidate
from rocket_core.config import PROFILE_RATIOS, CompressionConfig
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem
from rocket_core.sizes.target import ByRatio


class Method(ABC):
    """A compression method: turns a layer's weight and statistics into candidates, and a candidate into factors.

    To add a method, write a subclass, and add its name to `config.Method` and to the table `METHODS`.

    Args:
        config: all settings.
        itemsize: bytes of a stored number.
    """

    uniform: ClassVar[bool] = False
    """Whether every layer is compressed at the same ratio or in one format, which leaves the allocation no choice."""

    def __init__(self, config: CompressionConfig, itemsize: int) -> None:
        self.config = config
        self.itemsize = itemsize

    @property
    def needs_input_gram(self) -> bool:
        """Whether the Gram matrix of each layer's input is needed, even if that of its output is smaller."""
        return False

    @property
    def shares(self) -> bool:
        """Whether `share` finds candidates for layers that read the same input."""
        return False

    @property
    def ratios(self) -> Sequence[float]:
        """Compression ratios at which a layer gets candidates."""
        if not self.uniform:
            return PROFILE_RATIOS
        target = self.config.target
        assert isinstance(target, ByRatio), "the settings refuse such a method without a ratio"
        return (target.ratio,) if target.ratio > 0 else ()

    @property
    def budget_itemsize(self) -> int | None:
        """Bytes of a stored number if ratios are of bytes; None if they are of parameters."""
        return self.itemsize if self.config.budget == "bytes" else None

    @abstractmethod
    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return the candidates of a layer, apart from the dense one, by kind and decreasing size.

        Raises:
            IllConditionedGramError: the layer's Gram matrix cannot be factorized.
        """

    @abstractmethod
    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Compress a layer as specified by a candidate.

        Args:
            problem: the layer, not necessarily with the weight and the statistics of its profile.
            candidate: kind, rank and nnz, not necessarily a candidate returned by `profile`.

        Returns:
            The factors, in the problem's precision and on its device, and their errors.
        """

    def share(
        self, problem: LayerProblem, dictionary_owner: str, per_layer_candidates: Sequence[Sequence[Candidate]]
    ) -> list[SharedCandidate]:
        """Return candidates for all layers of an input group, by decreasing size; called only if it `shares`.

        Args:
            problem: the members' weights, concatenated by columns.
            dictionary_owner: name of the first member, which owns the dictionary.
            per_layer_candidates: the candidates that `profile` returned for each member.
        """
        raise NotImplementedError(dictionary_owner)

    def compress_shared(self, problem: LayerProblem, rank: int, nnz: int) -> CompressedLayer:
        """Compress all layers of an input group; called only if it `shares`.

        Args:
            problem: the members' weights, concatenated by columns.
            rank: atoms of their dictionary.
            nnz: nonzero coefficients of all members in total.

        Returns:
            The dictionary, with the members' coefficients concatenated by columns.
        """
        raise NotImplementedError((rank, nnz))
