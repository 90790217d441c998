"""Confinement of processes that read untrusted files: privileges, files, network, memory.

This does not replace care in the code that reads; it limits the damage of a mistake there. Linux only: elsewhere, and
on kernels without Landlock or seccomp, less is enforced, and `Enforced` says what.
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
