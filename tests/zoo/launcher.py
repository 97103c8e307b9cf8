"""Runs scripts in forks of a process that has imported torch.

Importing torch takes longer than training one of these scripts. This file is the script
of one `gradscale run`; its import hook acts on the import below, and each fork records
into a file of its own.

Reads lines of JSON from stdin, [[script, run file], ...]; runs the scripts of a line at
the same time, each in the folder of its run file, and prints their exit codes.
"""

import gc
import json
import os
import runpy
import sys

# With Dynamo: the first optimizer of a process imports it, in 2 s.
import torch._dynamo  # noqa: F401

# A fork collects, and searches for its model, among its own objects only.
gc.freeze()


def start(script, record):
    """Fork a process that runs a script; return its id."""
    child = os.fork()
    if child:
        return child
    os.environ["GRADSCALE_RUN_FILE"] = record
    os.chdir(os.path.dirname(record))
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    raise SystemExit


# Not `for line in sys.stdin`: it reads ahead, and forks would read the rest again.
while line := sys.stdin.readline():
    children = [start(*job) for job in json.loads(line)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
