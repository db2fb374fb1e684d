"""One machine of several: ``python -m tests.e2e.distributed.node DISKS ARGUMENTS`` is ``python ARGUMENTS`` there.

DISKS is JSON, ``{path: directory}``: what only this machine sees under each path. Everything it starts sees the same.
"""

from __future__ import annotations

import json
import sys

from tests.e2e.distributed.disks import bind, own_namespace
from tests.oracle.fork_server import play

if __name__ == "__main__":
    own_namespace()
    bind(json.loads(sys.argv[1]))
    sys.exit(play(sys.argv[2:]))
