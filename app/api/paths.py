"""Which addresses are pages for people, and which of them anybody may see."""

HOME = "/"
PAGES = "/ui"
SIGN_IN = f"{PAGES}/sign-in"
STATIC = f"{PAGES}/static"

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", SIGN_IN})
"""What anybody may read; and whatever lies below `STATIC`. Nothing else answers without a caller."""

SESSION_COOKIE = "rocket_session"


def is_page(path: str) -> bool:
    """Whether a path is that of a page, or of a part of one."""
    return path == HOME or path.startswith(f"{PAGES}/")


def is_public(method: str, path: str) -> bool:
    """Whether anybody may ask this."""
    if method in {"GET", "HEAD"}:
        return path in PUBLIC_PATHS or path.startswith(f"{STATIC}/")
    return method == "POST" and path == SIGN_IN
