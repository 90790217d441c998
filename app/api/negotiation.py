"""Conditional requests (RFC 9110, 13) and content negotiation."""


def is_known(if_none_match: str | None, etag: str) -> bool:
    """Return whether a client already has this representation; tags are compared weakly."""
    if if_none_match is None:
        return False
    known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return bool(known & {etag, "*"})


def prefers_html(accept: str | None) -> bool:
    """Return whether an `Accept` header prefers HTML to JSON; `*/*` does not."""
    weights: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, *parameters = (text.strip().lower() for text in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            weights[kind] = float(quality)
        except ValueError:
            continue
    others = weights.get("*/*", 0.0)
    html = weights.get("text/html", 0.0)
    return html > weights.get("application/json", weights.get("application/*", others))
