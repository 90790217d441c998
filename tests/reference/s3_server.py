"""A real server for the S3 protocol, on loopback, and a view of its content that is independent of our code."""

import logging
import secrets

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "not-secret"}


class S3Server:
    """The server; the session starts and stops it."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def start(self):
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            **{name.lower(): value for name, value in CREDENTIALS.items()},
            config=Config(s3={"addressing_style": "path"}),
        )

    def stop(self):
        self.client.close()
        self._server.stop()

    def make_bucket(self):
        return Bucket(self.client, f"bucket-{secrets.token_hex(4)}")


class Bucket:
    """A bucket as its owner sees it."""

    def __init__(self, client, name):
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)

    def names(self):
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", ()))

    def read(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def write(self, key, content):
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def remove(self, key):
        self.client.delete_object(Bucket=self.name, Key=key)

    def begin_upload(self, key):
        upload = self.client.create_multipart_upload(Bucket=self.name, Key=key)
        self.client.upload_part(
            Bucket=self.name, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"the beginning"
        )

    def unfinished(self):
        return sorted(item["Key"] for item in self._uploads())

    def has_parts(self):
        """Return whether any part of an unfinished upload has arrived."""
        return any(
            self.client.list_parts(Bucket=self.name, Key=item["Key"], UploadId=item["UploadId"]).get("Parts")
            for item in self._uploads()
        )

    def _uploads(self):
        return self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
