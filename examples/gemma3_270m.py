"""Gemma-3-270m with one attention edge in two hundred: smollm2_135m.py for a model of 18 layers and 262,144 tokens.

    python examples/gemma3_270m.py MODEL --data prose.txt code.txt --heldout prose-val.txt code-val.txt \\
        --unseen other.txt --out runs/gemma3-270m --json results/gemma3-270m.json

MODEL: a folder, google/gemma-3-270m or a .gguf file. Five layers of six see the last 512 tokens alone. Logits are the
largest thing in memory (256 MiB a sequence in bf16, several times over), hence few sequences at a time (16
by default). A learning rate of 6e-4 throws it off; 1e-4 does not. Published (docs/results.md): --steps 800 --batch 64
--micro-batch 32, 10 minutes of an H200 for the pair.
"""

from smollm2_135m import main

if __name__ == "__main__":
    main(__doc__, micro_batch=16, lr=1e-4)
