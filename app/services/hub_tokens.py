"""The Hub token that a job uses to write to the Hub."""

from huggingface_hub import get_token
from pydantic import SecretStr

from app.shared.models import LOCAL_OWNER
from app.shared.repositories.audit import LOCAL_ACTOR, Actor
from app.shared.settings import Settings
from rocket_core.errors import UploadTokenError


def choose_push_token(settings: Settings, actor: Actor, sent: SecretStr | None) -> SecretStr:
    """Return the token that a push uses: the one that was sent, or that of the server for its only user.

    With API keys there may be other users, who must not write to the operator's repositories.

    Raises:
        UploadTokenError: none was sent, and that of the server does not exist or may not be used.
    """
    if sent is not None:
        return sent
    if (actor.tenant, actor.name) != (LOCAL_OWNER, LOCAL_ACTOR.name):
        raise UploadTokenError(
            "a push needs your own Hub token with write access, as this server may have other users; send it as "
            "Hub-Token, or in a terminal with --hub-token-env"
        )
    own = get_token() if settings.hf_token is None else settings.hf_token.get_secret_value()
    if not own:
        raise UploadTokenError(
            "a push needs a Hub token with write access; send one as Hub-Token, in a terminal with --hub-token-env, or "
            "set HF_TOKEN where the server runs"
        )
    return SecretStr(own)
