# %% [markdown]
# # Bring your own task and model
#
# Your pairs as a file, your pairs as a function, your model as a folder.

# %%
import json
from pathlib import Path

import sparselens as sl

MODEL = "gpt2"  # a folder of yours works as well: config.json, safetensors, tokenizer.json
model, tokenizer = sl.load(MODEL)

# %% [markdown]
# ## Will it work?
#
# The largest difference of any logit, between transformers and what circuits are made with. A family that is not
# supported says so here; docs/extending.md shows how to add one in a call.

# %%
from sparselens.evaluation.parity import parity

rows = parity([MODEL])

# %% [markdown]
# ## A task as a file
#
# One JSON object per line. Both prompts need the same number of tokens, and answers their leading space.

# %%
PAIRS = [
    ("The cat sat on the", "The cat ran to the", " mat", " dog"),
    ("One two three", "One two one", " four", " two"),
    ("The sky is very", "The sea is very", " blue", " deep"),
    ("She ate the red", "She ate the big", " apple", " cake"),
    ("He went to the", "He ran from the", " park", " dog"),
]
names = ("clean", "corrupted", "answer", "wrong")
with Path("mine.jsonl").open("w") as file:
    for pair in PAIRS:
        file.write(json.dumps(dict(zip(names, pair, strict=True))) + "\n")

# %% [markdown]
# Five pairs are too few to find a circuit with, and the model may not get them right: what cannot be done is said in a
# sentence.

# %%
try:
    sl.discover((model, tokenizer), task="mine.jsonl", prompts=4, readings="removed")
except ValueError as problem:
    print(problem)

# %% [markdown]
# ## A task as a function
#
# As many pairs as anybody asks for. `words.alike` picks words of one length in tokens, so that swapping them keeps a
# prompt's length. Here: the word that has just been said is likely to be said again.

# %%
NAMES = ("Lily", "Tom", "Ben", "Sam", "Max", "Tim", "Mia", "Sue", "Anna", "Jack", "Lucy", "Emma")


@sl.register_task("said-again")
def said_again(rng, words):
    first, other = rng.sample(words.alike(NAMES), 2)
    return sl.Pair(
        f"{first} and {other} met. {first} and", f"{other} and {first} met. {other} and", f" {other}", f" {first}"
    )


# %% [markdown]
# Now it has a name that every verb knows, and the command line, too, where the file is imported.

# %%
circuit = sl.discover((model, tokenizer), task="said-again", prompts=12, readings=("removed", "components"))
circuit

# %%
print(f"{circuit.n_edges} edges between components do 90 % of it; the strongest:")
for name, score in circuit.edges[:8]:
    print(f"  {name:24}{score:+.3f}")

# %% [markdown]
# ## Gates in a model of your own
#
# `sl.add_gates` puts them in, wide open or not; training is yours. What `sl.save` writes, `sl.load` brings back sparse,
# and nothing else loads it dense without a word.

# %%
mine, _ = sl.load(MODEL)
sl.add_gates(mine, sl.Gate(bias=1.0))
sl.save(mine, tokenizer, "my-sparse-model")
again, _ = sl.load("my-sparse-model")
print(type(again).__name__, "with", sum(p.numel() for n, p in again.named_parameters() if "gate_bias" in n), "gates")
