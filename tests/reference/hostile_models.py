"""Every hostile model folder that an attack on the service was made with, or that was found since.

Each builder changes a complete, ordinary checkpoint in place. `secret` is a file outside the folder, whose content must
never be seen in an artifact or a message.
"""

import json
import os
import socket
from pathlib import Path

SECRET = "what only the operator may read"  # noqa: S105 - a marker to look for

GIBIBYTE = 2**30


def edit_json(file, **fields):
    """Set fields of a JSON file, which is made if need be; `...` removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def _link(name, target=None):
    def build(folder, secret):
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret if target is None else target)

    return build


def _circle(folder, _secret):
    (folder / "LICENSE").symlink_to("NOTICE")
    (folder / "NOTICE").symlink_to("LICENSE")


def _linked_module_folder(folder, secret):
    outside = secret.parent / "module"
    outside.mkdir(exist_ok=True)
    (outside / "config.json").write_text(SECRET)
    (folder / "1_Pooling").symlink_to(outside)


def _linked_blobs(folder, secret):
    """The layout of the Hub's cache, imitated, with a `blobs` that leads elsewhere."""
    repository = folder.parent / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    moved = folder.rename(repository / "snapshots" / "0123")
    (repository / "blobs").symlink_to(secret.parent)
    (moved / "LICENSE").symlink_to(Path("../../blobs") / secret.name)
    return moved


def _fifo(folder, _secret):
    os.mkfifo(folder / "LICENSE")


def _link_to_fifo(folder, _secret):
    os.mkfifo(folder / "pipe")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to("pipe")


def _socket(folder, _secret):
    here = Path.cwd()
    # The address of a socket is at most some hundred bytes long.
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("NOTICE")
    finally:
        os.chdir(here)


LINKS = {
    "licence-is-the-environment": _link("LICENSE", "/proc/self/environ"),
    "notice-is-a-secret": _link("NOTICE.txt"),
    "sentencepiece-is-the-password-file": _link("tokenizer.model", "/etc/passwd"),
    "config-is-a-secret": _link("config.json"),
    "weights-are-a-secret": _link("model.safetensors"),
    "index-is-a-secret": _link("model.safetensors.index.json"),
    "tokenizer-is-a-secret": _link("tokenizer.json"),
    "card-is-a-secret": _link("README.md"),
    "licence-is-an-endless-device": _link("LICENSE", "/dev/zero"),
    "licence-leads-nowhere": _link("LICENSE", "nowhere"),
    "licence-leads-in-a-circle": _circle,
    "module-file-is-a-secret": _link("1_Pooling/config.json"),
    "module-folder-is-elsewhere": _linked_module_folder,
    "relative-link-out": lambda folder, secret: (folder / "LICENSE").symlink_to(os.path.relpath(secret, folder)),
    "blobs-of-an-imitated-cache": _linked_blobs,
    "licence-is-a-fifo": _fifo,
    "tokenizer-config-leads-to-a-fifo": _link_to_fifo,
    "notice-is-a-socket": _socket,
}
"""Files that lead elsewhere or are not files. A builder may return the folder if it has moved it."""


def _sparse(name, size):
    def build(folder, _secret):
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as stream:
            stream.truncate(size)

    return build


def _many_notices(folder, _secret):
    for number in range(1001):
        (folder / f"NOTICE{number}").write_text("")


LARGE_FILES = {
    "licence-of-a-tebibyte": _sparse("LICENSE", 1024 * GIBIBYTE),
    "tokenizer-model-of-a-gibibyte": _sparse("tokenizer.model", GIBIBYTE),
    "generation-config-of-a-gibibyte": _sparse("generation_config.json", GIBIBYTE),
    "module-of-a-gibibyte": _sparse("2_Dense/model.safetensors", GIBIBYTE),
    "a-thousand-notices": _many_notices,
}
"""Files that would fill the disk if they were copied."""
