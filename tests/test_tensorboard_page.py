"""TensorBoard's page as a person sees it, in a browser without a screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from probes import run

pytestmark = pytest.mark.long

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# All text that is drawn, that of shadow trees included, which a dump of the document leaves out.
TEXT = """(() => { const walk = node => (node.shadowRoot ? walk(node.shadowRoot) : "") +
  [...node.childNodes].map(child => child.nodeType === 3 ? child.textContent + " " :
  ["STYLE", "SCRIPT", "TEMPLATE"].includes(child.nodeName) ? "" : walk(child)).join(""); return walk(document.body); })()"""


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def tensorboard(directory: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows a directory."""
    words = ["-m", "tensorboard.main", "--logdir", str(directory), "--port", "0", "--host", "127.0.0.1"]
    with started(sys.executable, *words) as process:
        assert process.stderr is not None
        yield next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))


@contextmanager
def browser(directory: Path) -> Iterator[Any]:
    """A connection to the one page of a browser, in the DevTools protocol."""
    from websockets.sync.client import connect

    assert BROWSER is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={directory}",
        "--remote-debugging-port=0",
    ]
    with started(BROWSER, *options, "--window-size=1500,1000", "about:blank") as process:
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line)))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(each for each in json.load(answer) if each["type"] == "page")
        with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield socket


def ask(socket: Any, method: str, **params: object) -> Any:
    socket.send(json.dumps({"id": 1, "method": method, "params": params}))
    while (answer := json.loads(socket.recv(timeout=60))).get("id") != 1:
        pass
    return answer["result"]


def text_of(socket: Any, address: str, *wanted: str) -> str:
    """The text of a page once it holds all that is waited for.

    Raises:
        AssertionError: it does not within half a minute; names the first that is missing.
    """
    ask(socket, "Page.navigate", url="about:blank")
    ask(socket, "Page.navigate", url=address)
    end = time.monotonic() + 30
    while True:
        text = " ".join(ask(socket, "Runtime.evaluate", expression=TEXT)["result"].get("value", "").split())
        missing = [each for each in wanted if each not in text]
        if not missing:
            return text
        assert time.monotonic() < end, f"{missing[0]} is not on the page: {text}"
        time.sleep(0.5)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_hyperparameters_histograms_and_scalars_are_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("websockets")
    words = ("logging=tensorboard", "logging.histogram_interval=100", "eval=default", "eval.interval=100")
    result = run(tmp_path / "runs/first-run", "ppo", *words, "total_frames=300", "optim.lr=0.00123")
    run(tmp_path / "runs/second-run", "dqn", *words, "total_frames=300")
    with tensorboard(tmp_path / "runs") as address, browser(tmp_path / "profile") as socket:
        finals = ("final/eval/best_return_mean", "final/eval/return_mean")
        text = text_of(socket, f"{address}#hparams", "first-run", "second-run", "optim.lr", "algo.gamma", *finals)
        assert "logging.interval" not in text, "hyper-parameters are what shapes learning"
        assert "quiet" not in text
        text_of(
            socket,
            f"{address}#histograms",
            *("critic/q_values", "critic/td_errors", "data/advantages", "grads 12", "params 12", "policy 2"),
        )
        text_of(
            socket, f"{address}#timeseries", "/filled", "/replay_age", "second-run"
        )  # the slash begins a part of its own
    assert result["status"] == "finished"
