"""One machine of several: ``python -m tests.e2e.distributed.node DISKS PROGRAM...`` runs PROGRAM with disks of its own.

DISKS is JSON, ``{path: directory}``: what only this machine sees under each path. Everything it starts sees the same.
"""

from __future__ import annotations

import json
import os
import sys

from tests.e2e.distributed.disks import bind, own_namespace

if __name__ == "__main__":
    own_namespace()
    bind(json.loads(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
