"""One of everything on tiny models, and a fingerprint of all it wrote: equal before and after a change that tidies.

    python tests/golden.py FOLDER             run every command inside FOLDER, write FOLDER/golden.json
    python tests/golden.py FOLDER OTHER.json  the same, then say what differs from another run; exit code 1 if anything

JSON is compared without times and provenance, tensors bit by bit, pictures byte by byte, reports by what is embedded in
them. Where a file's shape changes but not its numbers, the difference is called "shape only". Fingerprints hold on one
machine and one set of versions: run both sides on the same one. Uses the command line alone, so that modules may move.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

TIMES = {"provenance", "seconds", "minutes", "tokens_per_second", "peak_gib", "stamp", "cache", "sources", "commands"}
QUICK = ["--length", "16", "--batch", "2", "--steps", "20", "--evaluate-every", "10", "--heldout-tokens", "300"]
CACHE, SMALL = ["--cache", "cache"], ["--features", "16", "--k", "4"]
SEARCH = ["--prompts", "12", "--points", "4", "--steps", "2"]
ASK = ["--prompt", "w3 w5 w8 w13 w21 w3 w9"]
COMMANDS = [
    ("sparsify base --data text.txt --out run --control --lr 1e-4", [*QUICK, *CACHE]),
    ("sparsify gemma --data text.txt --out tight --density None --loss cross-entropy --lora 2", [*QUICK, *CACHE]),
    ("sparsify base --data text.txt --out muon --optimizer muon --target control --micro-batch 1", [*QUICK, *CACHE]),
    ("evaluate run tight --json rows.json", []),
    ("evaluate run --data text.txt --behaviour said --tasks pairs.jsonl --json again.json", []),
    ("evaluate base run/model --data text.txt --sequences 4", []),
    ("transcode run --data text.txt --out coder --features 16 --k 4 --normalise-over 1", [*QUICK, *CACHE]),
    ("transcode base --data text.txt --out topk --activation topk --no-cross-layer", [*QUICK, *CACHE, *SMALL]),
    ("transcode gemma --data text.txt --out batch --activation batchtopk --reads residual", [*QUICK, *CACHE, *SMALL]),
    ("discover base --task pairs.jsonl --out circuits/plain --json plain.json", SEARCH),
    ("discover base --task pairs.jsonl --out circuits/exact --method exact --readings components", SEARCH),
    ("discover base --task pairs.jsonl --out circuits/zero --method eap --ablation zero --selection greedy", SEARCH),
    ("discover gemma --task gemma.jsonl --out circuits/own --path own --selection heads --signed", SEARCH),
    ("discover gemma --task gemma.jsonl --out circuits/mean --method exact --ablation mean", SEARCH),
    ("compare base run --tasks pairs.jsonl --out run/circuits --json multipliers.json", SEARCH),
    ("trace run --transcoder coder --out run/trace --checks 3 --against base --against-transcoder topk", ASK),
    ("trace gemma --transcoder batch --out gtrace --checks 3", ASK),
    ("trace run --transcoder coder --out edited --clusters run/trace/clusters.json", ASK),
    ("report run", ["--prompt", "w1 w2 w3"]),
    ("figures run --format svg --out drawn", []),
    ("export run --out exported", []),
    ("plan base --gpus 1 --gpu-memory 80 --tokens-per-second 1000", QUICK),
    ("demo --out toy", []),
]  # fmt: skip


def prepare() -> None:
    """base and gemma (models), text.txt, pairs.jsonl and gemma.jsonl (prompts each model answers as the pair says)."""
    import torch
    from tiny_models import tiny_model, tiny_tokenizer

    import sparselens as sl

    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer()
    documents = (" ".join(f"w{(i * j + j) % 62}" for j in range(40)) for i in range(200))
    Path("text.txt").write_text("\n<|endoftext|>\n".join(documents))
    for family, folder, file in (("gpt2", "base", "pairs.jsonl"), ("gemma3_text", "gemma", "gemma.jsonl")):
        model = tiny_model(family)
        sl.save(model, tokenizer, folder)
        torch.manual_seed(1)
        words = torch.randint(2, 64, (800, 2, 6))
        words[:, 1, 3:] = words[:, 0, 3:]
        start = torch.zeros(800, 1, dtype=torch.long)
        with torch.no_grad():
            clean, other = (model(torch.cat([start, words[:, i]], 1)).logits[:, -1] for i in (0, 1))
        answer, wrong = clean[:, 2:].argmax(-1) + 2, other[:, 2:].argmax(-1) + 2
        surest = ((clean - other).gather(1, answer[:, None]) + (other - clean).gather(1, wrong[:, None]))[:, 0]
        rows = []
        for i in surest.argsort(descending=True)[:80].tolist():
            texts = [" ".join(f"w{word - 2}" for word in line) for line in words[i].tolist()]
            answers = f" w{answer[i] - 2}", f" w{wrong[i] - 2}"
            rows.append(dict(zip(("clean", "corrupted", "answer", "wrong"), (*texts, *answers), strict=True)))
        Path(file).write_text("\n".join(map(json.dumps, rows)))


def shorten_demo() -> None:
    """The demo's real settings take minutes; the same walk with a few steps of each."""
    import dataclasses
    from importlib import import_module

    module = import_module("sparselens.demo.walk")
    few = {"steps": 60, "evaluate_every": 20}
    module.DENSE = dataclasses.replace(module.DENSE, **few, batch=64)
    module.SPARSE = dataclasses.replace(
        module.SPARSE, training=dataclasses.replace(module.SPARSE.training, **few, batch=32)
    )
    module.FEATURES = dataclasses.replace(module.FEATURES, steps=20, features=16, batch=16)


def run_all() -> dict[str, str]:
    """What every command printed, times left out."""
    from sparselens.cli import main

    shorten_demo()
    said = {}
    for line, more in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main([*line.split(), *more])
            except SystemExit as end:
                if end.code:
                    out.write(f"exit code {end.code}: {err.getvalue()[-500:]}")
        text = re.sub(
            r"[\d.,]+( s\b| of [\d.]+ free| MB\)|\s*minutes| GiB free| GB free| free)", r"N\1", out.getvalue()
        )
        said[f"says: {line}"] = text.replace(str(Path.cwd()), "")
        print(f"{line[:100]}: {len(text)} characters", flush=True)
    return said


def fingerprints() -> dict[str, list[str]]:
    """file -> [what it holds, its numbers and texts whatever their place]."""
    found = {}
    for path in sorted(Path().rglob("*")):
        # Text is cached under a name that knows its time; checksums.json covers times as well.
        if path.is_file() and path.name not in ("golden.json", "checksums.json") and "cache" not in path.parts[0]:
            for name, value in pieces(path):
                leaves = sorted(map(repr, leaves_of(value)))
                found[name] = [digest(json.dumps(value, sort_keys=True)), digest("\n".join(leaves))]
    return found


def pieces(path: Path):
    if path.suffix == ".json":
        value = clean(json.loads(path.read_text()))
        if path.name == "adapter_config.json":
            value["target_modules"].sort()  # a set
        yield str(path), value
    elif path.suffix == ".jsonl":
        yield str(path), [clean(json.loads(line)) for line in path.read_text().splitlines()]
    elif path.suffix == ".html":
        data = re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", path.read_text(), re.S)
        yield str(path), clean(json.loads(data[1]))
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        for name, tensor in load_file(path).items():
            import torch

            raw = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
            yield f"{path}:{name}", digest(bytes(raw.numpy().tobytes())) + str(tensor.shape)
    elif path.suffix in (".png", ".md", ".txt", ".yaml"):
        yield str(path), digest(path.read_bytes())


def clean(value):
    """Without times, provenance and the name of this folder."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value.replace(str(Path.cwd()), "") if isinstance(value, str) else value


def leaves_of(value) -> list:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves_of(item)]
    return [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, list) else [value]


def digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def differences(ours: dict, theirs: dict) -> list[str]:
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            lines.append(f"{'new' if name in ours else 'gone'}: {name}")
        elif ours[name] != theirs[name]:
            same = isinstance(ours[name], list) and ours[name][1] == theirs[name][1]
            lines.append(f"{'shape only' if same else 'CHANGED'}: {name}")
    return lines


def golden(folder: Path, other: Path | None) -> int:
    folder.mkdir(parents=True)
    before = json.loads(other.read_text()) if other else None
    with contextlib.chdir(folder):
        prepare()
        said = run_all()
        found = said | fingerprints()
        Path("golden.json").write_text(json.dumps(found, indent=1))
    print(f"{len(found)} fingerprints")
    lines = [] if before is None else differences(found, before)
    print("\n".join(lines) if lines else "no difference" if before else "written")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(golden(Path(sys.argv[1]), Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else None))
