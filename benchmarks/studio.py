"""How fast the studio answers: typing, closing a gate, silencing a head, from the key to what is on the screen.

    python benchmarks/studio.py SmolLM2-135M.gguf --json results/studio.json

A Run with base, control and sparse model, as `sparselens sparsify --control` leaves it: the base's own weights three
times, and in the sparse model a bias that closes most gates. How good such a model is does not matter for its speed.
The studio runs as a command of its own, and headless Chromium asks it. Times are of the page's own clock: from the last
key (the pause after typing included) or the click until the second frame after the answer was put on the page.

Beside each stands the processor time that the server took meanwhile, of both cores together: other work on the machine
hardly moves it. The floor, measured on the same cores in the same minute: one pass of the base through transformers.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

import sparselens as sl
from sparselens.config import Gate
from sparselens.models.loading import gate_biases
from sparselens.runs.run import provenance, write_json

BEGINNINGS = (
    "The meeting that Anna and Peter had planned for weeks took place on a rainy afternoon in the old town hall, and",
    "In the autumn of that year the farmers brought their apples to the market by the river, where a tall woman with",
    "When the last train had left the station, the clerk locked his office, put on his coat and walked slowly up to",
    "Most people in the village had never seen the sea, and so they listened for hours when the young sailor told of",
    "After the long winter the children ran through the garden, counted the first flowers and called their mother to",
    "The report says that the bridge was built by two brothers who had learnt their trade in the north and moved to",
)
ENDS = (
    "when it was over she gave the keys to",
    "nobody could say why the door was open or",
    "they asked the old man for",
)

# From the last key to the answers on the screen. `answers` is filled anew when they come.
TYPED = """(text) => new Promise((done) => {
  const box = document.getElementById("prompt");
  const seen = new MutationObserver(() => {
    seen.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
  });
  seen.observe(document.getElementById("answers"), { childList: true });
  box.value = text;
  const begun = performance.now();
  box.dispatchEvent(new Event("input", { bubbles: true }));
})"""
CLICKED = """(selector) => new Promise((done) => {
  const seen = new MutationObserver(() => {
    if (!document.getElementById("p-after")) return;
    seen.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
  });
  seen.observe(document.getElementById("outcome"), { childList: true });
  const begun = performance.now();
  document.querySelector(selector).dispatchEvent(new MouseEvent("click", { bubbles: true }));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face name, folder or .gguf file")
    parser.add_argument("--bias", type=float, default=-4.0, help="of every gate")
    parser.add_argument("--tokens", type=int, default=32, help="of a prompt")
    parser.add_argument("--times", type=int, default=18, help="each thing is done")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--run", type=Path, help="use this Run instead of making one")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or make_run(Path(folder) / "run", given.model, given.bias)
        told = measure(given, run)
    print_rows(told)
    if given.json:
        write_json(given.json, told)


def make_run(run: Path, name: str, bias: float) -> Path:
    model, tokenizer = sl.load(name)
    sl.save(model, tokenizer, run / "base" / "model")
    shutil.copytree(run / "base", run / "control")
    sparse = sl.add_gates(model, Gate(bias=bias))
    sl.save(sparse, tokenizer, run / "model")
    told = {"kind": "sparsify", "config": {"model": str(run / "base" / "model")}, "provenance": provenance()}
    write_json(run / "run.json", told)
    return run


def measure(given: argparse.Namespace, run: Path) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    prompts = [text for end in ENDS for text in cut(run, f"{{}} {end}", given.tokens)]
    load_before = os.getloadavg()[0]
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    command = [sys.executable, "-m", "sparselens", "studio", str(run), "--no-browser", "--port", "0"]
    server = subprocess.Popen([*command], env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            told = Driver(page, address, prompts, server.pid).drive(given.times)
            told["environment"] = {"chromium": browser.version}
            browser.close()
    finally:
        server.terminate()
        server.wait()
    told["floor"] = {"one pass of the base, transformers": spread(one_pass(run, prompts[0], given.times))}
    told["environment"] |= {
        "processor": processor(), "cores": os.cpu_count(), "threads": given.threads,
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }  # fmt: skip
    return {
        "what": "milliseconds, in headless Chromium: median, 90th percentile and worst of n",
        "model": Path(given.model).name, "tokens": given.tokens, "bias": given.bias,
        "open": open_edges(run, prompts[0]),
        "seeds": [0], "hardware": f"{platform.machine()} CPU, {given.threads} threads", **told, **provenance(),
        "command": f"python benchmarks/studio.py {Path(given.model).name} --json results/studio.json",
    }  # fmt: skip


def cut(run: Path, frame: str, tokens: int) -> list[str]:
    """The beginnings in the frame, the last `tokens` tokens of each."""
    _, tokenizer = sl.load(run / "base" / "model")
    found = []
    for beginning in BEGINNINGS:
        ids = tokenizer(frame.format(beginning), add_special_tokens=False)["input_ids"]
        found.append(tokenizer.decode(ids[1 - tokens :]).strip())  # the tokenizer's first token comes in front
    return found


class Driver:
    """Does what a person does, and writes down how long everything took."""

    def __init__(self, page: Page, address: str, prompts: list[str], server: int):
        self.page, self.address, self.prompts = page, address, prompts
        self.stat = Path(f"/proc/{server}/stat")
        self.rows: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}
        page.set_default_timeout(120_000)

    def drive(self, times: int) -> dict[str, Any]:
        for _ in range(6):
            self.open()
        self.settled()
        for text in self.prompts[:2]:  # the first answers of a process are slow, and not what anybody sees twice
            self.page.evaluate(TYPED, text)
            self.settled()
        for i in range(times):
            text = self.prompts[(i + 2) % len(self.prompts)]
            self.timed("a new prompt", TYPED, text)
            words = text.split()
            self.page.evaluate(TYPED, " ".join(words[:-2]))
            self.settled()
            self.timed("one word typed on", TYPED, " ".join(words[:-1]) + f" {words[i % 5]}")
            for name, attribute in (("closing a gate", "data-close"), ("silencing a head", "data-silence")):
                place = self.page.locator(f"#studio [{attribute}]").nth(i % 12).get_attribute(attribute)
                self.timed(name, CLICKED, f"#studio [{attribute}='{place}']")
                self.page.locator("#reset").click()
                self.page.locator("#p-after").wait_for(state="detached")
                self.settled()
            self.generate()
        found = {name: spread(values) for name, values in self.rows.items()}
        for name, values in self.processor.items():
            found[name] |= {"processor": round(statistics.median(values))}
        return {"rows": found}

    def spent(self) -> float:
        """Milliseconds of processor time that the server has taken so far."""
        fields = self.stat.read_text().rpartition(")")[2].split() if self.stat.exists() else []
        return 1000 * sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def timed(self, name: str, script: str, argument: str) -> None:
        spent = self.spent()
        self.rows.setdefault(name, []).append(self.page.evaluate(script, argument))
        self.processor.setdefault(name, []).append(self.spent() - spent)
        self.settled()

    def open(self) -> None:
        """From asking for the page until its studio stands there."""
        self.page.goto("about:blank")
        begun = time.perf_counter()
        self.page.goto(self.address)
        self.page.locator("#studio-status").wait_for()
        self.rows.setdefault("the page itself", []).append(1000 * (time.perf_counter() - begun))

    def generate(self) -> None:
        before, begun = self.page.locator("#studio .tokens button").count(), time.perf_counter()
        self.page.locator("#generate").click()
        while self.page.locator("#studio .tokens button").count() == before:
            time.sleep(0.005)
        self.rows.setdefault("one token generated, its maps too", []).append(1000 * (time.perf_counter() - begun))
        self.settled()

    def settled(self) -> None:
        """Answers, maps and edges are there, and nothing moves."""
        self.page.locator("[data-close]").first.wait_for()
        self.page.locator("#studio-status[data-busy='0']").wait_for()
        self.page.wait_for_timeout(120)


def one_pass(run: Path, text: str, times: int) -> list[float]:
    model, tokenizer = sl.load(run / "base" / "model")
    inputs, found = tokenizer(text, return_tensors="pt"), []
    with torch.no_grad():
        for _ in range(times + 2):
            begun = time.perf_counter()
            model(**inputs, use_cache=False, logits_to_keep=1)
            found.append(1000 * (time.perf_counter() - begun))
    return found[2:]


def open_edges(run: Path, text: str) -> float:
    """Share of the allowed pairs that the sparse model's gates leave open."""
    model, tokenizer = sl.load(run / "model")
    assert len(gate_biases(model))
    with torch.no_grad():
        maps = model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    pairs = sum(float(one.shape[1] * one.shape[2] * (one.shape[2] + 1) / 2) for one in maps)
    return round(sum(float((one > 0).sum()) for one in maps) / pairs, 4)


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    ninth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    told = {"n": len(values), "median": statistics.median(ordered), "p90": ninth, "worst": ordered[-1]}
    return {name: round(value) for name, value in told.items()}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def print_rows(told: dict[str, Any]) -> None:
    columns = ("n", "median", "p90", "worst", "processor")
    print(f"{'milliseconds':42s}" + "".join(f"{column:>10s}" for column in columns))
    for name, row in (told["rows"] | told["floor"]).items():
        print(f"{name:42s}" + "".join(f"{row.get(column, ''):>10}" for column in columns))


if __name__ == "__main__":
    main()
