"""Verifier of programs: the code of a response runs with unit tests. This is no sandbox."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lightning_rlhf.core.errors import require
from lightning_rlhf.core.validation import Count, PositiveFloat, PositiveInt, check_value
from lightning_rlhf.verifiers.answers import each

FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A block of code in Markdown."""
BOOT = """
import json, resource, sys
mark, seconds, size, code = json.loads(sys.stdin.buffer.read())
for kind, most in (("AS", size), ("FSIZE", size), ("CPU", seconds), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
exec(compile(code, "<response>", "exec"), {"__name__": "__main__"})
open(mark, "x").close()
"""
"""Program that limits itself, then runs the code; a file shows that the last line was reached."""


def unit_tests(
    prompts: Sequence[str],
    responses: Sequence[str],
    tests: Sequence[Any],
    *,
    run_code: bool = False,
    timeout_s: float = 10.0,
    memory_mb: int = 1024,
    at_once: int = 2,
) -> list[float | None]:
    """Return 1 for a response whose Python code passes its tests, else 0; None without tests.

    The last block of code of the response (without one, all of it) and its tests are one program,
    which passes if it reaches its end: an exception, `sys.exit()` or a limit gives 0. It runs in an
    empty folder, without the variables of this process, and its process group is killed then. That
    is no sandbox: the code has the rights of this process, for files and the network too.

    Args:
        tests: column with Python code, such as asserts, or lists of such texts.
        run_code: whether code that a model wrote may run on this machine.
        timeout_s: longest time of a program, seconds.
        memory_mb: largest memory of a process, and size of a file that it writes, MiB.
        at_once: number of programs that run at the same time.

    Raises ConfigError unless `run_code` is true.
    """
    danger = "true, if code that a model wrote may run here with your rights: this is no sandbox"
    require(run_code is True, "run_code", run_code, danger)
    check_value("timeout_s", timeout_s, Annotated[PositiveFloat, Field(le=3600)])
    check_value("memory_mb", memory_mb, PositiveInt)
    check_value("at_once", at_once, Count)

    def is_right(response: str, wanted: Any) -> bool:
        parts = [wanted] if isinstance(wanted, str) else wanted
        are_texts = isinstance(parts, list | tuple) and all(isinstance(x, str) for x in parts)
        require(are_texts, "tests", wanted, "Python code, or a list of such texts")
        code = (FENCE.findall(response) or [response])[-1]
        return passes("\n".join([code, *parts]), timeout_s, memory_mb * 2**20)

    with ThreadPoolExecutor(at_once) as threads:
        return each(is_right, responses, tests, threads.map)


def passes(code: str, timeout_s: float, memory: int) -> bool:
    """Return whether a program reaches its end within timeout_s seconds and `memory` bytes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        mark = Path(folder, secrets.token_hex())
        request = json.dumps([str(mark), int(timeout_s) + 1, memory, code]).encode()
        with subprocess.Popen(
            [sys.executable, "-I", "-c", BOOT], cwd=folder, start_new_session=True,
            env={"PATH": os.defpath, "HOME": folder}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                process.communicate(request, timeout_s)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode == 0 and mark.exists()
