"""The preset `instant` next to rounding to nearest in groups of 32, which takes no fewer bytes.

    python -m benchmarks.instant --model FOLDER --measure FILE [--size 80MB] [--seconds 15]

Every row is a separate program on one thread; processor time is from its start to its files, evaluation not counted. KL
is in nats per token. There is no seed: nothing is drawn.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.time import quality, timed

RTN, BITS = "--method rtn --code-bits 4 --group-size 32 --samples 1", "--preset instant --bits 4.5"
"""Both leave the embeddings as they are, and take 4.5 bits per weight otherwise."""
MOST_KL = 0.7
"""Upper bound on the KL divergence, as a part of that of rounding to nearest."""


def measured(given: argparse.Namespace, arguments: str) -> dict[str, Any]:
    """Compress with some arguments of `rocket compress`, and measure."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        program = [str(Path(sys.executable).with_name("rocket")), "compress", str(given.model), str(out)]
        found = timed([*program, *arguments.split()])
        artifact = next(folder for folder in out.iterdir() if folder.is_dir())
        return found | quality(given, artifact)


def main() -> None:
    """Print the table, and whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a decoder")
    parser.add_argument("--measure", type=Path, required=True, help="a .txt or .jsonl file")
    parser.add_argument("--size", default="80MB", help="size of a file with quantized embeddings")
    parser.add_argument("--seconds", type=float, help="upper bound on its processor time")
    parser.add_argument("--windows", type=int, default=24, help="windows measured")
    parser.add_argument("--measured", type=int, default=512, help="tokens of each")
    given = parser.parse_args()
    sized = f"--preset instant --size {given.size}"
    rows = {arguments: measured(given, arguments) for arguments in (RTN, BITS, sized)}
    print("| | processor seconds | KL | MB |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| `{name}` | {row['seconds']:.1f} | {row['kl']:.4f} | {row['bytes'] / 1e6:.2f} |")
    part = rows[BITS]["kl"] / rows[RTN]["kl"]
    holds = "holds" if part <= MOST_KL else "missed"
    print(f"\nKL, of that of rounding to nearest: {part:.2f}, at most {MOST_KL}: {holds}")
    if given.seconds is not None:
        seconds = rows[sized]["seconds"]
        print(f"seconds: {seconds:.1f}, at most {given.seconds}: {'holds' if seconds <= given.seconds else 'missed'}")


if __name__ == "__main__":
    main()
