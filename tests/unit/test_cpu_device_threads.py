"""The CPU device's threads: one step at a time, and an orderly end where there are no more threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.tiny_models import TINY
from tests.unit.test_cpu_device import GOOD, LIMITS

from loadproof.devices.cpu import CpuDevice

MODEL = TINY["llama"]
PATIENCE = 60.0  # seconds; only a hang takes so long

STARVED = """
import resource
from tests.tiny_models import TINY
from tests.unit.test_cpu_device import LIMITS
from loadproof.devices.cpu import CpuDevice
model = TINY["llama"]
CpuDevice(model.graph, model.source, LIMITS, num_threads=1).close()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    CpuDevice(model.graph, model.source, LIMITS, num_threads=1024)
except RuntimeError as error:
    print("refused:", error)
CpuDevice(model.graph, model.source, LIMITS, num_threads=2).close()
print("alive")
"""


def test_steps_from_several_threads_are_right_or_refused() -> None:
    device = CpuDevice(MODEL.graph, MODEL.source, LIMITS, num_threads=2)
    answer = device.execute(GOOD).logits
    assert answer is not None

    def ask(_: int) -> bytes | str:
        try:
            logits = device.execute(GOOD).logits
        except RuntimeError as error:
            return str(error)
        assert logits is not None
        return logits.tobytes()

    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(ask, range(200)))
    assert answer.tobytes() in found
    assert found <= {answer.tobytes(), "a step is running on this device already"}
    device.close()


def test_too_many_threads_are_refused_and_the_process_lives() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:")
    assert done.stdout.endswith("alive\n")


FORKED = """
import os, warnings
from tests.tiny_models import TINY
from tests.unit.test_cpu_device import GOOD, LIMITS
from loadproof.devices.cpu import CpuDevice
warnings.simplefilter("ignore", DeprecationWarning)
model = TINY["llama"]
device = CpuDevice(model.graph, model.source, LIMITS, num_threads=2)
device.execute(GOOD)
child = os.fork()
if child == 0:
    try:
        device.execute(GOOD)
    except RuntimeError as error:
        print("refused:", error, flush=True)
    del device
    raise SystemExit(7)
_, status = os.waitpid(child, 0)
device.execute(GOOD)
device.close()
print("child ended with", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_is_refused_and_can_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused: the device was made before a fork and runs in the parent only",
        "child ended with 7",
    ]
