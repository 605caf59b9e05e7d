# SPDX-License-Identifier: Apache-2.0
"""A ``max serve`` process and requests to it, for the demo, the tests and the bench."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI

POOL_VARIABLE = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
"""Environment variable that bounds MAX's memory pool on a GPU, in per cent of it.

A captured graph backs all of the pool with memory.
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """``max serve`` as a child process; a context manager that stops it."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        command: Sequence[str] = ("max", "serve", "--model-path"),
    ) -> None:
        """Starts a command that the model follows; what it prints goes to a log."""
        self.model, self.log, self.port = str(model), log, free_port()
        beside = Path(sys.executable).with_name(command[0])
        program = str(beside) if beside.exists() else command[0]
        flags = [*flags, "--port", str(self.port)]
        self.command = [program, *command[1:], self.model, *flags]
        quiet = {"HF_HUB_OFFLINE": "1", "MAX_SERVE_DISABLE_TELEMETRY": "1"}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet, **(env or {})},
                start_new_session=True,
            )
        self._url = f"http://127.0.0.1:{self.port}/v1"
        self._client = OpenAI(base_url=self._url, api_key="none", max_retries=0)

    @property
    def session(self) -> int:
        """The id of the session that all of its processes are in."""
        return self._process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(
        self, timeout_s: float, say: Callable[[str], None] | None = None
    ) -> float:
        """Waits until the server answers; returns how many seconds it took. ``say`` is
        called with what it is about. A ``RuntimeError`` has the end of its log."""
        begin = said = time.monotonic()
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"max serve ended with exit code {self._process.returncode} "
                    f"before it was ready:\n{self.log_end()}"
                )
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=2).close()
                return time.monotonic() - begin
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            now = time.monotonic()
            if now - begin > timeout_s:
                raise RuntimeError(
                    f"max serve is not ready after {timeout_s:.0f} s:\n{self.log_end()}"
                )
            if say and now - said > 5:
                said = now
                say(f"{now - begin:4.0f} s  {self._last_step()}")
            time.sleep(0.3)

    def complete(self, prompt: str | list[int], max_tokens: int, **more: Any) -> dict:
        """Asks for a greedy completion of text or token ids, with further fields of the
        request; returns the only element of the answer's ``choices``."""
        answer = self._client.completions.create(
            prompt=prompt, **self._greedy(max_tokens, **more)
        )
        return answer.choices[0].model_dump()

    def chat(self, content: str, max_tokens: int) -> Iterator[str]:
        """Asks for an answer, and yields its pieces as they come."""
        messages: Any = [{"role": "user", "content": content}]
        with self._client.chat.completions.create(
            messages=messages, stream=True, **self._greedy(max_tokens)
        ) as events:
            for event in events:
                for choice in event.choices:
                    if choice.delta.content:
                        yield choice.delta.content

    def stop(self) -> None:
        """Stops the server as Ctrl-C does, and by force what is left of it; raises if
        it did not end in time by itself."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_end(self, n_lines: int = 30) -> str:
        """Returns the last lines of what the server has printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-n_lines:])

    def _last_step(self) -> str:
        steps = [line for line in self.log_end(200).splitlines() if "INFO: " in line]
        says = [line.split("INFO: ", 1)[1].strip() for line in steps]
        return next((line[:90] for line in reversed(says) if line.strip("= ")), "")

    def _greedy(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        fields = {"ignore_eos": True, **more}  # which OpenAI's API may lack
        of_all = dict(model=self.model, max_tokens=max_tokens, temperature=0)
        return {**of_all, "extra_body": fields}
