"""Runs an example as torchrun does, then ends the process without Python's shutdown.

The caches of DTensor keep gloo's threads alive beyond `destroy_process_group`, also
without gradscale. One that drops its last tensor while Python shuts down aborts the
process (pytorch/pytorch#179291), more often on a busy machine.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(f"{sys.argv[0]}.py", run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
