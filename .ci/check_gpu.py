"""Check that torch sees a GPU, for the make targets that need one."""

import sys

import torch


def main() -> None:
    """Exit with what is missing, or print the device."""
    if not torch.accelerator.is_available():
        sys.exit(
            f"This needs a GPU: torch {torch.__version__} in {sys.prefix} sees none (torch.accelerator.is_available() "
            "is False). Run it on a machine with a GPU and its driver, with a build of torch for it: "
            "https://pytorch.org/get-started/locally/"
        )
    device = torch.accelerator.current_accelerator()
    print(f"torch {torch.__version__}, device {device}")


if __name__ == "__main__":
    main()
