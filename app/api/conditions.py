"""Conditional requests (RFC 9110, 13)."""


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Whether a client says that it has this representation already; tags are compared weakly."""
    if if_none_match is None:
        return False
    known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return bool(known & {etag, "*"})
