"""What a Run says about itself to whoever shows it: about.json in its folder, anybody's Run, all of it optional.

{"name": "The addition model", "task": "addition", "exact": true, "filled": 5, "prompts": ["36+28=?????"]}
"""

from dataclasses import dataclass, field

from .run import Run


@dataclass(frozen=True)
class About:
    """about.json; what it leaves out is as here."""

    name: str = ""  # who a headline speaks of; "": the model's name
    task: str = ""  # a registered task, whose prompts people may type; "": any text is a prompt
    exact: bool = False  # exactly right sequences mean something
    filled: int = 0  # the answer stands at so many last tokens of a prompt; 0: it follows the prompt
    prompts: list[str] = field(default_factory=list)  # to look at attention with; none: the built-in ones


def about(run: Run) -> About:
    """The Run's about.json; where there is none, nothing special."""
    path, nothing = run.path / "about.json", vars(About())
    found = run.find("about.json", {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object")
    for key, usual in nothing.items():
        if type(found.get(key, usual)) is not type(usual):
            raise ValueError(f"{path}: {key} is {found[key]!r}; expected something like {usual!r}")
    if not all(isinstance(prompt, str) for prompt in found.get("prompts", [])):
        raise ValueError(f"{path}: prompts holds something that is no text")
    return About(**{key: found[key] for key in nothing.keys() & found.keys()})
