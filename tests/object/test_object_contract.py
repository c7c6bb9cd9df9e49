"""The storage contract against a real S3 server over HTTP."""

from contextlib import contextmanager

import pytest
import s3_server

from kvplane.storage.object import ObjectStorage
from kvplane.testing.storage_contract import StorageContract


class TestObject(StorageContract):
    # HTTP tells whole seconds
    tick_s = 1.05
    lock_file = "locks/chat.json"
    num_calls = 40
    lock_fields = ("host", "id", "pid", "renewed", "since")

    @pytest.fixture(autouse=True)
    def serving(self, s3):
        self.server = s3

    @contextmanager
    def empty(self):
        yield self.server.storage()

    def again(self, storage):
        return ObjectStorage(storage.location, patience=s3_server.QUICK)

    def read_behind(self, storage, name):
        bucket, prefix = s3_server.split(storage)
        return self.server.behind.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()

    def write_behind(self, storage, name, data):
        bucket, prefix = s3_server.split(storage)
        self.server.behind.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)
