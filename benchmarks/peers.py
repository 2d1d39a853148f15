"""The same work by sparselens and by its peers, on one clock: seconds, peak memory, agreement of the numbers.

    python benchmarks/peers.py --models ../shared/models --eap-ig EAP-IG/.git --clt-forge CLT-Forge/.git \
        --environments build/peers

Each peer lives in an environment of its own, made where --environments says; EAP-IG and CLT-Forge, which are on no
index, come from a git directory. Both tools are processes of their own (benchmarks/peer_scripts) that load once and
then take turns; medians over the rounds. One thread each; seconds are CPU seconds of the work, which other programs
hardly change. `python benchmarks/peers.py discover trace` measures only these, into the same file.

  discover    edge scores: EAP and EAP-IG by EAP-IG 2.0, EAP by TransformerLens 4
  trace       attribution graphs by circuit-tracer
  longest     the longest prompt whose graph fits a memory
  train_speed, train_fit    a cross-layer transcoder trained on the same text: CLT-Forge
  attention   the authors' own kernel (Helion): needs CUDA
"""

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import sparselens as sl
from sparselens import tasks
from sparselens.data.documents import read_documents
from sparselens.data.sample import write_text
from sparselens.runs.run import provenance, write_json
from sparselens.tasks.prompts import build, of_common_length

SCRIPTS = Path(__file__).parent / "peer_scripts"
TORCH = "torch==2.13.0"
PACKAGES = {  # what pip is asked for; the versions it chose are in the rows
    "eap-ig": ["transformer-lens<4", "matplotlib"],  # 4.0 has no HookedTransformer, which EAP-IG is built on
    "transformer-lens": ["transformer-lens==4.3.0"],
    "circuit-tracer": ["circuit-tracer==0.5.0"],
    "clt-forge": ["sae-lens>=5.9.1,<6.11.2", "pydantic<3", "wandb<0.20", "zstandard", "lmdb", "matplotlib",
                  "pyarrow<20", "datasets<4"],
}  # fmt: skip
# What is changed in a peer's source before it runs: (file, this, becomes that). Said in the results.
PATCHES = {
    "eap-ig": [("src/eap/attribute.py", "device='cuda'", "device='cpu'")],
    "eap-ig, midpoints": [
        ("src/eap/attribute.py", "device='cuda'", "device='cpu'"),
        ("src/eap/attribute.py", "(k / steps)", "((k + 0.5) / steps)"),
    ],
    # Features should start active at 10,000 / features of the tokens: an index out of range below 10,000 features.
    "clt-forge": [("src/clt_forge/clt.py", "10_000.", "16.")],
}
STORY = "Once upon a time, there was a little girl named Lily. She had a red ball, and gave it to"


class Bench:
    """Where things lie, and how a process is run."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.folder = arguments, arguments.environments.resolve()
        self.work = self.folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        out = arguments.out
        self.results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}

    def save(self, name: str, found: dict[str, Any]) -> None:
        """Into the file, row by row: a run that is interrupted leaves what it has."""
        self.results[name] = found
        write_json(self.arguments.out, {**self.results, **about(self.arguments)})

    def alone(self) -> AbstractContextManager[Any]:
        """Nobody else who asks for the same lock measures at the same time."""
        return FileLock(self.arguments.lock) if self.arguments.lock else nullcontext()

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment, which is made first where it is missing."""
        home = self.folder / peer
        python = home / "bin" / "python"
        if not python.exists():
            venv.create(home, with_pip=True)
            install = [python, "-m", "pip", "install", "--quiet", TORCH]
            subprocess.run([*install], check=True)
            subprocess.run([*install, *PACKAGES[peer]], check=True)
        return python

    def source(self, peer: str, git: Path) -> tuple[Path, str]:
        """A peer's own source, patched, and its commit."""
        target = self.folder / "sources" / peer.replace(", ", "-")
        base = ["git", "--git-dir", str(git)]
        commit = subprocess.run([*base, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        if not target.exists():
            subprocess.run(["git", "clone", "--quiet", str(git), str(target)], check=True)
            for name, old, new in PATCHES[peer]:
                text = (target / name).read_text()
                if old not in text:
                    raise ValueError(f"{name} of {peer} has no {old!r} any more: the patch needs another look")
                (target / name).write_text(text.replace(old, new))
        return target / "src", commit.stdout.strip()

    def run(self, worker: "Worker") -> Any:
        """What a worker finds that is asked once."""
        with worker:
            return worker()

    def ours(self, what: str, asked: dict[str, Any], data_gib: float = 0) -> "Worker":
        return Worker(self, Path(sys.executable), "run_ours.py", {"what": what, **asked}, None, data_gib)

    def rounds(self, ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, Any]:
        """Both in turn, several times: medians, all seconds, and how many times less ours took."""
        found: dict[str, list[Any]] = {"ours": [], "theirs": []}
        for _ in range(rounds):
            with self.alone():
                found["ours"].append(ours())
                found["theirs"].append(theirs())
        row: dict[str, Any] = {}
        for who, each in found.items():
            numbers = {
                k: statistics.median(one[k] for one in each) for k, v in each[0].items() if isinstance(v, int | float)
            }
            row[who] = {**numbers, "every_seconds": [one["seconds"] for one in each], "versions": each[0]["versions"]}
        for key in ("seconds", "wall_seconds", "work_mb", "peak_mb"):
            row[f"times_{key.removesuffix('_mb')}"] = round(row["theirs"][key] / max(row["ours"][key], 0.1), 2)
        times = {key: value for key, value in row.items() if key.startswith("times")}
        print(times, row["ours"]["seconds"], row["theirs"]["seconds"], flush=True)
        return row


class Worker:
    """A tool in a process of its own: loaded when entered, works once whenever called."""

    def __init__(
        self, bench: Bench, python: Path, script: str, asked: dict[str, Any], source: Path | None = None,
        data_gib: float = 0,
    ):  # fmt: skip
        """data_gib: the most it may allocate (RLIMIT_DATA); 0: no limit."""
        self.python, self.script, self.asked, self.data_gib = python, script, asked, data_gib
        self.timeout, threads = bench.arguments.timeout, str(bench.arguments.threads)
        own = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
        if python != Path(sys.executable):
            own["PYTHONPATH"] = str(source or "")
        self.environment = {**os.environ, **own}
        self.place = tempfile.TemporaryDirectory(dir=bench.work)

    def __enter__(self) -> "Worker":
        folder = Path(self.place.name)
        self.found, spec = folder / "found.json", folder / "spec.json"
        spec.write_text(json.dumps({**self.asked, "found": str(self.found)}))
        self.errors = (folder / "errors.txt").open("w+")
        self.process = subprocess.Popen(
            [self.python, SCRIPTS / self.script, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True, env=self.environment, preexec_fn=self._limit,
        )  # fmt: skip
        return self

    def __call__(self) -> Any:
        killer = threading.Timer(self.timeout, self.process.kill)
        killer.start()
        try:
            print(file=self.process.stdin, flush=True)
            if not any(line == "DONE\n" for line in iter(self.process.stdout.readline, "")):
                raise self._failed()
        except BrokenPipeError:
            raise self._failed() from None
        finally:
            killer.cancel()
        return json.loads(self.found.read_text())

    def _failed(self) -> RuntimeError:
        if self.process.wait() == -signal.SIGKILL:
            return RuntimeError(f"not done after {self.timeout:.0f} s")
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        said = next((line for line in reversed(lines) if "rror" in line), f"exit {self.process.returncode}")
        return RuntimeError(said[:200])

    def __exit__(self, *error: object) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        self.process.wait()
        self.errors.close()
        self.place.cleanup()

    def _limit(self) -> None:
        if self.data_gib:
            resource.setrlimit(resource.RLIMIT_DATA, (int(self.data_gib * 2**30),) * 2)


# ---- discover --------------------------------------------------------------------------------------------------------


def discover(bench: Bench) -> dict[str, Any]:
    """EAP and EAP-IG scores of all edges: the same numbers, how fast, in how much memory."""
    source, commit = bench.source("eap-ig", bench.arguments.eap_ig)
    midpoints, _ = bench.source("eap-ig, midpoints", bench.arguments.eap_ig)
    python = {peer: bench.python(peer) for peer in ("eap-ig", "transformer-lens")}
    small, large = ("stories15m", bench.arguments.models / "stories15m"), ("gpt2-shaped", gpt2(bench))
    found: dict[str, Any] = {"rows": [], "patches": PATCHES, "notes": DISCOVER_NOTES}
    for (name, model), n, peer, steps, path in (
        (small, 16, "eap-ig", 0, source), (large, 4, "eap-ig", 0, source), (small, 16, "eap-ig", 5, source),
        (small, 2, "transformer-lens", 0, None), (small, 16, "eap-ig", 5, midpoints),
        (large, 1, "transformer-lens", 0, None), (large, 4, "eap-ig", 5, source),
    ):  # fmt: skip
        asked = {"model": str(model), "prompts": str(ioi(bench, name, model, n)), "batch": n, "steps": steps}
        script = f"run_{peer.replace('-', '_')}.py"
        rounds = 1 if path == midpoints else bench.arguments.rounds  # its seconds are those of the row before
        row = scored(bench, asked, lambda spec: Worker(bench, python[peer], script, spec, path), rounds)  # noqa: B023
        method = ("EAP-IG" if steps else "EAP") + (", equal quadrature" if path == midpoints else "")
        named = {"peer": "EAP-IG 2.0", "commit": commit} if peer == "eap-ig" else {"peer": "TransformerLens"}
        found["rows"].append({**named, "model": name, "method": method, "steps": steps, **row})
        bench.save("discover", found)
    return found


DISCOVER_NOTES = [
    "EAP-IG takes gradients at 0, 1/5 ... 4/5 of the way from the corrupted to the clean prompt, sparselens at the "
    "middles 1/10 ... 9/10; equal quadrature: with the second patch EAP-IG takes the middles as well",
    "EAP-IG is handed token ids instead of text (its tokenize_plus is replaced while it runs), so that all tools read "
    "the same tokens",
    "TransformerLens takes the gradient on the run it calls corrupt and scores edges per position: it is called with "
    "both runs exchanged, its edges are negated and summed over positions; EAP-IG is not in 4.3",
    "gpt2-shaped: GPT-2 small's sizes and tokenizer, random weights",
]


def scored(bench: Bench, asked: dict[str, Any], their: Callable[[Any], Worker], rounds: int) -> dict[str, Any]:
    """Both tools' scores: what they cost and how far apart they are."""
    paths = [bench.work / f"{who}.scores" for who in ("ours", "theirs")]
    ours_spec, their_spec = ({**asked, "scores": str(path)} for path in paths)
    with bench.ours("discover", ours_spec) as ours, their(their_spec) as theirs:
        row = bench.rounds(ours, theirs, rounds)
    n, tokens = load_file(asked["prompts"])["clean"].shape
    return {"prompts": n, "tokens": tokens, **row, **agreement(*paths)}


def agreement(ours: Path, theirs: Path) -> dict[str, float]:
    """The largest difference of two score tables, relative to the largest score; the 100 best that are shared."""
    a, b = (load_file(path)["scores"].flatten() for path in (ours, theirs))
    best = [set(one.abs().topk(100).indices.tolist()) for one in (a, b)]
    return {
        "largest_difference": relative(b, a),
        "correlation": round(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), 6),
        "best_100_shared": len(best[0] & best[1]),
    }


def gpt2(bench: Bench) -> Path:
    """GPT-2 small's shape with random weights and its own tokenizer."""
    folder = bench.work / "gpt2-shaped"
    if not folder.exists():
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        AutoTokenizer.from_pretrained(bench.arguments.models / "gpt2-tokenizer").save_pretrained(folder)
    return folder


def ioi(bench: Bench, name: str, model: Path, n: int) -> Path:
    """n IOI prompts of one length and one-token answers, as tokens."""
    path = bench.work / f"ioi-{name}-{n}.safetensors"
    pairs = build(tasks.find("ioi"), AutoTokenizer.from_pretrained(model), 4 * n + 16, say=lambda text: None)
    chosen = of_common_length(pairs)[0].take(slice(0, n))
    if len(chosen) < n or chosen.right.shape[1:] != (1, 1) or chosen.wrong.shape[1:] != (1, 1):
        raise ValueError(f"{len(chosen)} prompts of one length with one answer token, {n} are needed")
    columns = {
        "clean": chosen.clean,
        "corrupted": chosen.corrupted,
        "right": chosen.right[:, 0, 0],
        "wrong": chosen.wrong[:, 0, 0],
    }
    save_file({key: value.contiguous() for key, value in columns.items()}, path)
    return path


# ---- trace -----------------------------------------------------------------------------------------------------------


def trace(bench: Bench) -> dict[str, Any]:
    """The attribution graph of a prompt with the same transcoder: same nodes, same edges, what it costs."""
    python, asked = bench.python("circuit-tracer"), traced(bench)
    found: dict[str, Any] = {
        "peer": "circuit-tracer 0.5.0", "model": "stories15m", "rows": [],
        "transcoder": coder_row(Path(asked["transcoder"])),
        "notes": [
            "circuit-tracer leaves out the features and errors of the first position: so does the comparison",
            "sparselens computes no rows for features that do not reach the target; the rows of both are compared",
            "circuit-tracer runs `batch` copies of the prompt at once: 512 is its default, 64 saves memory",
        ],
    }  # fmt: skip
    for budget, batch in ((None, 64), (500, 512), (500, 64)):
        both = [{**asked, "budget": budget, "batch": batch, "graph": None} for _ in range(2)]
        if budget is None:
            both = [
                {**one, "graph": str(bench.work / who)}
                for one, who in zip(both, ("ours.graph", "theirs.graph"), strict=True)
            ]
        with bench.ours("trace", both[0]) as ours, Worker(bench, python, "run_circuit_tracer.py", both[1]) as theirs:
            row = bench.rounds(ours, theirs, bench.arguments.rounds)
        same = same_graph(bench) if budget is None else {}
        found["rows"].append({"budget": budget or "all", "batch": batch, "tokens": len(asked["ids"]), **row, **same})
        bench.save("trace", found)
    return found


def coder_row(folder: Path) -> dict[str, Any]:
    """What the transcoder is, and how good."""
    config = json.loads((folder.parent / "run.json").read_text())["config"]
    results = json.loads((folder.parent / "results.json").read_text())
    kept = {key: config[key] for key in ("features", "cross_layer", "activation", "steps", "batch")}
    return {**kept, **{key: results[key] for key in ("tokens", "fvu", "l0", "loss_recovered")}}


def traced(bench: Bench) -> dict[str, Any]:
    """Model, transcoder and prompt."""
    model = bench.arguments.models / "stories15m"
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer.bos_token_id, *tokenizer.encode(STORY, add_special_tokens=False)]
    coder = bench.arguments.transcoder or trained(bench, model)
    return {"model": str(model), "transcoder": str(coder), "ids": ids}


def trained(bench: Bench, model: Path) -> Path:
    """A cross-layer transcoder trained for minutes on the stories of the package."""
    out = bench.work / "transcoder-run"
    if not (out / "results.json").exists():
        loaded = sl.load(str(model))
        text = write_text(bench.work / "text", say=lambda said: None)
        sl.transcode(loaded, data=[str(text)], out=out, features=1024, steps=200, batch=8, length=128,
                     evaluate_sequences=16, evaluate_every=200, checkpoint_every=200)  # fmt: skip
    return out / "transcoder"


def same_graph(bench: Bench) -> dict[str, Any]:
    """Nodes and edges of both graphs, put beside each other by what they are: (layer, position, feature) and so on."""
    ours, theirs = (load_file(bench.work / f"{who}.graph") for who in ("ours", "theirs"))
    n_layers, n_tokens = int(ours["layer"].max()), int(ours["position"].max()) + 1
    features = [tuple(row) for row in theirs["features"][theirs["selected"]].tolist()]
    errors = [("error", layer, position) for layer in range(n_layers) for position in range(n_tokens)]
    names = [
        *features,
        *errors,
        *(("token", p) for p in range(n_tokens)),
        *(("logit", t) for t in theirs["logits"].tolist()),
    ]
    place = {name: i for i, name in enumerate(names)}

    def name_of(i: int) -> tuple:
        kind, layer, position, index = (int(ours[key][i]) for key in ("kind", "layer", "position", "index"))
        return {
            0: (layer, position, index),
            1: ("error", layer, position),
            2: ("token", position),
            5: ("logit", index),
        }.get(kind, ())

    own = [name_of(i) for i in range(len(ours["kind"]))]
    own_features = {name for name, kind in zip(own, ours["kind"].tolist(), strict=True) if kind == 0 and name[1] > 0}
    dense, both = torch.zeros_like(theirs["weights"]), torch.zeros(len(names), dtype=torch.bool)
    columns = torch.tensor([place.get(name, -1) for name in own])
    for row, target in enumerate(ours["row_target"].tolist()):
        if own[target] not in place:
            continue
        both[place[own[target]]] = True
        part = slice(int(ours["first"][row]), int(ours["first"][row + 1]))
        to = columns[ours["source"][part]]
        dense[place[own[target]], to[to >= 0]] = ours["weight"][part][to >= 0].to(dense)
    dense[:, [place["error", layer, 0] for layer in range(n_layers)]] = 0  # nodes of ours alone
    theirs_too = theirs["weights"][both]
    shared = own_features & set(features)
    values = dict(zip(features, theirs["values"].tolist(), strict=True))
    own_values = {name: float(ours["value"][i]) for i, name in enumerate(own) if name in shared}
    return {
        "nodes_shared": len(shared), "nodes_of_ours_alone": len(own_features - shared),
        "nodes_of_theirs_alone": len(set(features) - shared), "rows_compared": int(both.sum()),
        "edges": int((theirs_too != 0).sum()), "largest_edge_difference": relative(dense[both], theirs_too),
        "largest_activation_difference": relative(
            torch.tensor([own_values[name] for name in sorted(shared)]),
            torch.tensor([values[name] for name in sorted(shared)]),
        ),
    }  # fmt: skip


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    return float(f"{float((a - b).abs().max() / b.abs().max()):.2e}")


def longest(bench: Bench) -> dict[str, Any]:
    """Longer and longer prompts, until a process needs more than the limit: what each length took, per tool."""
    python, asked, limit = bench.python("circuit-tracer"), traced(bench), bench.arguments.data_gib
    asked |= {"model": str(stretched(bench, asked["model"])), "budget": 100, "graph": None}
    found: dict[str, Any] = {
        "peer": "circuit-tracer 0.5.0", "limit_gib": limit, "budget": 100,
        "notes": [
            "stories15m with more positions than it was trained for (rotary); the story again and again, doubled until "
            "the process would allocate more than the limit (RLIMIT_DATA)",
        ],
    }  # fmt: skip
    for who, batch in (("ours", 0), ("theirs, batch 64", 64), ("theirs, batch 512", 512)):
        steps: list[dict[str, Any]] = found.setdefault(who, [])
        for tokens in (32, 64, 128, 256, 512, 1024, 2048):
            story = asked["ids"][1:] * (tokens // 16)
            spec = {**asked, "ids": [asked["ids"][0], *story[: tokens - 1]], "batch": batch}
            ours = bench.ours("trace", spec, limit)
            worker = Worker(bench, python, "run_circuit_tracer.py", spec, None, limit) if batch else ours
            try:
                cost = bench.run(worker)
            except RuntimeError as error:
                steps.append({"tokens": tokens, "fits": False, "why": str(error)})
                break
            steps.append({"tokens": tokens, "fits": True, **{k: v for k, v in cost.items() if k != "versions"}})
            print(who, steps[-1], flush=True)
            bench.save("longest", found)
    return found


def stretched(bench: Bench, model: str) -> Path:
    """The model with more positions."""
    folder = bench.work / "stories15m-long"
    if not folder.exists():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        loaded.config.max_position_embeddings = 4096
        loaded.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


# ---- transcode -------------------------------------------------------------------------------------------------------


class Training:
    """The same transcoder by either trainer: sparsity is in each one's own unit."""

    def __init__(self, bench: Bench):
        self.bench, self.python = bench, bench.python("clt-forge")
        self.source, self.commit = bench.source("clt-forge", bench.arguments.clt_forge)
        model = bench.arguments.models / "stories15m"
        self.settings = {"features": 1024, "batch": 8, "length": 128, "lr": 1e-3}
        self.asked = {**documents(bench, model), "model": str(model), **self.settings}

    def run(self, who: str, steps: int, sparsity: float, **changed: float) -> Any:
        folder = self.bench.work / f"trained-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        spec = {**self.asked, **changed, "steps": steps, "sparsity": sparsity, "folder": str(folder)}
        if who == "ours":
            return self.bench.run(self.bench.ours("transcode", spec))
        return self.bench.run(Worker(self.bench, self.python, "run_clt_forge.py", spec, self.source))

    def about(self) -> dict[str, Any]:
        return {
            "peer": "CLT-Forge", "commit": self.commit, "model": "stories15m", "settings": self.settings,
            "patches": PATCHES["clt-forge"],
            "notes": [
                "equal: model, text, tokens per step, features, cross-layer decoders, JumpReLU with the tanh penalty, "
                "16 features active at the start, Adam (0.9, 0.99), learning rate and its schedule, activations "
                "computed while training; thresholds, bandwidth, initial weights and the rest are each one's own",
                "sparsity is in each one's own unit; FVU and L0 belong together",
                "CLT-Forge reads the MLP's input before the norm's gain, sparselens after it",
            ],
        }  # fmt: skip


def train_speed(bench: Bench) -> dict[str, Any]:
    """Tokens per second of transcoder training, the model's forward pass included."""
    training, few, many = Training(bench), 2, 8

    def steps(who: str, sparsity: float) -> dict[str, Any]:
        """Of the steps alone: what more of them take, so that preparing and finishing do not count."""
        short, long = (training.run(who, n, sparsity) for n in (few, many))
        tokens = (many - few) * training.settings["batch"] * training.settings["length"]
        return {**long, "tokens_per_second": round(tokens / (long["seconds"] - short["seconds"]))}

    row = bench.rounds(lambda: steps("ours", 0.005), lambda: steps("theirs", 2.0), bench.arguments.rounds)
    row["times_tokens_per_second"] = round(row["ours"]["tokens_per_second"] / row["theirs"]["tokens_per_second"], 2)
    return {**training.about(), "steps": [few, many], **row}


def train_fit(bench: Bench) -> dict[str, Any]:
    """FVU and L0 on held-out stories after equal tokens."""
    training, steps, rows = Training(bench), bench.arguments.steps, []
    own_lr = {"lr": 4e-4}  # of its GPT-2 runner
    for who, sparsity, changed in (
        ("theirs", 2.0, {}), ("ours", 0.005, {}), ("theirs", 2.0, own_lr), ("theirs", 0.5, {}),
    ):  # fmt: skip
        found = training.run(who, steps, sparsity, **changed)
        settings = {"sparsity": sparsity, "lr": changed.get("lr", training.settings["lr"]), "tokens": steps * 1024}
        rows.append({"who": who, **settings, **{key: found[key] for key in ("fvu", "l0", "versions")}})
        print(rows[-1], flush=True)
        bench.save("train_fit", {**training.about(), "rows": rows})
    return {**training.about(), "rows": rows}


def documents(bench: Bench, model: Path) -> dict[str, str]:
    """Stories to train on, as text and as tokens, and sequences of others to measure on."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = bench.work / "text"
    path = next(folder.glob("*.zst"), None) or write_text(folder, say=lambda said: None)
    texts = [text for text, _ in read_documents(path)]
    kept = texts[: len(texts) * 9 // 10]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    first = tokenizer.bos_token_id
    tail = [[first, *ids][:128] for ids in encoded[len(kept) :] if len(ids) >= 127][:64]
    (bench.work / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    (bench.work / "train.json").write_text(json.dumps([[first, *ids] for ids in encoded[: len(kept)]]))
    save_file({"tokens": torch.tensor(tail)}, bench.work / "heldout.safetensors")
    names = {"text": "train.jsonl", "documents": "train.json", "heldout": "heldout.safetensors"}
    return {key: str(bench.work / name) for key, name in names.items()}


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(bench: Bench) -> dict[str, Any]:
    """The authors' kernel beside ours. It compiles for CUDA alone."""
    if not torch.cuda.is_available():
        return {
            "peer": "splash_attention (Helion)",
            "not_measured": "no CUDA device: the kernel is Helion's, which compiles for GPUs",
        }
    return {
        "peer": "splash_attention (Helion)",
        "not_measured": "no environment for it is made here yet; see benchmarks/attention.py for ours",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparisons = {one.__name__: one for one in (discover, trace, longest, train_speed, train_fit, attention)}
    parser.add_argument("comparisons", nargs="*", default=list(comparisons))
    parser.add_argument(
        "--models", type=Path, default=Path("../shared/models"), help="holds stories15m and gpt2-tokenizer"
    )
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--eap-ig", type=Path, help="git directory of hannamw/EAP-IG")
    parser.add_argument("--clt-forge", type=Path, help="git directory of LLM-Interp/CLT-Forge")
    parser.add_argument("--transcoder", type=Path, help="of stories15m, for trace; trained first where there is none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of train_fit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process")
    parser.add_argument("--data-gib", type=float, default=6, help="for the longest prompt")
    parser.add_argument("--lock", type=Path, help="a file to lock around each round, on a machine that is shared")
    parser.add_argument("--out", type=Path, default=Path("results/peers.json"))
    arguments = parser.parse_args()
    unknown = set(arguments.comparisons) - set(comparisons)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(comparisons)}")
    bench = Bench(arguments)
    for name in arguments.comparisons:
        try:
            found = comparisons[name](bench)
        except (RuntimeError, subprocess.SubprocessError) as error:  # one peer that fails does not end the others
            found = {**bench.results.get(name, {}), "not_measured": str(error)[:300]}
            print(name, found, flush=True)
        bench.save(name, found)


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """How it was made."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    made = provenance()
    return {
        "command": "python benchmarks/peers.py --eap-ig GIT --clt-forge GIT",
        "hardware": f"{os.cpu_count()} CPU cores, {memory:.0f} GiB; {arguments.threads} thread each",
        "host": {"cores": os.cpu_count(), "memory_gib": round(memory, 1), "machine": platform.machine()},
        "seeds": "0 (prompts, random weights)", "rounds": arguments.rounds, "versions": made["versions"],
        "python": made["python"], "commit": made["commit"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
