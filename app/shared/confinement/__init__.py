"""What the kernel takes from a process that reads strangers' files: privileges, files, network, memory.

None of this replaces care in the code that reads; it bounds what a mistake there can do. Linux only: elsewhere, and on
kernels without Landlock or seccomp, less is enforced, and `Enforced` says what.
"""

from app.shared.confinement.memory import MemoryGroup, limit_memory
from app.shared.confinement.sandbox import Enforced, Sandbox, close_network, enter_sandbox, supported

__all__ = [
    "Enforced",
    "MemoryGroup",
    "Sandbox",
    "close_network",
    "enter_sandbox",
    "limit_memory",
    "supported",
]
