"""Tables of measured compressions, and what follows for whole models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale.shapes import ModelSize

_GIB = 2**30
_STAGES = ("differentiating", "calibrating", "factorizing", "exporting")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measured compression.

    Attributes:
        size: the whole model.
        blocks: blocks that were compressed.
        vocabulary: tokens of the embedding that was measured.
        preset: settings.
        target: what was asked for.
        result: see `measure`.
    """

    size: ModelSize
    blocks: int
    vocabulary: int
    preset: str
    target: str
    result: dict[str, Any]

    @property
    def label(self) -> str:
        """Model, preset and target."""
        return f"{self.size.name} | {self.preset} {self.target}"

    def seconds(self, stage: str) -> float:
        """Return the time of a stage for one block."""
        return float(self.result["stages"].get(stage, 0.0)) / self.blocks

    @property
    def whole_seconds(self) -> float:
        """Time of the run in which operations were counted; 0 on an accelerator, where these are of another run."""
        return float(self.result["seconds"] if self.result["device"].count("thread") else 0.0)

    @property
    def block_seconds(self) -> float:
        """Time of all stages for one block."""
        return sum(self.seconds(stage) for stage in _STAGES)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device that computes."""
        if self.result["peak_device_bytes"]["calibrating"]:
            return max(size or 0 for size in self.result["peak_device_bytes"].values())
        # Peaks by stage are of what is in memory, without what is swapped out.
        return max(int(self.result.get("peak_held_bytes", 0)), *map(int, self.result["peak_memory_bytes"].values()))


def print_tables(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown."""
    return "\n\n".join(("\n".join(_blocks(rows)), "\n".join(_operations(rows)), "\n".join(_models(rows))))


def _blocks(rows: Sequence[Row]) -> list[str]:
    head = ["model | settings", "sensitivities", "profile", "compression", "export", "sum", "memory", "disk"]
    lines = [f"| {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for row in rows:
        cells = [f"{row.seconds(stage):.1f} s" for stage in _STAGES]
        cells += [f"{row.block_seconds:.1f} s", f"{row.peak_bytes / _GIB:.2f} GiB"]
        cells.append(f"{row.result['disk_bytes'] / row.blocks / _GIB:.2f} GiB")
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return lines


def _operations(rows: Sequence[Row]) -> list[str]:
    head = ["model | settings", "products", "time in products", "factorizations", "others", "speed", "of `torch.mm`"]
    lines = [f"| {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for row in rows:
        found = row.result["operations"]
        products, factorizations, others = (found[kind] for kind in ("products", "factorizations", "others"))
        # What is not computed by torch counts as well: reading, writing, selecting with numpy.
        whole = max(row.whole_seconds, sum(kind["seconds"] for kind in (products, factorizations, others))) or 1.0
        others = {"seconds": whole - products["seconds"] - factorizations["seconds"]}
        cells = [f"{products['operations'] / row.blocks / 1e12:.2f} T"]
        cells += [f"{100 * kind['seconds'] / whole:.0f} %" for kind in (products, factorizations, others)]
        cells.append(f"{products['operations'] / max(products['seconds'], 1e-9) / 1e9:.0f} G/s")
        cells.append(f"{100 * found['mm_seconds'] / max(found['compared_seconds'], 1e-9):.0f} %")
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return lines


def _models(rows: Sequence[Row]) -> list[str]:
    lines = ["| model | settings | blocks | time of all blocks |", "|---|---|---|---|"]
    for row in rows:
        hours = row.block_seconds * row.size.blocks / 3600
        lines.append(f"| {row.label} | {row.size.blocks} | {hours:.2f} h |")
    return lines
