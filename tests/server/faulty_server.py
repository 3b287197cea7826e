"""``loadproof`` on a faulty device: ``python -m tests.server.faulty_server HOW STEP ARGUMENTS``.

From step ``STEP`` on: ``fail`` raises, ``freeze`` never comes back, ``slow`` takes ten milliseconds more.
Or ``hang``: the event loop does, from the first signal on.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time

from loadproof.cli import run
from loadproof.devices.cpu import CpuDevice, CpuStep
from loadproof.devices.device import StepBatch
from loadproof.server.async_engine import AsyncEngine


def _hang(engine: AsyncEngine, timeout: float, hurry: object = None) -> None:
    logging.getLogger("loadproof.server").warning("the event loop hangs")
    while True:
        time.sleep(1)


def _spoil(how: str, first: int) -> None:
    if how == "hang":
        AsyncEngine.drain = _hang  # type: ignore[method-assign, assignment]
        return
    submit, numbers = CpuDevice.submit, itertools.count(1)

    def spoilt(self: CpuDevice, batch: StepBatch) -> CpuStep:
        if next(numbers) >= first:
            if how == "fail":
                raise RuntimeError("the device failed")
            if how == "freeze":
                threading.Event().wait()
            time.sleep(0.01)
        return submit(self, batch)

    CpuDevice.submit = spoilt  # type: ignore[method-assign]


if __name__ == "__main__":
    _spoil(sys.argv[1], int(sys.argv[2]))
    sys.exit(run(sys.argv[3:]))
