"""Calibration samples: tensors by argument of the model's forward."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from rocket_core.schema import FrozenModel

# Between the number of a sample and the name of an argument.
_MARK = "/"


class RowCounts(FrozenModel):
    """Rows of calibration data that were read as texts."""

    chats: int = 0
    """chats that the chat template rendered."""
    skipped: int = 0
    """rows without text, or that the chat template refused, that were skipped."""


_NO_ROWS = RowCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationInputs:
    """Samples on the CPU: all of the same shapes, or each with its own.

    Attributes:
        tensors: by argument of the model's forward; the first axis of each is the sample axis. If samples have their
            own shapes, by number of the sample and argument: `00003/input_ids`.
        rows: what rows they were drawn from.
    """

    tensors: dict[str, Tensor]
    rows: RowCounts = _NO_ROWS

    @classmethod
    def of_text(cls, tokens: Int64[Tensor, "windows tokens"]) -> "CalibrationInputs":
        """Create inputs from windows of text, for a decoder or an encoder."""
        return cls(tensors={"input_ids": tokens})

    @classmethod
    def separate(cls, samples: Sequence[Mapping[str, Tensor]]) -> "CalibrationInputs":
        """Create inputs from samples that are run one by one, each given as the arguments of the model."""
        numbered = (
            (f"{number:05}{_MARK}{name}", tensor)
            for number, sample in enumerate(samples)
            for name, tensor in sample.items()
        )
        return cls(tensors=dict(numbered))

    @property
    def is_separate(self) -> bool:
        """Whether each sample has its own shapes."""
        return any(_MARK in name for name in self.tensors)

    @property
    def token_ids(self) -> list[Tensor]:
        """The ids of all tokens that the model reads."""
        return [tensor for name, tensor in self.tensors.items() if name.endswith("input_ids")]

    def __len__(self) -> int:
        return len(self._samples()) if self.is_separate else len(next(iter(self.tensors.values())))

    def __getitem__(self, samples: slice) -> "CalibrationInputs":
        if self.is_separate:
            return CalibrationInputs.separate(self._samples()[samples])
        return CalibrationInputs(tensors={name: tensor[samples] for name, tensor in self.tensors.items()})

    def spread_last(self, count: int) -> "CalibrationInputs":
        """Return the samples in another order, in which the last `count` are evenly spaced ones of this order."""
        stride = len(self) // count
        order = sorted(range(len(self)), key=lambda sample: (sample % stride == 0 and sample < stride * count, sample))
        if self.is_separate:
            samples = self._samples()
            return replace(CalibrationInputs.separate([samples[sample] for sample in order]), rows=self.rows)
        return replace(self, tensors={name: tensor[order] for name, tensor in self.tensors.items()})

    def batches(self, size: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """Yield the samples in batches of at most `size`, on a device; floating-point tensors are cast to `dtype`.

        Samples with their own shapes are batches of one.
        """

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        if self.is_separate:
            for sample in self._samples():
                yield {name: moved(tensor) for name, tensor in sample.items()}
            return
        for start in range(0, len(self), size):
            yield {name: moved(tensor[start : start + size]) for name, tensor in self.tensors.items()}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all samples."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def numbers(self, argument: str) -> int:
        """Return how many numbers all samples have for an argument of the model; 0 if they lack it."""
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name.rpartition(_MARK)[2] == argument)

    def positions(self, of_each: int) -> int:
        """Return the positions of all samples.

        Args:
            of_each: positions of a sample, where all have the same.
        """
        return sum(ids.numel() for ids in self.token_ids) if self.is_separate else len(self) * of_each

    def sha256(self) -> str:
        """Return a hash of all samples."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(self.tensors[name].numpy().tobytes())
        return digest.hexdigest()

    def equals(self, other: "CalibrationInputs") -> bool:
        """Return whether both contain the same samples."""
        return self.tensors.keys() == other.tensors.keys() and all(
            torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items()
        )

    def _samples(self) -> list[dict[str, Tensor]]:
        samples: dict[str, dict[str, Tensor]] = {}
        for key in sorted(self.tensors):
            number, _, name = key.partition(_MARK)
            samples.setdefault(number, {})[name] = self.tensors[key]
        return list(samples.values())
