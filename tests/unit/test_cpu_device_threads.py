"""The CPU device's threads: one step at a time, and an orderly end where there are no more threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.exactness.drive import alone, first_difference, make_device
from tests.tiny_models import TINY
from tests.unit.test_cpu_device import GOOD, LIMITS

from loadproof import _native
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


@pytest.mark.parametrize("num_threads", [2, 3, 7, 16])
def test_who_takes_which_piece_of_a_step_changes_no_bit(num_threads: int) -> None:
    """More threads than cores: some are late, and others take what is left of their shares."""
    isa = _native.available_levels()[0]
    tokens = np.random.default_rng(num_threads).integers(0, MODEL.graph.vocab_size, 129).tolist()
    one = make_device(MODEL.graph, MODEL.source, isa)
    many = make_device(MODEL.graph, MODEL.source, isa, num_threads=num_threads)
    for count in (1, 2, 3, 5, 8, 17, 33, 64, 129):
        expected = alone(one, tokens[:count])
        for _ in range(5):
            assert first_difference(alone(many, tokens[:count]), expected) is None
    one.close()
    many.close()


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


AFFINITY = """
import os, sys
from pathlib import Path
from tests.tiny_models import TINY
from tests.unit.test_cpu_device import GOOD, LIMITS
from loadproof.devices.cpu import CpuDevice
before = {task.name for task in Path("/proc/self/task").iterdir()}
model = TINY["llama"]
device = CpuDevice(model.graph, model.source, LIMITS, num_threads=int(sys.argv[1]))
device.execute(GOOD)
made = [int(task.name) for task in Path("/proc/self/task").iterdir() if task.name not in before]
print(len(os.sched_getaffinity(0)), sorted(sorted(os.sched_getaffinity(task)) for task in made))
device.close()
"""


def affinity(num_threads: int) -> tuple[int, list[list[int]]]:
    """Cores that the caller may use after a step, and those of each thread that was made for steps."""
    command = [sys.executable, "-c", AFFINITY, str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, cores = done.stdout.split(maxsplit=1)
    return int(count), json.loads(cores)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps threads where it likes")
def test_as_many_threads_as_cores_have_one_each_and_the_caller_all() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert affinity(len(allowed)) == (len(allowed), [[core] for core in allowed])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps threads where it likes")
@pytest.mark.parametrize("more", [-1, 1])
def test_fewer_or_more_threads_than_cores_go_where_the_system_puts_them(more: int) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    num_threads = max(1, len(allowed) + more)
    if num_threads == len(allowed):
        pytest.skip("there is one core")
    assert affinity(num_threads) == (len(allowed), [allowed] * num_threads)
