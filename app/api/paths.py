"""Paths of the pages, and which paths are public."""

HOME = "/"
DOCS = "/docs"
PAGES = "/ui"
SIGN_IN = f"{PAGES}/sign-in"
STATIC = f"{PAGES}/static"
SHARED = f"{PAGES}/shared"

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", SIGN_IN})
"""Paths that need no authentication, together with everything below `STATIC` and `SHARED`. All others need a caller."""

SESSION_COOKIE = "rocket_session"


def is_page(path: str) -> bool:
    """Return whether a path is that of a page, or of a part of one."""
    return path in {HOME, DOCS} or path.startswith(f"{PAGES}/")


def is_shared(path: str) -> bool:
    """Return whether a path is that of what a link shows; its token is the authentication."""
    return path.startswith(f"{SHARED}/")


def is_public(method: str, path: str) -> bool:
    """Return whether a request needs no authentication."""
    if method in {"GET", "HEAD"}:
        return path in PUBLIC_PATHS or path.startswith(f"{STATIC}/") or is_shared(path)
    return method == "POST" and path == SIGN_IN
