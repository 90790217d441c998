"""Every hostile model folder with which an attack on the service was made, or that was found later.

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
    """Set fields of a JSON file, which is created if it is missing; `...` removes a field."""
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
    """Imitate the layout of the Hub's cache, with a `blobs` that leads elsewhere."""
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
    # The address of a socket has about a hundred bytes at most.
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


def _fields(file, message, **fields):
    def build(folder):
        edit_json(folder / file, **fields)
        return message

    return build


def _config(message="config.json", **fields):
    return _fields("config.json", message, **fields)


def _content(file, content, message):
    def build(folder):
        (folder / file).write_bytes(content)
        return message

    return build


def _in_tokenizer(part, value):
    return _fields("tokenizer.json", "tokenizer", **{part: value})


def nested(depth):
    """Return an object with that many levels."""
    made = {}
    for _ in range(depth):
        made = {"inner": made}
    return made


def replacement(content, *, pattern):
    """Return a normalizer that replaces text."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_THOUSANDFOLD = replacement("a" * 1000, pattern={"String": "a"})

UNREADABLE = {
    "config-is-cut-off": _content("config.json", b'{"model_type": "lla', "config.json"),
    "config-is-a-list": _content("config.json", b"[]", "config.json"),
    "config-is-not-utf8": _content("config.json", b'{"model_type": "\xff"}', "config.json"),
    "config-is-a-hundred-thousand-lists-deep": _content("config.json", b"[" * 100_000, "config.json"),
    "model-type-is-a-number": _config(model_type=5),
    "model-type-is-missing": _config(model_type=...),
    "model-type-is-of-a-package": _config("timm", model_type="timm_wrapper"),
    "backbone-is-of-a-package": _config("timm", backbone_config={"model_type": "timm_backbone"}),
    "weights-of-another-name": _config("transformers_weights", transformers_weights="adapter_model.bin"),
    "hidden-size-is-text": _config("hidden_size", hidden_size="32"),
    "hidden-size-is-negative": _config("hidden_size", hidden_size=-1),
    "hidden-size-is-zero": _config(hidden_size=0),
    "a-billion-layers": _config("num_hidden_layers", num_hidden_layers=10**9),
    "vocabulary-is-huge": _config("vocab_size", vocab_size=2**62),
    "no-attention-heads": _config(num_attention_heads=0),
    "heads-do-not-divide": _config(num_attention_heads=5, head_dim=...),
    "no-key-value-heads": _config(num_key_value_heads=0),
    "intermediate-size-is-another": _config("shape", intermediate_size=79),
    "unknown-activation": _config(hidden_act="made-up"),
    "activation-is-a-number": _config("hidden_act", hidden_act=5),
    "unknown-rope": _config(rope_parameters={"rope_type": "made-up", "rope_theta": 1.0}),
    "rope-without-its-fields": _config(rope_parameters={"rope_type": "yarn"}),
    "rope-is-a-number": _config("rope_parameters", rope_parameters=5),
    "dtype-is-unknown": _config("config.json", dtype="made-up"),
    "label-names-are-a-number": _config(id2label=5),
    "tokenizer-class-loads-a-model": _config("tokenizer_class", tokenizer_class="AutoModelForCausalLM"),
    "tokenizer-is-empty": _content("tokenizer.json", b"", "tokenizer.json"),
    "tokenizer-is-a-list": _content("tokenizer.json", b"[]", "tokenizer.json"),
    "tokenizer-is-a-hundred-thousand-lists-deep": _content("tokenizer.json", b"[" * 100_000, "tokenizer.json"),
    "tokenizer-without-a-model": _in_tokenizer("model", ...),
    "tokenizer-model-is-unknown": _in_tokenizer("model", {"type": "MadeUp"}),
    "tokens-are-negative": _in_tokenizer("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "merge-of-unknown-tokens": _in_tokenizer("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
    "unknown-token-is-unknown": _in_tokenizer("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}),
    "regex-is-wrong": _in_tokenizer("pre_tokenizer", _split("([")),
    # Three Rust panics: while the file is read, at the first text, and in a regex that gives up.
    "charsmap-is-cut-off": _in_tokenizer("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////fwAA"}),
    "charsmap-is-empty": _in_tokenizer("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}),
    "pieces-of-no-length": _in_tokenizer("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "regex-takes-for-ever": _in_tokenizer("pre_tokenizer", _split("(?:[a-z. ]|[a-z. ]{2})+[0-9]")),
    "normalizer-is-a-number": _in_tokenizer("normalizer", 5),
    "normalizer-multiplies-text": _in_tokenizer("normalizer", {"type": "Sequence", "normalizers": [_THOUSANDFOLD] * 4}),
    "normalizer-multiplies-by-a-regex": _in_tokenizer(
        "normalizer", {"type": "Sequence", "normalizers": [replacement("aa", pattern={"Regex": "a"})] * 40}
    ),
    "normalizer-prepends": _in_tokenizer("normalizer", {"type": "Prepend", "prepend": "a" * 100_000}),
    "tokenizer-config-is-a-list": _content("tokenizer_config.json", b"[]", "tokenizer_config.json"),
    "tokenizer-class-is-a-number": _fields("tokenizer_config.json", "tokenizer_class", tokenizer_class=5),
    "tokenizer-class-is-a-model": _fields("tokenizer_config.json", "tokenizer_class", tokenizer_class="LlamaModel"),
    "tokenizer-is-code": _fields(
        "tokenizer_config.json", "tokenizer", auto_map={"AutoTokenizer": ["code.Own", None]}, tokenizer_class="Own"
    ),
    "longest-text-is-text": _fields("tokenizer_config.json", "model_max_length", model_max_length="long"),
    "special-token-is-a-number": _fields("tokenizer_config.json", "tokenizer", bos_token=5),
    "added-tokens-are-a-number": _fields("tokenizer_config.json", "tokenizer", added_tokens_decoder=5),
    "arguments-of-a-tokenizer": _fields("tokenizer_config.json", "init_inputs", init_inputs=["/etc/passwd"]),
    "another-tokenizer-file": _fields(
        "tokenizer_config.json", "fast_tokenizer_files", fast_tokenizer_files=["tokenizer.1.0.0.json/../../../x.json"]
    ),
    "special-token-is-a-file": _fields("special_tokens_map.json", "vocab_file", vocab_file="/etc/passwd"),
    "generation-config-is-a-list": _content("generation_config.json", b"[]", "generation_config.json"),
    "generation-stops-at-text": _fields("generation_config.json", "eos_token_id", eos_token_id=["x"]),
    "generation-stops-beyond-64-bits": _fields("generation_config.json", "eos_token_id", eos_token_id=[1, 2**70]),
    "window-is-text": _config("sliding_window", sliding_window="x"),
    "generation-config-is-cut-off": _content("generation_config.json", b"{", "generation_config.json"),
    "index-is-cut-off": lambda folder: (
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
        (folder / "model.safetensors.index.json").write_text("{"),
        "index.json",
    )[-1],
}
"""Files that transformers or tokenizers cannot interpret. A builder returns what the error must mention."""


def _pair(*builders):
    def build(folder):
        for each in builders:
            each(folder)

    return build


CODE = {
    "attention": _config(_attn_implementation="org/kernel"),
    "attention-public": _config(attn_implementation="org/kernel@main:attend"),
    "attention-paged": _config(attn_implementation="paged|org/kernel"),
    "attention-internal": _config(_attn_implementation_internal="org/kernel"),
    "attention-flash": _config(_attn_implementation="flash_attention_2"),
    "experts": _config(_experts_implementation="sonicmoe", experts_implementation="deepgemm"),
    "kernels": _config(use_kernels=True, kernel_config={"RMSNorm": "org/kernel:RMSNorm"}, allow_all_kernels=True),
    "fusion": _config(fusion_config={"rms_norm": True}),
    "code-of-the-model": _config(
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "org/other--code.Model"}, trust_remote_code=True
    ),
    "code-of-the-tokenizer": _fields(
        "tokenizer_config.json", "", auto_map={"AutoTokenizer": ["org/other--code.Slow", None]}, trust_remote_code=True
    ),
    "code-of-generation": _fields("generation_config.json", "", custom_generate="org/name"),
    "another-configuration": _pair(
        _config(configuration_files=["config.4.0.0.json"]),
        _fields("config.4.0.0.json", "", model_type="llama", _attn_implementation="org/kernel"),
    ),
    "a-part-of-the-model": _config(part={"_attn_implementation": "org/kernel", "auto_map": {"AutoModel": "org/a--b"}}),
}
"""Settings that lead to code. What they name is left out, and the model is the same without."""
