"""A client of the upload protocol, written by its documentation alone."""

import struct


def announce(client, folder, name="mine", **headers):
    """Announce all files of a folder."""
    files = [{"path": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
    return client.post("/models", json={"name": name, "files": files}, headers=headers)


def put(client, name, path, content, *, start=0, total=None, **headers):
    """Append bytes to a file; `total` is the size of the file, by default where they end."""
    size = start + len(content) if total is None else total
    span = {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{size}"}
    return client.put(f"/models/{name}/files/{path}", content=content, headers=span | headers)


def head_of(content):
    """Return the header of a safetensors file, with the 8 bytes that say how long it is."""
    return content[: 8 + struct.unpack("<Q", content[:8])[0]]


def send_heads(client, folder, name="mine", **headers):
    """Send all small files, and the headers of the weights."""
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        sent = head_of(content) if file.suffix == ".safetensors" else content
        if sent:
            answer = put(client, name, file.name, sent, total=len(content), **headers)
            assert answer.status_code == 200, answer.text


def send_rest(client, folder, name="mine", *, piece=2**16, **headers):
    """Send the weights after their headers."""
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        for start in range(len(head_of(content)), len(content), piece):
            answer = put(
                client, name, file.name, content[start : start + piece], start=start, total=len(content), **headers
            )
            assert answer.status_code == 200, answer.text


def upload(client, folder, name="mine", **headers):
    """Upload a folder, and return the model's view."""
    assert announce(client, folder, name, **headers).status_code == 201
    send_heads(client, folder, name, **headers)
    checked = client.post(f"/models/{name}/check", headers=headers)
    assert checked.status_code == 200, checked.text
    send_rest(client, folder, name, **headers)
    return client.get(f"/models/{name}", headers=headers).json()
