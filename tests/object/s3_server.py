"""An S3 server of its own for a test module, and a bucket for each test."""

import itertools
import logging
import os
from contextlib import contextmanager

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvplane.storage.object import ObjectStorage
from kvplane.storage.object_client import Patience

NUMBERS = itertools.count()
QUICK = Patience(timeout_s=20, deadline_s=20, connect_s=5, retries=3, pause_s=0.02)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


class Server:
    """Where it listens, and a client of another make."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.behind = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",  # noqa: S106
            region_name="us-east-1",
        )

    def bucket(self):
        """A new one's name, of at least three characters."""
        name = f"packs-{os.getpid()}-{next(NUMBERS)}"
        self.behind.create_bucket(Bucket=name)
        return name

    def environment(self, endpoint=None):
        """What a process needs to find it."""
        return CREDENTIALS | {"AWS_ENDPOINT_URL": endpoint or self.endpoint}

    def storage(self, *, endpoint=None, patience=QUICK, prefix="roots/one"):
        """A storage in a new bucket, by way of `endpoint` if given."""
        with environment(self.environment(endpoint)):
            return ObjectStorage(f"s3://{self.bucket()}/{prefix}", patience=patience)


@contextmanager
def environment(values):
    """These variables, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@contextmanager
def served():
    """A server, until the end."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield Server(f"http://{host}:{port}")
    finally:
        server.stop()


def split(storage):
    """The bucket and the prefix of a storage."""
    bucket, _, prefix = storage.location.removeprefix("s3://").partition("/")
    return bucket, prefix
