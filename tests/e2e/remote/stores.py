"""Servers on loopback that speak Google Cloud Storage's and Azure's languages, and what leads their clients there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.remote.servers import await_port, free_port

if TYPE_CHECKING:
    from tests.e2e.remote.google_parts import XmlApi

__all__ = ["azurite", "azurite_program", "connection", "google"]

# The account and key that every Azurite has, as Microsoft documents them: they open nothing but an emulator.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str | None:
    """FSDPCKPT_AZURITE, or ``azurite-blob`` on the PATH (``npm install -g azurite``)."""
    return os.environ.get("FSDPCKPT_AZURITE") or shutil.which("azurite-blob")


@contextmanager
def azurite(program: str, directory: Path) -> Iterator[str]:
    port = free_port()
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen([*command, "--disableTelemetry"], cwd=directory, stdout=subprocess.DEVNULL)
    try:
        await_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def connection(url: str) -> str:
    """The connection string of an Azurite at ``url``."""
    parts = ("DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={KEY}")
    return ";".join((*parts, f"BlobEndpoint={url}/{ACCOUNT};"))


@contextmanager
def google(api: XmlApi) -> Iterator[str]:
    """gcp-storage-emulator, with ``api``."""
    from gcp_storage_emulator import server as emulator

    port = free_port()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(emulator, "HANDLERS", (*emulator.HANDLERS[:-1], *api.handlers))
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="runs")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop()
