"""Files that no row refers to any more."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """Files of a deleted job or uploaded model, to be removed once the transaction is committed.

    Attributes:
        storage_keys: keys in the store.
        work_key: key of its work folder; None if it has none.
    """

    storage_keys: tuple[str, ...]
    work_key: str | None = None
