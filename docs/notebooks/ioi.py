# %% [markdown]
# # Indirect objects, step by step
#
# "When Mary and John went to the store, John gave a drink to" → " Mary". Which attention edges does a model need for
# that, and how many fewer does a sparse one need?

# %%
import sparselens as sl

DENSE = "gpt2"  # or any small model that can do the task
model, tokenizer = sl.load(DENSE)

# %% [markdown]
# ## 1. The task
#
# A task is pairs of prompts. The corrupted one differs in the one thing that matters, and has another answer.

# %%
import random

from sparselens import tasks
from sparselens.tasks.registry import Words

ioi = tasks.find("ioi")
words, rng = Words(tokenizer), random.Random(0)
for _ in range(3):
    pair = ioi.generate(rng, words)
    print(f"{pair.clean!r} ->{pair.answer!r}\n{pair.corrupted!r} ->{pair.wrong!r}\n")

# %% [markdown]
# ## 2. The circuit of the dense model
#
# `removed` asks for the fewest attention edges (head, query, key) of a prompt that do it alone, all others taken out.
# Prompts that the model gets wrong are left out, and it says how many those were.

# %%
PROMPTS = 16  # more for a result, fewer for a look
circuit = sl.discover((model, tokenizer), task="ioi", prompts=PROMPTS, readings="removed")
circuit

# %%
row = circuit.results["readings"]["removed"]
for threshold, edges in row["edges_at"].items():
    low, high = row["edges_at_interval"][threshold]
    print(f"{float(threshold):.0%} of the effect: {edges:,.0f} of {row['n_edges']:,} edges ({low:,.0f} to {high:,.0f})")

# %% [markdown]
# ## 3. A sparse model to compare with
#
# A few steps on the stories of the package, for show. A real one takes the defaults and a GPU.

# %%
sl.write_text("text")
run = sl.sparsify(
    DENSE,
    data="text",
    out="runs/ioi",
    control=True,
    steps=30,
    batch=8,
    length=64,
    bias_lr=0.2,
    density=0.2,
    lr=1e-4,
    heldout_tokens=8192,
    evaluate_every=15,
    evaluate_sequences=8,
    show_progress=False,
)

# %% [markdown]
# ## 4. Both on the same prompts
#
# The Run brings its control along. Taught by the base, as here, the control is the base itself. With
# `loss="cross-entropy"` it is a dense model with the same further training: only what the sparse model needs less than
# *that* is due to sparsity.

# %%
result = sl.compare((model, tokenizer), run, "ioi", prompts=PROMPTS, readings="removed")
for baseline, thresholds in result["tasks"]["ioi"]["multipliers"]["removed"].items():
    m = thresholds["0.9"]
    interval = f"{m['low']:.1f} to {m['high']:.1f}, n = {m['n_prompts']}"
    print(f"against {baseline}: {m['multiplier']:.1f}x fewer edges ({interval})")

# %% [markdown]
# An interval that holds 1 says nothing, and after twenty steps it should. docs/results.md has models that were trained
# for longer; docs/circuits.md says what else one may ask (`share`, `heads`, `learnt`, `components`).
