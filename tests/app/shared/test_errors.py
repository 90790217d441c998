import inspect

from app.shared import errors
from rocket_core import errors as core_errors

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.AppError)]


def test_every_error_code_is_unique_across_service_and_library():
    codes = [vars(kind)["code"] for kind in KINDS]
    core = [kind.code for kind in vars(core_errors).values() if inspect.isclass(kind) and hasattr(kind, "code")]
    assert len(set(codes + core)) == len(codes) + len(core)


def test_the_docstring_shows_every_error():
    assert all(kind.__name__ in errors.__doc__ for kind in KINDS if kind is not errors.AppError)
