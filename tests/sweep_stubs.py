"""Workers that misbehave; they import nothing, so that their processes start at once."""

import os
import time


def crashes(connection):
    name, settings = connection.recv()
    connection.send((f"{name}[float32 0]", settings["policy"]))
    os._exit(1)


def hangs(connection):
    name, settings = connection.recv()
    connection.send((f"{name}[float32 0]", settings["policy"]))
    time.sleep(1000)
