"""Tasks: clean/corrupted prompt pairs with an answer, for any tokenizer.

A task is a function (rng, words) -> Pair, registered under a name. Yours takes ten lines:

    import sparselens as sl

    @sl.register_task("capital")
    def capital(rng, words):
        (country, city), (other, other_city) = rng.sample([("France", "Paris"), ("Italy", "Rome")], 2)
        return sl.Pair(f"The capital of {country} is", f"The capital of {other} is", f" {city}", f" {other_city}")

Lengths, answer tokens and positions are worked out and checked for every pair before anything runs (prompts.py).

Imports models.
"""

from .registry import Metric, Pair, Score, Task, Tasks, find, find_all, names, register_task

__all__ = ["Metric", "Pair", "Score", "Task", "Tasks", "find", "find_all", "names", "register_task"]
