# %% [markdown]
# # Ten minutes with sparselens
#
# Load a model, close most of its attention edges, look at what is left. On a laptop this takes some minutes with a
# small model; nothing is downloaded but the model itself.
#
# In Colab: upload the wheel (`pip wheel --no-deps .` in a clone makes it), then run
# `%pip install sparselens-0.1.0-py3-none-any.whl` in a cell before this one.

# %%

import sparselens as sl

MODEL = "gpt2"  # a Hugging Face name, a folder, a Run or a .gguf file; any small decoder of a supported family
model, tokenizer = sl.load(MODEL)
model.set_attn_implementation("eager")  # the attention of transformers that gives its patterns away

# %% [markdown]
# ## Before
#
# A model stays what it was: a `PreTrainedModel`. Every head reads every earlier token, at least a little.

# %%
PROMPT = "Once upon a time, there was a little girl named Lily."
inputs = tokenizer(PROMPT, return_tensors="pt")
patterns = model(**inputs, output_attentions=True).attentions  # per layer: [batch, heads, queries, keys]
n_layers, n_heads, n_tokens = len(patterns), patterns[0].shape[1], patterns[0].shape[2]
edges = sum(int((layer > 0).sum()) for layer in patterns)
print(f"{n_layers} layers x {n_heads} heads, {n_tokens} tokens: {edges:,} edges carry something")

# %% [markdown]
# ## Make it sparse
#
# Some text first: short stories that come with the package. (Of your own: any .txt, .jsonl or .parquet file.) Then a
# few steps, far too few for a model to publish: they show the walk. `sparselens plan MODEL` says what a real run needs;
# leave out what is set here and you get one.

# %%
sl.write_text("text")
run = sl.sparsify(
    MODEL,
    data="text",
    out="runs/ten-minutes",
    steps=40,
    batch=8,
    length=64,
    bias_lr=0.2,
    density=0.1,
    lr=1e-4,
    heldout_tokens=8192,
    evaluate_every=20,
    evaluate_sequences=8,
    show_progress=False,
)

# %% [markdown]
# What came out is a *Run*: a folder with the model, what was asked, what was measured. It shows itself:

# %%
run

# %% [markdown]
# ## After
#
# The same prompt. A closed edge is exactly 0, not nearly.

# %%
sparse, _ = sl.load(run)
after = sparse(**inputs, output_attentions=True).attentions
left = sum(int((layer > 0).sum()) for layer in after)
print(f"{left:,} of {edges:,} edges are left: {left / edges:.0%}")

# %% [markdown]
# One head, before and after: rows read, columns are read.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(8, 4))
for axis, title, layers in zip(axes, ("before", "after"), (patterns, after), strict=True):
    axis.imshow(layers[n_layers // 2][0, 0].detach(), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"layer {n_layers // 2}, head 0, {title}")
plt.show()

# %% [markdown]
# ## Is it still the same model?
#
# Loss and KL on text that was held out, in one table. With `control=True` above there would be a third row: the same
# training without gates, which is the honest thing to compare with.

# %%
rows = sl.evaluate(run)

# %% [markdown]
# ## One page of everything
#
# A single HTML file that works offline. Open it in a browser.

# %%
page = sl.report(run)
print(page)
