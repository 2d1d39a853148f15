"""What a Run says about itself to whoever shows it: about.json in its folder, anybody's Run, all of it optional.

{"name": "The addition model", "task": "addition", "exact": true, "filled": 5, "prompts": ["36+28=?????"]}
"""

from typing import TypedDict, cast

from .run import Run


class About(TypedDict):
    """about.json with what it leaves out filled in."""

    name: str  # who a headline speaks of; "": the model's name
    task: str  # a registered task, whose prompts people may type; "": any text is a prompt
    exact: bool  # exactly right sequences mean something
    filled: int  # the answer stands at so many last tokens of a prompt; 0: it follows the prompt
    prompts: list[str]  # to look at attention with; none: the built-in ones


NOTHING = About(name="", task="", exact=False, filled=0, prompts=[])


def about(run: Run) -> About:
    """The Run's about.json; where there is none, nothing special."""
    path = run.path / "about.json"
    if not path.is_file():
        return NOTHING
    found = run.read("about.json")
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object")
    for key, usual in NOTHING.items():
        if type(found.get(key, usual)) is not type(usual):
            raise ValueError(f"{path}: {key} is {found[key]!r}; expected something like {usual!r}")
    if not all(isinstance(prompt, str) for prompt in found.get("prompts", [])):
        raise ValueError(f"{path}: prompts holds something that is no text")
    return cast(About, {key: found.get(key, usual) for key, usual in NOTHING.items()})
